"""``waymark status`` and ``waymark inspect``: their questions to the HTTP API, and the drawing of a prompt."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue, NotFound
from waymark.console import cells
from waymark.console.prompt_flags import group_of
from waymark.console.prompts import read_file, read_hash, read_hashes, read_prompt, read_tokens
from waymark.console.publishers import warnings
from waymark.console.screen import Screen, ScreenPart, joined, text
from waymark.console.service import RemoteService
from waymark.contract.inspections import BlockAnswer, HolderAnswer, InspectAnswer, KeysAnswer, StatusAnswer
from waymark.tokenization.prompt import TextPrompt

#: A request has an additional salt and a cache salt.
_SALTS_MAX = 2
#: As many instances as an answer has; the page shows fewer.
_TOP = 1000


def inspected(service: RemoteService, arguments: argparse.Namespace) -> InspectAnswer:
    """Return the answer of ``/inspect/prompt`` for the prompt of the flags. Raise ``InvalidValue`` without a prompt."""
    if len(arguments.salt) > _SALTS_MAX:
        raise InvalidValue(f"--salt is given {len(arguments.salt)} times; give at most {_SALTS_MAX}", field="--salt")
    salts = dict(zip(("cache_salt", "additional_salt"), reversed(arguments.salt), strict=False))
    group = group_of(service, arguments.model, arguments.tenant)
    body = {
        "model": group["model"],
        "tenant_id": arguments.tenant,
        "block_size": arguments.block_size,
        "lora_name": arguments.lora,
        "lora_id": arguments.lora_id,
        "top": _TOP,
    }
    return service.post_for(InspectAnswer, "/inspect/prompt", body | salts | _prompt(arguments))


def block_of(service: RemoteService, arguments: argparse.Namespace) -> BlockAnswer:
    """Return the answer of ``/inspect/block`` for the key of the arguments."""
    key = f"{read_hash(arguments.key, option='block'):016x}"
    return service.post_for(BlockAnswer, "/inspect/block", {"key": key} | _groups(arguments))


def holder_of(service: RemoteService, arguments: argparse.Namespace) -> HolderAnswer:
    """Return the answer of ``/inspect/holder`` for the id of the arguments."""
    return service.post_for(HolderAnswer, "/inspect/holder", {"holder": arguments.id} | _groups(arguments))


def keys_of(service: RemoteService, arguments: argparse.Namespace) -> KeysAnswer:
    """Return the commands of ``/inspect/keys``: for a block, a holder, the rows of a prompt, or whole groups."""
    match arguments.what:
        case "block":
            wanted = {"block": f"{read_hash(arguments.key, option='block'):016x}"} | _groups(arguments)
        case "holder":
            wanted = {"holder": arguments.id} | _groups(arguments)
        case "prompt":
            answer = inspected(service, arguments)
            if not answer.keys and answer.reasons:
                raise NotFound(" ".join(answer.reasons))
            wanted = {"model": answer.model, "tenant_id": arguments.tenant, "chain": answer.keys}
        case _:
            wanted = _groups(arguments)
    return service.post_for(KeysAnswer, "/inspect/keys", wanted)


def _groups(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"group": arguments.group, "model": arguments.model, "tenant_id": arguments.tenant}


def status_of(service: RemoteService, arguments: argparse.Namespace) -> StatusAnswer:
    """Return the answer of ``/inspect/status`` for the wanted publishers, with the warnings of the replica."""
    wanted = {"tenant_id": arguments.tenant, "model": arguments.model, "status": ",".join(arguments.status)}
    query = urlencode({name: value for name, value in wanted.items() if value})
    answer = service.get_for(StatusAnswer, f"/inspect/status?{query}")
    return replace(answer, warnings=list(dict.fromkeys([*answer.warnings, *warnings(service)])))


def _prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.hashes is not None:
        return {"seq_hashes": list(read_hashes(arguments.hashes, option="--hashes"))}
    if arguments.tokens_file is not None:
        tokens = read_file(arguments.tokens_file, option="--tokens-file")
        return {"token_ids": read_tokens(tokens, option="--tokens-file")}
    if arguments.tokens is not None:
        return {"token_ids": read_tokens(arguments.tokens, option="--tokens")}
    prompt = read_prompt(arguments.text, arguments.messages)
    if isinstance(prompt, TextPrompt):
        return {"prompt": prompt.text}
    return {
        "messages": prompt.messages,
        "tools": prompt.tools,
        "chat_template_kwargs": dict(prompt.template_kwargs) or None,
        "system": prompt.system,
    }


def drawn(answer: InspectAnswer, screen: Screen, *, top: int) -> list[ScreenPart]:
    """Return the drawing of an explanation. Raise ``NotFound`` if no group was looked up."""
    if answer.block_size is None:
        raise NotFound(" ".join(answer.reasons))
    parts = cells.parts(answer, answer.block_size, width=screen.width, is_ascii=screen.is_ascii, top=max(1, top))
    for i, reason in enumerate(answer.reasons):
        parts += [text("")] * (not i) + [joined(text("Why nothing? ", "bold yellow"), text(reason))]
    return parts
