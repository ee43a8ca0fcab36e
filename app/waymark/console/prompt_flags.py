"""A prompt as it was typed, and the token ids that it has."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from waymark.base.errors import InvalidValue, NotFound
from waymark.base.shown import shown
from waymark.console.service import RemoteService
from waymark.domain.names import U32_MAX

_FROM_INPUT = "-"
#: Token ids of one range: as many as a prompt may have by default.
_RANGE_MAX = 1 << 21
_IDS_MAX = 1 << 22


def group_of(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """The model and the tenant that are meant: those of the flags, or the only model that is registered."""
    tenant: str | None = arguments.tenant_id
    if arguments.model is not None:
        return {"model": arguments.model, "tenant_id": tenant}
    services = service.get("/services")["services"]
    models = sorted({each["ModelName"] for each in services if each["TenantID"] == (tenant or "default")})
    if not models:
        raise NotFound(
            f"no engine is registered for tenant {shown(tenant or 'default')}; register one, or give --tenant-id"
        )
    if len(models) > 1:
        raise InvalidValue(f"several models are registered; give one with --model: {', '.join(map(shown, models))}")
    return {"model": models[0], "tenant_id": tenant}


def token_ids(service: RemoteService, arguments: argparse.Namespace, group: dict[str, Any]) -> list[int]:
    """The token ids of a prompt. The service makes them of a text and of messages."""
    if arguments.tokens is not None:
        return _ids(sys.stdin.read() if arguments.tokens == _FROM_INPUT else arguments.tokens)
    if arguments.messages is not None:
        prompt = _messages(_read(arguments.messages, "--messages"))
    else:
        text = arguments.text if arguments.file is None else _read(arguments.file, "--file")
        prompt = {"prompt": sys.stdin.read() if text == _FROM_INPUT and arguments.file is None else text}
    found = service.post("/tokenize", {"model": group["model"]} | prompt)
    return [int(each) for each in found["tokens"]]


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of the prompt besides its tokens."""
    return {"block_size": arguments.block_size, "lora_name": arguments.lora, "cache_salt": arguments.cache_salt}


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    found: list[int] = []
    for place, word in enumerate(words):
        first, dash, last = word.partition("-")
        ends = (first, last if dash else first)
        if not all(each.isascii() and each.isdigit() and int(each) <= U32_MAX for each in ends):
            raise InvalidValue(
                f"--tokens: {shown(word)} at {place} is no token id; they are integers of 0..{U32_MAX}, "
                "or ranges such as 100-163"
            )
        least, most = map(int, ends)
        if not 0 <= most - least < _RANGE_MAX:
            raise InvalidValue(f"--tokens: the range {shown(word)} at {place} must have 1 to {_RANGE_MAX} token ids")
        if len(found) + most - least >= _IDS_MAX:
            raise InvalidValue(f"--tokens: at {place} there are more than {_IDS_MAX} token ids")
        found += range(least, most + 1)
    if not found:
        raise InvalidValue("--tokens: there are none; give token ids such as 1,2,3 or 100-163")
    return found


def _read(path: str, flag: str) -> str:
    try:
        return sys.stdin.read() if path == _FROM_INPUT else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{flag}: {path} cannot be read: {exc}") from None


def _messages(text: str) -> dict[str, Any]:
    """The messages of a file: their list, or the body of a chat request."""
    try:
        content = json.loads(text)
    except ValueError as exc:
        raise InvalidValue(f"--messages: the file has no JSON: {exc}") from None
    if isinstance(content, list):
        return {"messages": content}
    if isinstance(content, dict) and isinstance(content.get("messages"), list):
        return {name: content[name] for name in ("messages", "system", "tools") if name in content}
    raise InvalidValue("--messages: the file has neither a list of messages nor an object with one")
