"""The prompts of an inference request: their token ids, the keys of the blocks of the first one, and their load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from waymark.base import native
from waymark.base.bounded_json import VALUES_MAX, bounded_loads
from waymark.base.errors import InvalidValue
from waymark.chat.prefix_key import text_of
from waymark.chat.requests import Form, InferenceRequest, PackedTokens
from waymark.decide.question import HashedPrompt, PromptOf
from waymark.decide.served import PromptOptions, ServedModel
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.multimodal import PromptItems, block_keys_with, check_blocks
from waymark.domain.packing import pack_tokens
from waymark.domain.pool_keys import PromptIds
from waymark.tokenization.prompt import ChatPrompt, SourcedTokens, TextPrompt
from waymark.tokenization.prompt import Prompt as TextOrChat
from waymark.tokenization.tokenizers import Tokenizers

#: Sequences of one request that load is reserved for; an engine may be asked for more.
SEQUENCES_MAX = 64
#: Characters of text that count as a token if the tokens are not known.
_CHARACTERS = 4
#: A shorter body is parsed just as fast.
_LONG_BYTES = 2048


def read_fields(body: bytes, form: Form | None) -> Any:
    """Read a JSON body. ``PackedTokens`` are in place of a long prompt of token ids, of which no objects are made.

    Raise as ``bounded_loads`` does.
    """
    if native.selected is not None and form is Form.COMPLETIONS and len(body) > _LONG_BYTES:
        found = native.selected.cut(body, b'"prompt"', VALUES_MAX)
        fields = None if found is None else _fields_around(body, *found)
        if fields is not None:
            return fields
    return bounded_loads(body)


def _fields_around(body: bytes, start: int, end: int, ids: bytes) -> dict[str, Any] | None:
    """Return the fields of a body of which ``cut`` has read a list; None if this list is not the prompt."""
    try:
        fields = bounded_loads(b"%b[]%b" % (body[:start], body[end:]))
    except ValueError:
        return None  # the error of the whole body names the place
    if not ids or not isinstance(fields, dict) or fields.get("prompt") != []:
        return None
    fields["prompt"] = PackedTokens(ids)
    return fields


def no_prompt(block_size: int) -> HashedPrompt:
    """Return the prompt of a request without one, in any block size."""
    return HashedPrompt(0, b"", has_tokens=False)


def unread_prompt(tokens: int) -> PromptOf:
    """Return a prompt of which only an estimate of its length is known."""
    return lambda block_size: HashedPrompt(tokens, b"", has_tokens=False)


def estimate_tokens(
    messages: Sequence[Any] | None, system: Any, prompts: Sequence[str | Sequence[int] | PackedTokens]
) -> list[int]:
    """Estimate the tokens of each prompt, from the length of its text."""
    if messages is not None:
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        characters = len(text_of(system)) + sum(len(text_of(content)) for content in contents)
        return [math.ceil(characters / _CHARACTERS)]
    return [math.ceil(len(prompt) / _CHARACTERS) if isinstance(prompt, str) else len(prompt) for prompt in prompts]


class RequestPrompts:
    """The prompts of requests, as tokens."""

    def __init__(self, tokenizers: Tokenizers, options: PromptOptions) -> None:
        self._tokenizers = tokenizers
        self._seed = options.hash_seed
        self._tokens_max = options.tokens_max

    async def tokens(self, request: InferenceRequest, served: ServedModel) -> list[SourcedTokens]:
        """Return the tokens of each prompt, of at most ``SEQUENCES_MAX``; empty for a request without a prompt.

        Raise InvalidValue (``no_tokenizer`` if the model has no tokenizer), TokenizerUnavailable, StoreUnavailable.
        """
        group = served.group
        return [
            text
            if isinstance(text, SourcedTokens)
            else await self._tokenizers.tokens(group.model_name, text, group.tenant_id)
            for text in _prompts_in(request)
        ]

    def keyed(self, tokens: SourcedTokens, request: InferenceRequest, served: ServedModel) -> PromptOf:
        """Return the keys of a prompt in any block size. Raise InvalidValue if it has too many tokens."""
        if len(tokens.ids) // 4 > self._tokens_max:
            raise InvalidValue(
                f"the prompt has more than {self._tokens_max} tokens; send less, or raise WAYMARK_MAX_TOKENS",
                reason="too_large",
            )
        salts = [] if request.cache_salt is None else [request.cache_salt]
        return partial(_keyed, tokens.ids, tokens.items, namespace(served.adapter, salts), self._seed)


def _prompts_in(request: InferenceRequest) -> Iterator[TextOrChat | SourcedTokens]:
    if request.form is Form.EMBEDDINGS:
        return  # its blocks would never match again, so the load alone decides
    if request.messages:
        yield ChatPrompt(
            request.messages,
            request.tools,
            request.template_kwargs,
            request.add_generation_prompt,
            request.continue_final_message,
            bool(request.add_special_tokens),
            request.system,
            request.truncation,
        )
    for prompt in request.prompts[:SEQUENCES_MAX]:
        if isinstance(prompt, str):
            yield TextPrompt(prompt, request.add_special_tokens is not False, request.truncation)
        else:
            ids = _packed(prompt)
            yield SourcedTokens(ids if request.truncation is None else request.truncation.cut(ids, b"", b""), "request")


def _packed(prompt: Sequence[int] | PackedTokens) -> bytes:
    if isinstance(prompt, PackedTokens):
        return prompt.ids
    try:
        return pack_tokens(list(prompt))
    except (TypeError, OverflowError, ValueError):
        raise InvalidValue("prompt has an element that is no token id", field="prompt") from None


def _keyed(ids: bytes, items: PromptItems, space: int, seed: int, block_size: int) -> HashedPrompt:
    count = len(ids) // 4
    if not items:
        keys = block_keys(None, ids, block_size, namespace=space, seed=seed)
        return HashedPrompt(count, keys, ids=PromptIds(ids, space))
    try:
        check_blocks(items, count, block_size)
    except InvalidValue:
        return HashedPrompt(count, b"")  # the decision is made without a match
    return HashedPrompt(count, block_keys_with(items, None, ids, block_size, first=0, namespace=space, seed=seed))


# ---- the load of its sequences: those of ``n``, and those of further prompts ----------------------


class SequenceLoad(NamedTuple):
    """The load that one sequence adds to its target, in tokens."""

    new: int
    """0 for a sequence of a prompt that another sequence computes."""
    context: int


def further_sequences(prompts: Sequence[int], copies: int) -> tuple[SequenceLoad, ...]:
    """Return the sequences beyond the first, of prompts with so many tokens each, answered ``copies`` times.

    Sequences of one prompt share its prefill.
    """
    loads = [
        SequenceLoad(context if copy == 0 else 0, context)
        for context in prompts[:SEQUENCES_MAX]
        for copy in range(min(copies, SEQUENCES_MAX))
    ]
    return tuple(loads[1:SEQUENCES_MAX])
