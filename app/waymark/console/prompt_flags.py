"""A prompt as it was typed, as the fields of a request."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from waymark.base.errors import InvalidValue, NotFound
from waymark.base.shown import shown
from waymark.console.prompts import read_file, read_tokens
from waymark.console.service import RemoteService

_FROM_INPUT = "-"


def prompt_of(service: RemoteService, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model and the tenant, and the prompt, of which the service tokenizes a text and messages."""
    prompt = _prompt(arguments)
    named = prompt.pop("model", None)
    return group_of(service, arguments.model or named, arguments.tenant_id), prompt


def group_of(service: RemoteService, model: str | None, tenant: str | None) -> dict[str, Any]:
    """Return the model, or without one the only one that is registered, and the tenant."""
    if model is not None:
        return {"model": model, "tenant_id": tenant}
    services = service.get("/services")["services"]
    models = sorted(
        {registered["ModelName"] for registered in services if registered["TenantID"] == (tenant or "default")}
    )
    if not models:
        raise NotFound(
            f"no engine is registered for tenant {shown(tenant or 'default')}; register one, or give --tenant-id"
        )
    if len(models) > 1:
        raise InvalidValue(f"several models are registered; give one with --model: {', '.join(map(shown, models))}")
    return {"model": models[0], "tenant_id": tenant}


def _prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.messages is not None:
        return _messages(_read(arguments.messages, "--messages"))
    if arguments.tokens is not None:
        return {"token_ids": read_tokens(arguments.tokens, option="--tokens")}
    if arguments.tokens_file is not None:
        tokens = read_file(arguments.tokens_file, option="--tokens-file")
        return {"token_ids": read_tokens(tokens, option="--tokens-file")}
    if arguments.file is not None:
        return {"prompt": _read(arguments.file, "--file")}
    return {"prompt": sys.stdin.read() if arguments.text == _FROM_INPUT else arguments.text}


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the prompt besides its tokens, from the flags."""
    return {"block_size": arguments.block_size, "lora_name": arguments.lora, "cache_salt": arguments.cache_salt}


def _read(path: str, flag: str) -> str:
    try:
        return sys.stdin.read() if path == _FROM_INPUT else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{flag}: {path} cannot be read: {exc}") from None


def _messages(text: str) -> dict[str, Any]:
    """Read the messages of a file: their list, or the body of a chat request, which may name its model."""
    try:
        content = json.loads(text)
    except ValueError as exc:
        raise InvalidValue(f"--messages: the file has no JSON: {exc}") from None
    if isinstance(content, list):
        return {"messages": content}
    if isinstance(content, dict) and isinstance(content.get("messages"), list):
        model = content.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidValue(f"--messages: model is {shown(model)}; it must be the name of a model")
        return {name: content[name] for name in ("model", "messages", "system", "tools") if name in content}
    raise InvalidValue("--messages: the file has neither a list of messages nor an object with one")
