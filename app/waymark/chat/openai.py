"""The messages of a chat request, in the form in which engines give them to a chat template.

A template sees the same as in vLLM: only the known fields of a message; a text as one part if the template takes parts;
parts as one text with line breaks between them if it takes texts; and the arguments of a tool call as an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.chat.requests import kind_of

#: Type of a content part with text -> the field of that text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


def for_template(
    messages: Sequence[Any], system: Any = None, *, takes_parts: bool, mark: str | None = None
) -> list[dict[str, Any]]:
    """Return the messages for a template, with ``system`` as the first unless it is empty.

    With a ``mark`` images and other media are allowed. The mark replaces each medium as a text; in a content of one
    text it stands at the beginning, like the engines' own placeholders. An empty mark leaves them as parts.

    Raise ``InvalidValue`` on ``messages`` with the index of a wrong one, or on ``system``.
    """
    converted = [_message(message, index, takes_parts=takes_parts, mark=mark) for index, message in enumerate(messages)]
    first = [_message(message_of_system, None, takes_parts=takes_parts) for message_of_system in as_message(system)]
    return first + converted


def tools_for_template(tools: Sequence[Any]) -> list[Any]:
    """Return the tools for a template: with null for a function's missing fields, and without fields unknown to vLLM.

    A template may write them as JSON, and then each null and the order of the fields appear in the prompt. A tool that
    is not of OpenAI's form is unchanged.
    """
    return [_tool(tool) for tool in tools]


def fields_of_tool(function: Mapping[str, Any], later: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields ``names`` of a function, null if missing; and ``strict`` and ``defer_loading`` unless null.

    ``later`` is the ``defer_loading`` of the tool, for a function without it.
    """
    function_fields = {name: function.get(name) for name in names}
    if (strict := function.get("strict")) is not None:
        function_fields["strict"] = strict
    own = function.get("defer_loading")
    if (is_deferred := later if own is None else own) is not None:
        function_fields["defer_loading"] = is_deferred
    return function_fields


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    later = tool.get("defer_loading")
    function_fields = fields_of_tool(function, later, ("name", "description", "parameters"))
    result = {"type": tool.get("type", "function"), "function": function_fields}
    return result if later is None else result | {"defer_loading": later}


def as_message(system: Any) -> list[dict[str, Any]]:
    """Return Anthropic's ``system`` as a list of one message; empty if it is absent or empty."""
    return [{"role": "system", "content": system}] if system else []


def _message(message: Any, index: int | None, *, takes_parts: bool, mark: str | None = None) -> dict[str, Any]:
    role = role_of(message, index)
    source = message.get("content")
    if isinstance(source, str) and len(message) == 2:  # most messages
        return {"role": role, "content": [{"type": "text", "text": source}] if takes_parts else source}
    source_parts = [] if isinstance(source, str) else list(parts_of(source, index, has_media=mark is not None))
    if isinstance(source, str):
        content: Any = [{"type": "text", "text": source}] if takes_parts else source
    elif takes_parts:
        content = [
            {"type": kind}
            if kind != "text" and not mark
            else {"type": "text", "text": text if kind == "text" else mark}
            for kind, text in source_parts
        ]
    else:
        marks = [mark or "" for kind, _ in source_parts if kind != "text"]
        content = "\n".join(marks + [text for kind, text in source_parts if kind == "text"])
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            result["tool_calls"] = [_call(call, index) for call in listed(calls, index)]
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if isinstance(reasoning, str):
            result |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def role_of(message: Any, index: int | None) -> str:
    """Return the role of a message. Raise ``InvalidValue`` if it is not a message."""
    if not isinstance(message, dict | Mapping):  # the check for dict is much faster
        raise _unfit(index, "is no object", "send role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _unfit(index, "has no role", "send a text such as user")
    return role


def parts_of(content: Any, index: int | None, *, has_media: bool) -> Iterable[tuple[str, str]]:
    """Return the parts of a content: ``text`` with the text, or the kind of the medium."""
    if content is None:
        return
    if not isinstance(content, list):
        raise _unfit(index, "has a content that is neither a text nor a list of parts", "send one of them")
    for position, part in enumerate(content):
        if isinstance(part, str):
            yield "text", part
            continue
        media = kind_of(part) if has_media else None
        if media is not None:
            yield media, ""
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise _unfit(
                index,
                f"has a content[{position}] that is no text",
                "tokens of images and other media are made by the engine alone: send token_ids",
            )
        text = part.get(_TEXT_PARTS[kind])
        if isinstance(text, str):
            yield "text", text
        elif text is not None or kind not in ("text", "refusal"):
            raise _unfit(index, f"has a content[{position}] without a text", "send one")


def listed(calls: Any, index: int | None) -> list[Any]:
    if not isinstance(calls, list):
        raise _unfit(index, "has tool_calls that are no list", "send a list, or none")
    return calls


def function_of(call: Any, index: int | None) -> Mapping[str, Any]:
    """Return the function of a tool call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _unfit(index, "has a tool call without a function", "send an object with name and arguments")
    return function


def arguments_of(function: Mapping[str, Any], index: int | None) -> Any:
    """Return the arguments of a call, parsed if they are JSON in a text."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        raise _unfit(index, "has a tool call whose arguments are not JSON", "send an object") from None


def _call(call: Any, index: int | None) -> Any:
    function = function_of(call, index)
    arguments = arguments_of(function, index)
    # In the order in which vLLM has read them: a template may write them as JSON.
    function_fields = {"arguments": {} if arguments is None else arguments, "name": function.get("name")}
    result = {
        "id": call.get("id"),
        "function": function_fields | {name: function[name] for name in function if name not in function_fields},
    }
    result = {name: value for name, value in result.items() if value is not None}
    return result | {name: call[name] for name in call if name not in result}


def _unfit(index: int | None, problem: str, way_out: str) -> InvalidValue:
    if index is None:
        return InvalidValue(f"system {problem}; {way_out}", field="system")
    return InvalidValue(f"messages[{index}] {problem}; {way_out}", field="messages", index=index)
