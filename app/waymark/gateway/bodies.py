"""Bodies of requests as the gateway reads and changes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.chat.requests import Form, InferenceRequest, read_request
from waymark.gateway.shapes import RequestRejected


class InferenceBody(NamedTuple):
    """The fields of a body, and the request that they make."""

    fields: dict[str, Any]
    request: InferenceRequest


def body_of_request(path: str, body: bytes) -> InferenceBody:
    """Read a body. Raises RequestRejected where it is no JSON, or too much; InvalidValue without a model."""
    try:
        fields = bounded_loads(body)
    except TooMuchJson as error:
        raise RequestRejected(400, f"the body cannot be read: {error}; send less", "invalid_value") from None
    except orjson.JSONDecodeError:
        raise RequestRejected(400, "the body is not valid JSON; send a JSON object", "invalid_json") from None
    return InferenceBody(fields, read_request(path, fields))


def with_cache_control(body: InferenceBody, given: bytes) -> bytes:
    """The body with a mark behind its system prompt, up to which Anthropic's API caches; as it is where it has one.

    The mark is on the last text block: all blocks before it are cached with it, and a request may have four marks.
    """
    system = body.fields.get("system")
    if body.request.form is not Form.MESSAGES or not system:
        return given
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return given
    texts = [number for number, block in enumerate(blocks) if block.get("type") == "text"]
    if not texts or any("cache_control" in block for block in blocks):
        return given
    last = texts[-1]
    marked = [
        block | {"cache_control": {"type": "ephemeral"}} if number == last else block
        for number, block in enumerate(blocks)
    ]
    return orjson.dumps(body.fields | {"system": marked})
