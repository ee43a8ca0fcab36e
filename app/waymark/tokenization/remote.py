"""Tokens from an engine: ``POST /tokenize`` as vLLM and SGLang have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from waymark.asker import Asker
from waymark.chat.openai import as_message
from waymark.domain.hashing import pack_tokens
from waymark.errors import InvalidValue, TokenizerUnavailable, Unanswered
from waymark.tokenization.prompt import ChatPrompt, Prompt

#: An answer that is longer is not read. Ids and their commas take about seven bytes each.
_ANSWER_BYTES_MAX = 32 * 2**20


class RemoteTokenizer:
    """The tokenizer of an engine at ``url``, for ``model`` as the engine calls it."""

    kind = "remote"

    def __init__(self, url: str, model: str, asker: Asker, *, seconds: float, bytes_max: int) -> None:
        self.name = url
        self._base = url.rstrip("/")
        self._model = model
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._asker = asker

    def known(self, prompt: Prompt) -> bytes | None:
        """Nothing is: an engine may come back with another tokenizer."""
        return None

    async def tokens(self, prompt: Prompt) -> bytes:
        """The ids of a prompt, as the engine makes them."""
        body: dict[str, Any] = {"model": self._model, "add_special_tokens": prompt.add_special_tokens}
        if isinstance(prompt, ChatPrompt):
            body |= {
                "messages": [*as_message(prompt.system), *prompt.messages],
                "add_generation_prompt": prompt.add_generation_prompt,
                "continue_final_message": prompt.continue_final_message,
            }
            if prompt.tools:
                body["tools"] = list(prompt.tools)
            if prompt.template_kwargs:
                body["chat_template_kwargs"] = dict(prompt.template_kwargs)
            field = "messages"
        else:
            body["prompt"] = prompt.text
            field = "prompt"
        answer = await self._post("/tokenize", body, field)
        try:
            return pack_tokens(answer["tokens"])
        except (KeyError, TypeError, OverflowError, ValueError):
            raise self._unusable("its answer has no list of tokens") from None

    async def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, as the engine makes it."""
        answer = await self._post("/detokenize", {"model": self._model, "tokens": list(ids)}, "tokens")
        found = answer.get("prompt", answer.get("text"))  # vLLM, SGLang
        if not isinstance(found, str):
            raise self._unusable("its answer has no prompt")
        return found

    async def close(self) -> None:
        """Close its connections."""
        await self._asker.close()

    async def _post(self, path: str, body: dict[str, Any], field: str) -> dict[str, Any]:
        sent = _json(body, field)
        if len(sent) > 2 * self._bytes_max:
            raise InvalidValue(
                f"{field} is {len(sent)} bytes of JSON and at most {2 * self._bytes_max} are sent on; send less, or "
                "raise WAYMARK_TEXT_BYTES_MAX",
                reason="too_large",
                field=field,
            )
        try:
            status, received = await self._asker.ask(
                self._base + path, seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX, json=sent
            )
        except Unanswered as error:
            raise self._unusable(error.sentence) from None
        if status in (400, 413, 422):
            raise InvalidValue(
                f"{self.name} refuses the {field} with status {status}: {_told(received)}; send what that engine takes",
                field=field,
            )
        if status != 200:
            raise self._unusable(f"it answered with status {status}")
        try:
            answer = json.loads(received)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._unusable("its answer is no JSON object")
        return answer

    def _unusable(self, why: str) -> TokenizerUnavailable:
        return TokenizerUnavailable(f"the tokenizer {self.name} cannot be used now: {why}")


def _json(body: dict[str, Any], field: str) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{field} cannot be written as JSON: {str(error)[:100]}; send JSON", field=field) from None


def _told(received: bytes) -> str:
    """What an engine says of its refusal, on one line."""
    try:
        answer = json.loads(received)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return json.dumps(str(answer)[:200], ensure_ascii=False)
