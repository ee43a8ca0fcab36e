"""Tokens from an engine: ``POST /tokenize`` as vLLM and SGLang have it, or the render endpoints of vLLM.

Only the render endpoints name the images of a prompt, and some servers have no other endpoint (TensorRT-LLM).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from waymark.base.asker import Asker
from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import InvalidValue, TokenizerUnavailable, Unanswered
from waymark.chat.openai import as_message
from waymark.chat.requests import has_media
from waymark.domain.multimodal import items_of
from waymark.domain.packing import pack_tokens
from waymark.tokenization.prompt import ChatPrompt, Forgetful, Prompt, TextPrompt, TokenizedPrompt, is_cut

#: A longer answer is not read. An id and its comma take at most this many bytes, each stands for a byte of the text or
#: more, and a chat template adds some. The data of images has no such bound.
_ID_BYTES, _TEMPLATE_BYTES, MEDIA_BYTES_MAX = 12, 2**20, 32 * 2**20
_MEDIA_IDS_MAX = 2**20
#: The bytes of a list of ids that are read in one turn of the event loop; and the values beside a longer list.
_PIECE_BYTES, _OTHER_VALUES_MAX = 2**16, 2**18
_LIST_OF_IDS = re.compile(rb'"(tokens|token_ids)"\s*:\s*\[')
#: The placeholder for a list read in pieces.
_MARK = "ids"
_CHAT_RENDER, _COMPLETION_RENDER = "/v1/chat/completions/render", "/v1/completions/render"
#: A server without a path answers with such a status.
_NO_PATH = (404, 405, 501)


def answer_bytes_max(text_bytes: int) -> int:
    """Return the bytes that the token ids of so much text can need."""
    return _TEMPLATE_BYTES + _ID_BYTES * text_bytes


class RemoteTokenizer(Forgetful):
    """The tokenizer of an engine at ``url``, for ``model`` as the engine calls it."""

    kind = "remote"
    encodes_whole = False

    def __init__(self, url: str, model: str, asker: Asker, *, seconds: float, bytes_max: int) -> None:
        self.name = url
        self._base = url.rstrip("/")
        self._model = model
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._asker = asker

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the tokens of a prompt from the engine."""
        if is_cut(prompt):
            return await self._cut(prompt)
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            rendered = await self._post(_CHAT_RENDER, self._chat(prompt), "messages", bytes_max=MEDIA_BYTES_MAX)
            if rendered is None:
                raise InvalidValue(
                    f"messages have images or other media, and the tokenizer {self.name} has no {_CHAT_RENDER}; name "
                    "one that has it, or send token_ids with features",
                    field="messages",
                )
            return self._rendered(rendered)
        is_chat = isinstance(prompt, ChatPrompt)
        body = self._chat(prompt) if isinstance(prompt, ChatPrompt) else self._completion(prompt)
        field = "messages" if is_chat else "prompt"
        answer = await self._post("/tokenize", body, field)
        if answer is not None:
            return TokenizedPrompt(self._ids(answer, "tokens"))
        answer = await self._post(_CHAT_RENDER if is_chat else _COMPLETION_RENDER, body, field)
        if answer is None:
            raise self._unusable("it has neither /tokenize nor render endpoints, or not this model")
        return self._rendered(answer)

    async def _cut(self, prompt: Prompt) -> TokenizedPrompt:
        """Return the tokens of a truncated prompt, which /tokenize does not support."""
        is_chat = isinstance(prompt, ChatPrompt)
        body = self._chat(prompt) if isinstance(prompt, ChatPrompt) else self._completion(prompt)
        assert prompt.truncation is not None
        body |= {"truncate_prompt_tokens": prompt.truncation.keep, "truncation_side": prompt.truncation.side}
        path = _CHAT_RENDER if is_chat else _COMPLETION_RENDER
        has_data = isinstance(prompt, ChatPrompt) and has_media(prompt.messages)
        answer = await self._post(path, body, "truncate_prompt_tokens", bytes_max=MEDIA_BYTES_MAX if has_data else None)
        if answer is None:
            raise InvalidValue(
                f"truncate_prompt_tokens needs {path}, which the tokenizer {self.name} does not have; name one that "
                "has it, or send token_ids",
                field="truncate_prompt_tokens",
            )
        return self._rendered(answer)

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids from the engine."""
        body = {"model": self._model, "tokens": list(ids)}
        answer = await self._post("/detokenize", body, "tokens", bytes_max=MEDIA_BYTES_MAX)
        prompt = answer.get("prompt", answer.get("text")) if isinstance(answer, dict) else None  # vLLM, SGLang
        if not isinstance(prompt, str):
            raise self._unusable("its answer has no prompt")
        return prompt

    async def close(self) -> None:
        """Close its connections."""
        await self._asker.close()

    # ---- bodies and answers ------------------------------------------------------------------------

    def _completion(self, prompt: TextPrompt) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}

    def _chat(self, prompt: ChatPrompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*as_message(prompt.system), *prompt.messages],
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
            "add_special_tokens": prompt.add_special_tokens,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if prompt.template_kwargs:
            body["chat_template_kwargs"] = dict(prompt.template_kwargs)
        return body

    def _ids(self, answer: Any, name: str) -> bytes:
        ids = answer.get(name) if isinstance(answer, Mapping) else None
        if isinstance(ids, bytes):
            return ids
        # A boolean is an int to Python.
        if isinstance(ids, list) and set(map(type, ids)) <= {int}:
            try:
                return pack_tokens(ids)
            except OverflowError:
                pass  # an id above or below the range of a u32
        raise self._unusable(f"its answer has no list of {name}")

    def _rendered(self, answer: Any) -> TokenizedPrompt:
        if isinstance(answer, list) and len(answer) == 1:
            (answer,) = answer  # of completions, one for each prompt
        ids = self._ids(answer, "token_ids")
        features = answer.get("features")
        try:
            return TokenizedPrompt(ids, () if features is None else items_of(features))
        except InvalidValue as error:
            raise self._unusable(f"in its answer, {error.sentence}") from None

    async def _post(self, path: str, body: dict[str, Any], field: str, bytes_max: int | None = None) -> Any:
        """Return the answer, or None if the server has no such path. ``bytes_max`` None: as many as the ids need."""
        payload = _json(body, field)
        if len(payload) > 2 * self._bytes_max:
            raise InvalidValue(
                f"{field} is {len(payload)} bytes of JSON and at most {2 * self._bytes_max} are sent on; send less, or "
                "raise WAYMARK_MAX_TOKENS",
                reason="too_large",
                field=field,
            )
        if bytes_max is None:
            bytes_max = answer_bytes_max(min(len(payload), self._bytes_max))
        try:
            status, received = await self._asker.ask(
                self._base + path, seconds=self._seconds, bytes_max=bytes_max, json=payload
            )
        except Unanswered as error:
            raise self._unusable(error.sentence) from None
        if status in (400, 413, 422):
            raise InvalidValue(
                f"{self.name} refuses the {field} with status {status}: {_told(received)}; send what that engine takes",
                field=field,
            )
        if status in _NO_PATH:
            return None
        if status != 200:
            raise self._unusable(f"it answered with status {status}")
        try:
            answer = await _loaded(received, max(_MEDIA_IDS_MAX, bytes_max // _ID_BYTES))
        except (ValueError, OverflowError):
            answer = None
        if not isinstance(answer, dict | list):
            raise self._unusable("its answer is no JSON object, or has no list of ids")
        return answer

    def _unusable(self, why: str) -> TokenizerUnavailable:
        return TokenizerUnavailable(f"the tokenizer {self.name} cannot be used now: {why}")


def _json(body: dict[str, Any], field: str) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{field} cannot be written as JSON: {str(error)[:100]}; send JSON", field=field) from None


async def _loaded(received: bytes, ids_max: int) -> Any:
    """Read an answer. A long list of ids comes as bytes, and is read in pieces: the parser holds the process."""
    for start in islice(_LIST_OF_IDS.finditer(received), 4):
        end = received.find(b"]", start.end())
        if end - start.end() > _PIECE_BYTES:
            ids = await _ids_in(received, start.end(), end, ids_max)
            rest = b'%b"%b"%b' % (received[: start.end() - 1], _MARK.encode(), received[end + 1 :])
            answer, name = bounded_loads(rest, values_max=_OTHER_VALUES_MAX), start[1].decode()
            for part in answer if isinstance(answer, list) else [answer]:
                if isinstance(part, dict) and part.get(name) == _MARK:
                    part[name] = ids
            return answer
    return bounded_loads(received, values_max=_OTHER_VALUES_MAX)


async def _ids_in(received: bytes, start: int, end: int, ids_max: int) -> bytes:
    """Return numbers between commas as ids. Raise ValueError, or OverflowError, if one is not an id."""
    pieces, length = [], 0
    while True:
        cut = received.find(b",", start + _PIECE_BYTES, end)
        ids = bounded_loads(b"[%b]" % received[start : end if cut < 0 else cut])
        length += len(ids)
        if set(map(type, ids)) != {int} or length > ids_max:
            raise ValueError
        pieces.append(pack_tokens(ids))
        if cut < 0:
            return b"".join(pieces)
        start = cut + 1
        await asyncio.sleep(0)


def _told(received: bytes) -> str:
    """Return an engine's explanation of its refusal, on one line."""
    try:
        answer = bounded_loads(received)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return json.dumps(str(answer)[:200], ensure_ascii=False)
