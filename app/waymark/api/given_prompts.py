"""The prompt of a body, whatever its kind: exactly one, and the block keys that it makes in any block size."""

from __future__ import annotations

from array import array
from functools import partial

from waymark.api.http.bodies import Body
from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import RequestBody
from waymark.api.http.prompts import SeqHashKeys, TokenKeys, hashes, packed_hashes, token_bytes
from waymark.api.query_schemas import PromptFields
from waymark.api.texts import ModelPrompt, prompt_of
from waymark.base.settings import Settings
from waymark.domain.multimodal import PromptItems, check_blocks
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import PromptIds
from waymark.store.reader import KeysOf, PromptKeys


def text_of(group: GroupName, request: PromptFields, *further_kinds: str) -> ModelPrompt | None:
    """The text or the messages of a body; None if its prompt is of another kind, one of ``further_kinds`` too.

    ``InvalidBody`` if it does not have exactly one prompt, or has ``features`` beside another than ``token_ids``.
    """
    kinds = ("token_ids", "seq_hashes")
    present = [name for name in (*kinds, *further_kinds) if getattr(request, name) is not None]
    if request.features is not None and request.token_ids is None:
        raise InvalidBody("features need token_ids; send both", field="features")
    return prompt_of(group, request, present, missing=", ".join((*kinds, "messages", *further_kinds)) + " or prompt")


class GivenPrompts:
    """A reader of prompts that are token ids or hashes already, checked to the last element."""

    def __init__(self, settings: Settings) -> None:
        self._max_tokens = settings.max_tokens
        self._seed = settings.hash_seed

    def keys_of(self, model: type[RequestBody], body: Body, namespace: int, items: PromptItems = ()) -> KeysOf:
        """Return the keys of the token ids or hashes of a body. ``InvalidBody`` names the wrong element.

        ``items`` are the images and other items among the tokens.
        """
        numbers, fields = body.numbers, body.fields
        has_tokens = fields.get("token_ids") is not None and "token_ids" in model.wire_names
        if has_tokens:
            if numbers is None:
                numbers = token_bytes(
                    fields["token_ids"],
                    field="token_ids",
                    max_tokens=self._max_tokens,
                    may_hold_booleans=body.may_hold_booleans,
                )
            return self.of_tokens(numbers, namespace, items)
        if numbers is not None:
            return partial(_of_hashes, packed_hashes(numbers), namespace)
        field = model.spelling("seq_hashes", fields)
        seq_hashes = hashes(
            fields[field], field=field, max_tokens=self._max_tokens, may_hold_booleans=body.may_hold_booleans
        )
        return partial(_of_hashes, seq_hashes, namespace)

    def of_tokens(self, tokens: bytes, namespace: int, items: PromptItems = ()) -> KeysOf:
        """Return the keys of token ids as little-endian u32."""
        return partial(_of_tokens, tokens, namespace, self._seed, items)


def _of_tokens(tokens: bytes, namespace: int, seed: int, items: PromptItems, block_size: int) -> PromptKeys:
    count = len(tokens) // 4
    if items:
        check_blocks(items, count, block_size)
    keys = TokenKeys(tokens, block_size, namespace, seed, items)
    return PromptKeys(keys, count // block_size, count, None if items else PromptIds(tokens, namespace))


def _of_hashes(seq_hashes: array[int], namespace: int, block_size: int) -> PromptKeys:
    blocks = len(seq_hashes)
    return PromptKeys(SeqHashKeys(seq_hashes, namespace), blocks, blocks * block_size)
