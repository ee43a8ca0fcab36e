"""templates: rendered as engines render them, which is with jinja2; refusals that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.tokenization.small import CHATML, TEMPLATES
from tests.unit import examples
from waymark.base.errors import InvalidValue
from waymark.chat.openai import for_template
from waymark.tokenization.prompt import ChatPrompt
from waymark.tokenization.templates import ChatTemplate, dates_of, takes_parts

# Chat templates are rendered in a process of their own.
pytestmark = pytest.mark.outside

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MAX = 2**20

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Where <it> is & how warm, é",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome"], "default": "Rome"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "exact": {"type": ["boolean", "null"]},
                },
                "required": ["city"],
            },
        },
    }
]


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), SPECIAL, bytes_max=MAX)


class Refused(Exception):
    """The template called ``raise_exception``."""


@cache
def template_of_jinja2(text: str) -> Template:
    """The template with the library and the options of transformers."""

    def refuse(message: str) -> str:
        raise Refused(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(text)


def by_jinja2(text: str, prompt: ChatPrompt) -> str:
    return template_of_jinja2(text).render(
        messages=for_template(prompt.messages, takes_parts=takes_parts(text)),
        tools=prompt.tools,
        documents=None,
        add_generation_prompt=prompt.add_generation_prompt,
        **SPECIAL,
        **prompt.template_kwargs,
    )


def outcome(render: Callable[[], str]) -> str | None:
    """The text, or None where the template refuses the messages."""
    try:
        return render()
    except Refused:
        return None
    except InvalidValue as error:
        if "refuses the messages" not in error.sentence:
            raise
        return None


texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["  x ", "\n\n", "<think>\na\n</think>\n\nb", "{{ x }}", "a\r\nb", "é<&'\""])
)
calls = st.builds(
    lambda number, arguments: [
        {"id": f"call{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    ],
    st.integers(0, 9),
    st.one_of(
        st.dictionaries(
            st.sampled_from(["city", "days", "é"]), st.one_of(texts, st.integers(), st.booleans(), st.none())
        ),
        st.just('{"city": "Rome", "days": [1, 2.5, null, true]}'),
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "system", "developer"])), "content": draw(texts)})
    for _ in range(draw(st.integers(1, 4))):
        parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), min_size=1, max_size=3)
        messages.append({"role": "user", "content": draw(st.one_of(texts, texts, parts))})
        kind = draw(st.sampled_from(["plain", "plain", "reasoning", "call", "none"]))
        if kind == "plain":
            messages.append({"role": "assistant", "content": draw(texts)})
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": draw(texts), "reasoning_content": draw(texts)})
        elif kind == "call":
            messages.append(
                {"role": "assistant", "content": draw(st.one_of(st.none(), texts)), "tool_calls": draw(calls)}
            )
            messages.append({"role": "tool", "content": draw(texts), "tool_call_id": "call1"})
            messages.append({"role": "assistant", "content": draw(texts)})
    return messages


prompts = st.builds(
    ChatPrompt,
    conversations(),
    st.sampled_from([None, None, TOOLS]),
    st.sampled_from([{}, {"enable_thinking": False}, {"reasoning_effort": "high"}, {"date_string": "1 Jan 2026"}]),
    st.booleans(),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=examples(60))
@given(prompt=prompts)
def test_a_conversation_is_rendered_as_by_jinja2(name: str, prompt: ChatPrompt) -> None:
    text, template = source(name), template_of(name)
    ours, theirs = outcome(lambda: template.render(prompt)), outcome(lambda: by_jinja2(text, prompt))
    assert ours == theirs


def test_there_are_templates_of_six_families() -> None:
    assert NAMES == ["deepseek_v3", "gemma3", "gpt_oss", "llama3", "mistral", "qwen3"]
    assert [name for name in NAMES if takes_parts(source(name))] == ["gemma3"]


def chat(text: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(text, SPECIAL, bytes_max=options.pop("bytes_max", MAX)).render(ChatPrompt(messages, **options))


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{ messages | stranger }}", "filter stranger is unknown"),
        ("{{ stranger(1) }}", "stranger is unknown"),
        ("{{ messages is stranger }}", "test stranger is unknown"),
        ("{{ 'a'.stranger() }}", "no method named stranger"),
        ("{% stranger %}", "unknown statement stranger"),
        ("{% if %}", "syntax error"),
    ],
)
def test_what_a_template_needs_and_is_not_there_is_named(text: str, named: str) -> None:
    with pytest.raises(InvalidValue, match=named) as caught:
        chat(text, USER)
    assert (caught.value.reason, caught.value.field) == ("no_tokenizer", "model")


def test_a_template_that_refuses_the_messages_says_so_in_its_words() -> None:
    with pytest.raises(InvalidValue, match="take turns") as caught:
        chat(source("gemma3"), USER, USER)
    assert caught.value.field == "messages"


def test_marks_for_training_are_not_there() -> None:
    text = "{% for m in messages %}{%- generation -%} {{ m.content }} {% endgeneration %}{% endfor %}"
    assert chat(text, USER) == "Hi "


@pytest.mark.parametrize("text", ["{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"])
def test_a_template_that_loops_is_ended(text: str) -> None:
    with pytest.raises(InvalidValue, match="takes more than"):
        chat(text, USER)


def test_an_output_that_grows_is_ended_before_it_is_whole() -> None:
    text = "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidValue, match="more than 1000 bytes") as caught:
        chat(text, {"role": "user", "content": "x" * 900}, bytes_max=1000)
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_an_argument_that_is_a_field_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        chat(CHATML, USER, template_kwargs={name: []})
    assert caught.value.field == "chat_template_kwargs"


def test_a_last_message_is_left_open_for_the_engine_to_go_on() -> None:
    said = {"role": "assistant", "content": " The answer is "}
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(CHATML, USER, said, **options).endswith("<|im_start|>assistant\n The answer is ")
    trimmed = CHATML.replace("message.content", "message.content|trim")
    assert chat(trimmed, USER, said, **options).endswith("<|im_start|>assistant\nThe answer is")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Hm"}]}
    assert chat(source("gemma3"), USER, parts, **options).endswith("<start_of_turn>model\nHm")
    with pytest.raises(InvalidValue, match="both true"):
        chat(CHATML, USER, said, continue_final_message=True)
    with pytest.raises(InvalidValue, match="does not show"):
        chat("{{ bos_token }}", USER, said, **options)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("Hi", "no object"),
        ({"content": "Hi"}, "no role"),
        ({"role": "user", "content": 1}, "neither a text nor a list"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"content\[0\] that is no text",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "without a text"),
        ({"role": "assistant", "tool_calls": {}}, None),
        ({"role": "assistant", "tool_calls": "x"}, "no list"),
        ({"role": "assistant", "tool_calls": [1]}, "without a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "not JSON"),
    ],
)
def test_a_message_that_does_not_fit_is_named_by_its_index(message: Any, named: str | None) -> None:
    if named is None:
        assert for_template([USER, message], takes_parts=False)[1] == {"role": "assistant", "content": ""}
        return
    with pytest.raises(InvalidValue, match=named) as caught:
        for_template([USER, message], takes_parts=False)
    assert (caught.value.field, caught.value.index) == ("messages", 1)


def test_a_template_of_texts_gets_texts_and_one_of_parts_gets_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "cache_control": {}, "name": "n"}
    assert for_template([message], takes_parts=False) == [{"role": "user", "content": "a\nb", "name": "n"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert for_template([message], takes_parts=True)[0]["content"] == parts
    arguments = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    (called,) = for_template([{"role": "assistant", "content": None, "tool_calls": arguments}], takes_parts=False)
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1}


# ---- SGLang -----------------------------------------------------------------------------------------


def for_sglang(source: str, prompt: ChatPrompt) -> str:
    return ChatTemplate(source, {}, bytes_max=MAX, is_for_sglang=True).render(prompt)


def test_a_template_that_takes_functions_alone_gets_them_as_sglang_gives_them() -> None:
    source = "{% if tools[0].function %}{{ raise_exception('no') }}{% endif %}{{ tools[0].name }}"
    assert for_sglang(source, ChatPrompt([USER], tools=TOOLS)) == "weather"
    refuses = "{{ raise_exception('never') }}"
    for prompt in (ChatPrompt([USER], tools=TOOLS), ChatPrompt([USER])):
        with pytest.raises(InvalidValue, match="never"):
            for_sglang(refuses, prompt)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{{ messages[0].content * 99999 }}{% endfor %}",
    ],
)
def test_a_rendering_over_a_ceiling_is_not_tried_again(source: str) -> None:
    marked = "{% if tools[0].name %}{{ raise_exception('again') }}{% endif %}" + source
    with pytest.raises(InvalidValue, match=r"chat template (takes|makes) more"):
        for_sglang(marked, ChatPrompt([USER], tools=TOOLS))


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hello", "messages[1] is no object"),
        ({"content": "a"}, "messages[1] has no role"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls that are no list"),
        ({"role": "assistant", "tool_calls": [{}]}, "without a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "not JSON"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0] that is no text"),
    ],
)
def test_messages_that_sglang_could_not_read_are_refused(message: Any, named: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        for_sglang(CHATML, ChatPrompt([USER, message]))
    assert named in str(caught.value)


# ---- images ----------------------------------------------------------------------------------------

PICTURE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {"url": "x"}}]},
]


def test_a_text_template_gets_images_at_the_beginning_of_the_content() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {}, bytes_max=2**20)
    assert template.render_before_media(ChatPrompt(PICTURE)) == "<system>Be brief.<user>"


def test_a_template_of_parts_gets_images_where_they_are() -> None:
    parts = "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}"
    template = ChatTemplate(f"{{% for m in messages %}}<{{{{ m.role }}}}>{parts}{{% endfor %}}", {}, bytes_max=2**20)
    assert template.takes_parts
    assert template.render_before_media(ChatPrompt(PICTURE)) == "<system>Be brief.<user>A"


def test_a_template_that_begins_otherwise_with_an_image_has_no_certain_beginning() -> None:
    """As that of a model that leaves out the system message where there is an image."""
    source = (
        "{% set ns = namespace(has=false) %}{% for m in messages %}{% for p in m['content'] %}"
        "{% if p.type == 'image' %}{% set ns.has = true %}{% endif %}{% endfor %}{% endfor %}"
        "<s>{% if not ns.has %}SYSTEM{% endif %}{% for m in messages %}{% for p in m['content'] %}{{ p.text }}"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, {}, bytes_max=2**20)
    assert template.takes_parts
    assert template.render_before_media(ChatPrompt(PICTURE)) == "<s>"


def test_a_template_that_leaves_images_out_has_no_certain_beginning() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{% endfor %}", {}, bytes_max=2**20)
    assert template.render_before_media(ChatPrompt(PICTURE)) == ""


def test_dates_that_take_long_to_write_are_not_foreseen() -> None:
    """They would be written at each prompt, on the event loop."""

    def asked(*forms: str) -> str:
        return "".join(f"{{{{ strftime_now('{form}') }}}}" for form in forms)

    assert dates_of(asked("%d %b %Y", "%H")) == ("%d %b %Y", "%H")
    assert dates_of(asked("%c" * 128)) == ("%c" * 128,)
    assert dates_of(asked("%c" * 128, "%Y")) is None
