"""Reads the prompt of a body, whatever its kind; tokenizes texts, also for ``/tokenize`` and ``/detokenize``.

A body has exactly one prompt, whose block keys can be computed for any block size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.errors import InvalidBody
from waymark.api.http.prompts import SEQ_HASHES, SeqHashKeys, TokenKeys, check_count, hashes_in, tokens_in
from waymark.contract.prompts import DetokenizeAnswer, TokenizeAnswer
from waymark.decide.served import PromptOptions
from waymark.domain.multimodal import PromptItems, check_blocks
from waymark.domain.names import GroupName
from waymark.domain.packing import unpack_tokens
from waymark.domain.pool_keys import PromptIds
from waymark.store.reader import KeysOf, PromptKeys
from waymark.tokenization.prompt import ChatPrompt, Prompt, SourcedTokens, TextPrompt

if TYPE_CHECKING:
    from waymark.api.query_schemas import PromptFields, TextFields
    from waymark.tokenization.tokenizers import Tokenizers


class ModelPrompt(NamedTuple):
    """A prompt before it is tokenized, and the model whose tokenizer it needs."""

    group: GroupName
    prompt: Prompt
    field: str


def prompt_of(group: GroupName, request: TextFields, kinds: Sequence[str] = (), *, missing: str) -> ModelPrompt | None:
    """Return the text or the messages of a body, or None if it has a prompt of another kind.

    ``kinds`` are the other kinds of prompts in the body, and ``missing`` is the field to name if there is no prompt.
    Raise ``InvalidBody`` if it does not have exactly one prompt.
    """
    named = [*kinds, *(name for name in ("prompt", "messages") if getattr(request, name) is not None)]
    if len(named) > 1:
        raise InvalidBody(
            f"a request has one prompt, and this has {' and '.join(named)}; send one of them", field=named[1]
        )
    if not named:
        raise InvalidBody(
            f"there is no prompt; send {missing}", reason="missing", field=missing.split(" ")[0].strip(",")
        )
    if request.messages is not None:
        prompt: Prompt = ChatPrompt(
            request.messages,
            request.tools,
            request.chat_template_kwargs,
            request.add_generation_prompt,
            request.continue_final_message,
            bool(request.add_special_tokens),
            request.system,
            request.truncation,
        )
        return ModelPrompt(group, prompt, "messages")
    if request.prompt is not None:
        return ModelPrompt(
            group, TextPrompt(request.prompt, request.add_special_tokens is not False, request.truncation), "prompt"
        )
    return None


class PromptTokenizer:
    """Tokenizes for every handler that accepts text."""

    def __init__(self, tokenizers: Callable[[], Tokenizers], tokens_max: int) -> None:
        """``tokenizers`` is called when they are first needed."""
        self._factory = tokenizers
        self._instance: Tokenizers | None = None
        self._max_tokens = tokens_max

    @property
    def _tokenizers(self) -> Tokenizers:
        if self._instance is None:
            self._instance = self._factory()
        return self._instance

    async def tokens(self, asked: ModelPrompt) -> SourcedTokens:
        """Return the token ids of a prompt. Raise the errors of ``Tokenizers.tokens``, and ``too_large`` above
        ``max_tokens``.
        """
        tokens = await self._tokenizers.tokens(asked.group.model_name, asked.prompt, asked.group.tenant_id)
        check_count(len(tokens.ids) // 4, asked.field, self._max_tokens)
        return tokens

    def warnings(self) -> list[str]:
        """Return a sentence for each open tokenizer that costs more than necessary."""
        return self._tokenizers.warnings()

    async def tokenize(self, body: Body) -> Answer:
        from waymark.api.query_schemas import TokenizeRequest  # no query needs pydantic

        request = TokenizeRequest.of(body.fields)
        asked = prompt_of(request.group, request, missing="prompt or messages")
        assert asked is not None  # these requests have no prompts of other kinds
        tokens = await self.tokens(asked)
        ids = unpack_tokens(tokens.ids)
        return Answer(
            TokenizeAnswer(
                count=len(ids),
                max_model_len=None,
                tokens=ids,
                source="remote" if tokens.source == "remote" else "local",
            )
        )

    async def detokenize(self, body: Body) -> Answer:
        from waymark.api.query_schemas import DetokenizeRequest  # no query needs pydantic

        request = DetokenizeRequest.of(body.fields)
        ids = tokens_in(body, DetokenizeRequest.spelling("tokens", body.fields), self._max_tokens)
        text = await self._tokenizers.text(request.model, unpack_tokens(ids), request.group.tenant_id)
        return Answer(DetokenizeAnswer(prompt=text))


def text_of(group: GroupName, request: PromptFields, *further_kinds: str) -> ModelPrompt | None:
    """Return the text or the messages of a body; None if its prompt is of another kind, such as ``further_kinds``.

    Raise ``InvalidBody`` if it does not have exactly one prompt, or has ``features`` without ``token_ids``.
    """
    kinds = ("token_ids", "seq_hashes")
    present = [name for name in (*kinds, *further_kinds) if getattr(request, name) is not None]
    if request.features is not None and request.token_ids is None:
        raise InvalidBody("features need token_ids; send both", field="features")
    return prompt_of(group, request, present, missing=", ".join((*kinds, "messages", *further_kinds)) + " or prompt")


class GivenPrompts:
    """Reads prompts of token ids or hashes, and checks every element."""

    def __init__(self, options: PromptOptions) -> None:
        self._max_tokens = options.tokens_max
        self.seed = options.hash_seed

    def keys_of(self, body: Body, namespace: int, items: PromptItems = ()) -> KeysOf:
        """Return the keys of the token ids or hashes of a body. ``InvalidBody`` names a wrong element.

        ``items`` are the images and other items among the tokens.
        """
        if body.fields.get("token_ids") is not None:
            return self.of_tokens(tokens_in(body, "token_ids", self._max_tokens), namespace, items)
        return self.of_hashes(body, namespace)

    def of_hashes(self, body: Body, namespace: int) -> KeysOf:
        """Return the keys of the hashes of a body."""
        field = next(name for name in SEQ_HASHES.spellings if body.fields.get(name) is not None)
        return partial(_of_hashes, hashes_in(body, field, self._max_tokens), namespace)

    def of_tokens(self, tokens: bytes, namespace: int, items: PromptItems = ()) -> KeysOf:
        """Return the keys of token ids as little-endian u32."""
        return partial(_of_tokens, tokens, namespace, self.seed, items)


def _of_tokens(tokens: bytes, namespace: int, seed: int, items: PromptItems, block_size: int) -> PromptKeys:
    count = len(tokens) // 4
    if items:
        check_blocks(items, count, block_size)
    keys = TokenKeys(tokens, block_size, namespace, seed, items)
    return PromptKeys(keys, count // block_size, count, None if items else PromptIds(tokens, namespace))


def _of_hashes(seq_hashes: array[int], namespace: int, block_size: int) -> PromptKeys:
    blocks = len(seq_hashes)
    return PromptKeys(SeqHashKeys(seq_hashes, namespace), blocks, blocks * block_size)
