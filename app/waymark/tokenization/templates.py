"""Chat templates: the Jinja that comes with a model, rendered as its engines render it.

A template comes with a model's files, and messages come from clients. So each rendering has a ceiling for its steps,
its CPU, its memory and its output, and another process does it (``renderers``). The calls here block until it answers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.chat import openai, sglang
from waymark.tokenization import rendering
from waymark.tokenization.prompt import ChatPrompt
from waymark.tokenization.renderers import Renderers

#: The templates of models have less than 50,000 characters.
SOURCE_MAX = 2**20

#: Names with fields of their own in a request, and names that only the operator may choose.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


class _RenderingOverCeiling(InvalidValue):
    """A refusal by a ceiling: a second rendering would take as long as the first."""


class ChatTemplate:
    """One template of a model. ``special`` are its named special tokens, such as ``bos_token``.

    A template sees the same as in vLLM or in SGLang. Raise ``InvalidValue`` (no_tokenizer) if it is not a readable
    template.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        *,
        bytes_max: int,
        is_for_sglang: bool = False,
        renderers: Renderers | None = None,
    ) -> None:
        self._special = dict(special)
        self._bytes_max = bytes_max
        self._is_for_sglang = is_for_sglang
        if len(source) > SOURCE_MAX:
            raise _lacking(f"it has {len(source)} characters, and at most {SOURCE_MAX} are read")
        self._renderer = (renderers or Renderers()).of(compilable(source))
        self.takes_parts = (takes_parts_for_sglang if is_for_sglang else takes_parts)(source)
        self._dates = dates_of(source)
        kind, why = self._renderer.compile()
        if kind != rendering.TEXT:
            raise _lacking(why or "it takes too long to read")

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text of a conversation without media.

        Raise ``InvalidValue`` if the template refuses the messages, needs an unknown value, or exceeds a ceiling.
        """
        return self._render(prompt, None)

    def dates(self) -> tuple[str, ...] | None:
        """Return the dates that the clock gives the template now, or None if they cannot be foreseen."""
        return None if self._dates is None else tuple(_strftime_now(form) for form in self._dates)

    def render_before_media(self, prompt: ChatPrompt) -> str:
        """Return the text of a conversation up to its first image or other medium, whose tokens are unknown here.

        Raise the errors of ``render``.
        """
        # No author of messages can know the mark.
        mark = f"media-{secrets.token_hex(16)}"
        text = self._render(prompt, mark)
        beginning = text[: max(0, text.find(mark))]
        if self.takes_parts:
            # A template may write another text for an image; only the common beginning is certain.
            beginning = commonprefix([beginning, self._render(prompt, "")])  # noqa: RUF071  # of texts
        return beginning

    def behind(self, prompt: ChatPrompt) -> str:
        """Return the text that the engine encodes on its own after the rendered one: with SGLang, the message to
        continue.
        """
        if not (self._is_for_sglang and prompt.continue_final_message):
            return ""
        return sglang.last_answer(self._shown(prompt.messages[-1:], None, None)) or ""

    def _render(self, prompt: ChatPrompt, mark: str | None) -> str:
        reserved = sorted(RESERVED & prompt.template_kwargs.keys())
        if reserved:
            raise InvalidValue(
                f"chat_template_kwargs has {reserved[0]}, which other fields of the request set; leave it out",
                field="chat_template_kwargs",
            )
        converted = self._shown(prompt.messages, prompt.system, mark)
        if self._is_for_sglang:
            return self._render_for_sglang(prompt, converted)
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise InvalidValue(
                "continue_final_message and add_generation_prompt are both true; send one of them as true",
                field="continue_final_message",
            )
        tools = openai.tools_for_template(prompt.tools) if prompt.tools else None
        text = self._rendered(prompt, converted, tools, begins_answer=prompt.add_generation_prompt)
        # The text after an image does not count: the end of the last message is then of no interest.
        return _continued(text, converted) if prompt.continue_final_message and mark is None else text

    def _render_for_sglang(self, prompt: ChatPrompt, converted: list[dict[str, Any]]) -> str:
        begins_answer = prompt.add_generation_prompt or prompt.continue_final_message
        answer = sglang.last_answer(converted)
        if answer is not None and prompt.continue_final_message:
            converted = converted[:-1]
        elif answer is not None and begins_answer:
            converted = [*converted[:-1], {"role": "user", "content": answer}]
        tools = sglang.tools_for_template(prompt.tools) if prompt.tools else None
        try:
            return self._rendered(prompt, converted, tools, begins_answer=begins_answer)
        except InvalidValue as refusal:
            if tools is None or isinstance(refusal, _RenderingOverCeiling):
                raise
            # As SGLang does: some templates take functions alone.
            functions = sglang.functions_for_template(tools)
            return self._rendered(prompt, converted, functions, begins_answer=begins_answer)

    def _shown(self, messages: Sequence[Any], system: Any, mark: str | None) -> list[dict[str, Any]]:
        form = sglang.for_template if self._is_for_sglang else openai.for_template
        return form(messages, system, takes_parts=self.takes_parts, mark=mark)

    def _rendered(
        self, prompt: ChatPrompt, converted: list[dict[str, Any]], tools: list[Any] | None, *, begins_answer: bool
    ) -> str:
        context = {
            **self._special,
            "messages": converted,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": begins_answer,
            **prompt.template_kwargs,
        }
        try:
            kind, text = self._renderer.render(context, datetime.now(), self._bytes_max)
        except ValueError as error:
            kind, text = rendering.UNFIT, rendering.first_line(error)
        if kind != rendering.TEXT:
            raise self._refusal(kind, text)
        return text

    def _refusal(self, kind: bytes, why: str) -> InvalidValue:
        match kind:
            case rendering.REFUSED:
                return InvalidValue(f"the chat template refuses the messages: {why}", field="messages")
            case rendering.UNFIT:
                return InvalidValue(f"the chat template cannot use these messages: {why}", field="messages")
            case rendering.TOO_LARGE:
                return self._too_large()
            case rendering.OUT_OF_STEPS | rendering.OUT_OF_CPU:
                return _RenderingOverCeiling(
                    f"the chat template takes more than {rendering.STEPS_MAX} steps or {rendering.SECONDS_MAX:g} s of "
                    "CPU for these messages; send fewer",
                    field="messages",
                )
            case rendering.OUT_OF_MEMORY | rendering.ENDED:
                return _RenderingOverCeiling(
                    f"the chat template takes more than {rendering.MEMORY_BYTES_MAX} bytes of memory for these "
                    f"messages, or ends the process that renders it ({why or 'MemoryError'}); send fewer, or send "
                    "token_ids",
                    field="messages",
                )
        return _lacking(why)

    def _too_large(self) -> InvalidValue:
        return _RenderingOverCeiling(
            f"the chat template makes more than {self._bytes_max} bytes of the messages; send less, or raise "
            "WAYMARK_MAX_TOKENS",
            reason="too_large",
            field="messages",
        )


def _continued(text: str, messages: list[dict[str, Any]]) -> str:
    """Return the text up to the end of the last message, which the engine continues."""
    last: Any = messages[-1]["content"] if messages else ""
    if isinstance(last, list):
        last = last[-1]["text"] if last else ""
    bare = last.strip()
    start = text.rfind(bare)
    if not bare or start < 0:
        raise InvalidValue(
            "continue_final_message is true and the chat template does not show the text of the last message; send a "
            "last message with a text, or leave out continue_final_message",
            field="continue_final_message",
        )
    end = start + len(bare)
    spaced = last.lstrip()
    # The blanks at the end of the message count if the template keeps them.
    return text[: start + len(spaced)] if text.startswith(spaced, start) else text[:end]


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _lacking(why: str) -> InvalidValue:
    return InvalidValue(
        f"the chat template of this model cannot be rendered here: {why}; give the model another source in "
        "WAYMARK_TOKENIZERS, such as the URL of an engine, or send token_ids",
        reason="no_tokenizer",
        field="model",
    )


# Facts in the source of a chat template, before it is compiled.


# Marks for training, in the templates of some models; engines take them as if they were not there.
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_CONTENT = r"""(?:\.content|\[\s*['"]content['"]\s*\])"""
_CONTENT_SET = re.compile(rf"\{{%[-+]?\s*set\s+(\w+)\s*=\s*\w+{_CONTENT}")
#: A call with the form of a date, or a test whether it is defined. The result of any other use cannot be foreseen.
_CLOCK = re.compile(r"""strftime_now(?:\s*\(\s*(['"])(?P<form>[^'"\\]*)\1\s*\)|\s+is\s+(?:not\s+)?defined)""")
#: Characters of all forms of a template. Those of models have less than 30.
_FORMS_MAX = 256
_LOOP = re.compile(rf"\{{%[-+]?\s*for\s+\w+\s+in\s+(\w+)({_CONTENT})?\s*(?:\||if\b|-?%\}})")
#: SGLang assumes that a template with such a word iterates over parts.
_MEDIA_WORDS = ("image", "audio", "video", "vision")


def compilable(source: str) -> str:
    """Return the source without statements for training only."""
    return _GENERATION.sub(_as_if, source)


def takes_parts(source: str) -> bool:
    """Return whether a template iterates over the parts of a content; otherwise it takes contents as texts."""
    contents = set(_CONTENT_SET.findall(source))
    return any(of_message or name in contents for name, of_message in _LOOP.findall(source))


def dates_of(source: str) -> tuple[str, ...] | None:
    """Return the forms in which a template asks for the date, or None if it asks in other ways."""
    calls = list(_CLOCK.finditer(source))
    forms = tuple(dict.fromkeys(call["form"] for call in calls if call["form"] is not None))
    # Each prompt needs the dates in all of these forms.
    if len(calls) != source.count("strftime_now") or sum(map(len, forms)) > _FORMS_MAX:
        return None
    return forms


def takes_parts_for_sglang(source: str) -> bool:
    """Return ``takes_parts`` by the rules of SGLang. SGLang knows fewer loops, and goes by words in the source."""
    loops = _LOOP.findall(source)
    return any(word in source for word in _MEDIA_WORDS) or any(
        of_message and name in ("message", "msg", "m") for name, of_message in loops
    )


def _as_if(mark: re.Match[str]) -> str:
    prefix, end, suffix = mark.groups()
    return "{%" + prefix + (" endif " if end else " if true ") + suffix + "%}"
