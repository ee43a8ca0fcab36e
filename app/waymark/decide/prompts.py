"""The bounds of prompts. Queries need them, too, so this module imports nothing of policies (``api.first``)."""

from __future__ import annotations

from waymark.base.record import record
from waymark.domain.hashing import DEFAULT_SEED


@record(frozen=True, slots=True)
class PromptOptions:
    """The bounds of the prompts in requests, and the seed of their hashes."""

    hash_seed: int = DEFAULT_SEED
    tokens_max: int = 2**21
    """The most tokens or hashes of one request."""
    deadline_seconds: float = 1.0
    """How long a question may read the index before it is answered from the blocks found so far."""
