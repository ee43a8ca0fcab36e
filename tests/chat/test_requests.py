"""What is read of an inference request's body."""

from __future__ import annotations

from typing import Any

import pytest

from waymark.base.errors import InvalidValue
from waymark.chat.requests import Form, Truncation, form_of, read_request

CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", Form.CHAT),
        ("/team-a/v1/chat/completions/?x=1", Form.CHAT),
        ("/v1/completions", Form.COMPLETIONS),
        ("/v1/messages", Form.MESSAGES),
        ("/v1/responses", Form.RESPONSES),
        ("/v1/embeddings", Form.EMBEDDINGS),
        ("/v1/models", None),
        ("/v1/messages/count_tokens", None),
        ("", None),
    ],
)
def test_the_end_of_a_path_says_the_form(path: str, form: Form | None) -> None:
    assert form_of(path) is form


def test_a_chat_has_messages_and_what_the_template_gets() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = read_request(
        "/v1/chat/completions",
        {
            "model": "m", "messages": CHAT, "tools": tools, "stream": True, "n": 3, "cache_salt": "s",
            "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False,
            "continue_final_message": True, "temperature": 0.2,
        },
    )  # fmt: skip
    assert (found.model, found.messages, found.tools, found.cache_salt) == ("m", CHAT, tools, "s")
    assert found.template_kwargs == {"enable_thinking": False}
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    assert found.is_stream
    assert found.copies == 3


@pytest.mark.parametrize(
    ("prompt", "prompts", "answered"),
    [
        ("a", ("a",), 1),
        (["a", "b"], ("a", "b"), 2),
        ([1, 2, 3], ([1, 2, 3],), 1),
        ([[1, 2], [3]], ([1, 2], [3]), 2),
        ([], (), 1),
        (None, (), 1),
        (7, (), 1),
        ({"a": 1}, (), 1),
    ],
)
def test_a_completion_has_prompts_of_text_or_tokens(prompt: Any, prompts: Any, answered: int) -> None:
    found = read_request("/v1/completions", {"model": "m", "prompt": prompt, "n": 2})
    assert (tuple(found.prompts), found.prompts_to_answer, found.copies, found.messages) == (prompts, answered, 2, None)


@pytest.mark.parametrize(
    ("fields", "truncation"),
    [
        ({"truncate_prompt_tokens": 5}, Truncation(5)),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, Truncation(-1, "right")),
        ({"truncate_prompt_tokens": -2}, None),
        ({"truncate_prompt_tokens": True}, None),
        ({"truncation_side": "left"}, None),
    ],
)
def test_where_a_prompt_is_cut(fields: dict[str, Any], truncation: Truncation | None) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert read_request(path, {"model": "m"} | fields).truncation == truncation
    assert read_request("/v1/messages", {"model": "m"} | fields).truncation is None


def test_the_form_of_anthropic_has_system_beside_and_tools_of_another_shape() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    found = read_request("/v1/messages", {"model": "m", "messages": CHAT, "system": "be brief", "tools": [tool]})
    assert (found.messages, found.system) == (CHAT, "be brief")
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]


def test_responses_have_their_input_as_messages() -> None:
    found = read_request("/v1/responses", {"model": "m", "input": "hello", "instructions": "be brief"})
    assert (found.messages, found.system) == (CHAT, "be brief")
    assert read_request("/v1/responses", {"model": "m", "input": CHAT}).messages == CHAT


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": 7, "tools": {}, "chat_template_kwargs": [], "n": "x", "stream": "yes", "cache_salt": 7},
        {"messages": None, "tools": [7], "n": -1, "add_generation_prompt": "no"},
        {},
    ],
)
def test_what_has_another_shape_counts_as_absent(fields: dict[str, Any]) -> None:
    found = read_request("/v1/chat/completions", {"model": "m"} | fields)
    assert (found.messages, found.copies, found.is_stream, found.cache_salt) == ([], 1, False, None)
    assert found.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, "missing", "model"),
        ({"model": ""}, "missing", "model"),
        ({"model": None}, "missing", "model"),
        ({"model": 7}, "invalid_value", "model"),
        ({"model": "m" * 5000}, "invalid_value", "model"),
        ([], "invalid_type", None),
        ("m", "invalid_type", None),
    ],
)
def test_a_body_without_a_model_is_refused(fields: Any, reason: str, field: str | None) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_request("/v1/chat/completions", fields)
    assert (caught.value.reason, caught.value.field) == (reason, field)
