"""Prompts from the words of a command: as token ids or hashes, and as the fields of a request."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from waymark.base.errors import InvalidValue, NotFound
from waymark.base.shown import shown
from waymark.contract.publishers import ServicesAnswer
from waymark.domain.names import U32_MAX, U64_MASK

if TYPE_CHECKING:
    from waymark.console.service import RemoteService

_FROM_INPUT = "-"


def prompt_of(service: RemoteService, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model and the tenant, and the prompt; the service tokenizes a text or messages."""
    prompt = _prompt(arguments)
    named = prompt.pop("model", None)
    return group_of(service, arguments.model or named, arguments.tenant_id), prompt


def group_of(service: RemoteService, model: str | None, tenant: str | None) -> dict[str, Any]:
    """Return the model, or without one the only registered one, and the tenant."""
    if model is not None:
        return {"model": model, "tenant_id": tenant}
    services = service.get_for(ServicesAnswer, "/services").services
    models = sorted({registered.ModelName for registered in services if registered.TenantID == (tenant or "default")})
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
    return {"prompt": _input("--text") if arguments.text == _FROM_INPUT else arguments.text}


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the prompt besides its tokens, from the flags."""
    return {"block_size": arguments.block_size, "lora_name": arguments.lora, "cache_salt": arguments.cache_salt}


def _read(path: str, flag: str) -> str:
    try:
        return _input(flag) if path == _FROM_INPUT else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{flag}: {path} cannot be read: {exc}") from None


def _input(flag: str, stdin: TextIO | None = None) -> str:
    """Read standard input. Raise ``InvalidValue`` if it is not a text."""
    try:
        return (stdin or sys.stdin).read()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{flag}: standard input cannot be read: {exc}") from None


def _messages(text: str) -> dict[str, Any]:
    """Read the messages of a file: their list, or the body of a chat request, which may name its model."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidValue(f"--messages: the file has no JSON: {exc}") from None
    if isinstance(content, list):
        return {"messages": content}
    if isinstance(content, dict) and isinstance(content.get("messages"), list):
        model = content.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidValue(f"--messages: model is {shown(model)}; it must be the name of a model")
        return {name: content[name] for name in ("model", "messages", "system", "tools") if name in content}
    raise InvalidValue("--messages: the file has neither a list of messages nor an object with one")


#: Token ids of one range: as many as a prompt may have by default.
_RANGE_MAX = 1 << 21
_IDS_MAX = 1 << 22
#: More digits than a token id has would take long to convert.
_TOKEN = re.compile(r"[0-9]{1,20}", re.ASCII)
_HEX = re.compile(r"(0x)?[0-9a-fA-F]{16}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def read_tokens(text: str, *, option: str, stdin: TextIO | None = None) -> list[int]:
    """Read token ids and ranges between blanks, commas or brackets, from standard input for ``-``."""
    words = _words(_input(option, stdin) if text == _FROM_INPUT else text)
    token_ids: list[int] = []
    for place, word in enumerate(words):
        first, dash, last = word.partition("-")
        ends = (first, last if dash else first)
        if not all(_TOKEN.fullmatch(end) and int(end) <= U32_MAX for end in ends):
            raise InvalidValue(
                f"{option}: {shown(word)} at {place} is no token id; they are integers of 0..{U32_MAX}, "
                "or ranges such as 100-163"
            )
        least, most = map(int, ends)
        if not 0 <= most - least < _RANGE_MAX:
            raise InvalidValue(f"{option}: the range {shown(word)} at {place} must have 1 to {_RANGE_MAX} token ids")
        if len(token_ids) + most - least >= _IDS_MAX:
            raise InvalidValue(f"{option}: at {place} there are more than {_IDS_MAX} token ids")
        token_ids += range(least, most + 1)
    if not token_ids:
        raise InvalidValue(f"{option}: there are none; give token ids such as 1,2,3 or 100-163")
    return token_ids


def read_file(path: Path, *, option: str) -> str:
    """Return the contents of a file, or of standard input for ``-``."""
    if str(path) == _FROM_INPUT:
        return _FROM_INPUT
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{option}: {path} cannot be read ({exc}); give a text file of token ids") from None


def read_prompt(text: str | None, messages: str | None) -> dict[str, Any]:
    """Return the fields of a prompt: a text, or the messages of a chat request as JSON, a list or an object with
    ``messages``; ``-`` reads them from standard input.
    """
    if messages is None:
        content = text or ""
        return {"prompt": _input("--text") if content == _FROM_INPUT else content}
    try:
        value = json.loads(_input("--messages") if messages == _FROM_INPUT else messages)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"--messages is not JSON: {error}; give a list of messages", field="--messages") from None
    chat = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(chat.get("messages"), list):
        raise InvalidValue(
            "--messages is neither a list of messages nor a chat request; give one of them", field="--messages"
        )
    return {
        "messages": chat["messages"],
        "tools": chat.get("tools"),
        "chat_template_kwargs": chat.get("chat_template_kwargs") or None,
        "system": chat.get("system"),
    }


def read_hashes(text: str, *, option: str, stdin: TextIO | None = None) -> tuple[int, ...]:
    """Read the seq_hashes of a prompt, each as ``read_hash`` takes it; ``-`` reads them from standard input."""
    words = _words(_input(option, stdin) if text == _FROM_INPUT else text)
    return tuple(read_hash(word, option=option) for word in words)


def read_hash(word: str, *, option: str) -> int:
    """Read 16 hex digits as in a key, or a decimal number as in ``/query_by_hash``; 16 digits are taken for hex."""
    if _HEX.fullmatch(word):
        return int(word, 16)
    number = int(word) if _DECIMAL.fullmatch(word) else U64_MASK + 1
    if not -(2**63) <= number <= U64_MASK:
        raise InvalidValue(f"{option}: {shown(word)} is no hash; give 16 hex digits, or a decimal number of 64 bits")
    return number & U64_MASK


def _words(text: str) -> list[str]:
    return text.translate(str.maketrans(",[]\"'", "     ")).split()
