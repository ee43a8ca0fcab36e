"""The messages of a chat request, in the form in which SGLang gives them to a chat template.

It differs from vLLM's: a content of one text stays a text, parts are joined by a blank, the last message is the user's
unless the template is told not to begin an answer, and tools are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waymark.chat.openai import arguments_of, as_message, fields_of_tool, function_of, listed, parts_of, role_of

#: Parts that SGLang leaves out of a prompt.
_LEFT_OUT = ("thinking", "reasoning")
#: Fields of a message of any role but the user's.
_TEXTS = ("tool_call_id", "name", "phase", "reasoning_content")


def for_template(
    messages: Sequence[Any], system: Any = None, *, takes_parts: bool, mark: str | None = None
) -> list[dict[str, Any]]:
    """Return the messages for a template, with the parameters and errors of ``openai.for_template``."""
    converted = [_message(message, index, takes_parts=takes_parts, mark=mark) for index, message in enumerate(messages)]
    return [_message(message, None, takes_parts=takes_parts) for message in as_message(system)] + converted


def tools_for_template(tools: Sequence[Any]) -> list[Any]:
    """Return the tools for a template: a function's fields in their order, then null for the missing ones."""
    return [_tool(tool) for tool in tools]


def functions_for_template(tools: Sequence[Any]) -> list[Any]:
    """Return the functions of ``tools_for_template``, for a template that takes functions in place of tools."""
    return [tool["function"] if isinstance(tool, Mapping) and "function" in tool else tool for tool in tools]


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of the last message if it is the assistant's."""
    content = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
    return content if isinstance(content, str) else None


def _message(message: Any, index: int | None, *, takes_parts: bool, mark: str | None = None) -> dict[str, Any]:
    role = role_of(message, index)
    content = _content(message.get("content"), index, takes_parts=takes_parts and role != "tool", mark=mark)
    if role == "user":
        return {"role": role, "content": content}
    result: dict[str, Any] = {"role": role.lower(), "content": content}
    result |= {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
    calls = message.get("tool_calls")
    if calls is not None:
        is_read = result["role"] == "assistant"
        result["tool_calls"] = [_call(call, index, is_read=is_read) for call in listed(calls, index)]
    return result


def _content(source: Any, index: int | None, *, takes_parts: bool, mark: str | None) -> Any:
    if isinstance(source, str):
        return source
    if isinstance(source, list):
        source = [part for part in source if not (isinstance(part, Mapping) and part.get("type") in _LEFT_OUT)]
    source_parts = list(parts_of(source, index, has_media=mark is not None))
    if takes_parts and source is not None:
        return [
            {"type": kind}
            if kind != "text" and not mark
            else {"type": "text", "text": text if kind == "text" else mark}
            for kind, text in source_parts
        ]
    return " ".join(text if kind == "text" else mark or "" for kind, text in source_parts)


def _call(call: Any, index: int | None, *, is_read: bool) -> dict[str, Any]:
    function = function_of(call, index)
    arguments = arguments_of(function, index) if is_read else function.get("arguments")
    function_fields = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": function_fields}


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    later = tool.get("defer_loading")
    function_fields = fields_of_tool(function, later, ("description", "name", "parameters"))
    ordered = {name: function_fields[name] for name in [*function, *function_fields] if name in function_fields}
    return {"type": tool.get("type", "function"), "function": ordered, "defer_loading": later}
