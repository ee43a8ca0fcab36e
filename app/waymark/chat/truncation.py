"""``truncate_prompt_tokens`` of a request: how vLLM cuts the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from waymark.base.errors import InvalidValue

_ID_BYTES = 4


class Truncation(NamedTuple):
    """How many ids are kept, and from which side the others are removed; None: the tokenizer removes them itself."""

    keep: int
    """-1: as many as the model takes, and so all of a prompt that it accepts."""
    side: Literal["left", "right"] | None = None

    def cut(self, ids: bytes, before: bytes, behind: bytes) -> bytes:
        """What is kept of packed ids, which begin and end with what the tokenizer adds.

        ``InvalidValue`` where even that is too much.
        """
        keep = _ID_BYTES * self.keep
        if self.keep < 0 or len(ids) <= keep:
            return ids
        if not keep:
            return b""
        if self.side is not None:
            return ids[:keep] if self.side == "right" else ids[len(ids) - keep :]
        # A tokenizer that cuts leaves what it adds, and cuts what stands between.
        room = keep - len(before) - len(behind)
        if room < 0:
            raise InvalidValue(
                f"truncate_prompt_tokens is {self.keep}, fewer than the special tokens that are added; send more, or "
                "add_special_tokens as false",
                field="truncate_prompt_tokens",
            )
        text = ids[len(before) : len(ids) - len(behind)]
        return before + text[len(text) - room :] + behind


def truncation_of(fields: Mapping[str, Any]) -> Truncation | None:
    """The truncation that a body asks for; None if it asks for none, or for one that cannot be read."""
    keep, side = fields.get("truncate_prompt_tokens"), fields.get("truncation_side")
    if type(keep) is not int or keep < -1:
        return None
    return Truncation(keep, side if side in ("left", "right") else None)
