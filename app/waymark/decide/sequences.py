"""The load of the sequences that an engine computes for one request: those of ``n``, and those of further prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from waymark.base.errors import NoTarget, Saturated, StoreUnavailable
from waymark.decide.policies.target import Candidate
from waymark.decide.selector import Selector
from waymark.domain.names import GroupName
from waymark.store.reservations import Reservation

#: Sequences of one request that load is reserved for; an engine may be asked for more.
SEQUENCES_MAX = 64


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


async def reserve_sequences(
    selector: Selector, group: GroupName, candidate: Candidate, loads: Sequence[SequenceLoad], milliseconds: int
) -> tuple[Reservation, ...]:
    """Reserve a target for each; fewer if it has as many requests as it may have, or Redis is unavailable."""
    results = await asyncio.gather(
        *(selector.reserve(group, candidate, load.new, load.context, milliseconds) for load in loads),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, NoTarget | Saturated | StoreUnavailable):
            raise result
    return tuple(result for result in results if isinstance(result, Reservation))
