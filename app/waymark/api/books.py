"""``GET /books``: the tokens that decisions promised, the tokens that engines delivered, and the gain."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from functools import reduce
from typing import Any

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.contract.results import BookOfMinute, BookOfTarget, BookRow, BooksAnswer
from waymark.domain.books import Drift, Sums
from waymark.domain.names import GroupName
from waymark.store.books import HOURS_KEPT
from waymark.store.claims import Claim
from waymark.store.store import Store

#: The sums that ``BookRow`` has under the same names.
_AMOUNTS = ("requests", "unreported", "available", "chosen", "expected", "delivered", "random", "earned")
PARAMETERS = ("model", "tenant", "since")
_SINCE = re.compile(r"(\d{1,6})(s|m|h|)", re.ASCII)
_SECONDS = {"s": 1, "": 1, "m": 60, "h": 3600}
_DEFAULT = "1h"


class BooksView:
    """The handler of ``/books``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def books(self, body: Body) -> Answer:
        model, tenant_id = body.path.get("model") or None, body.path.get("tenant") or None
        minutes = -(-since_seconds(body.path.get("since") or _DEFAULT) // 60)
        groups = {
            entry.group_id: group
            for group, entry in (await self._store.directory.groups()).items()
            if body.caller.has(group.tenant_id)
            and model in (None, group.model_name)
            and tenant_id in (None, group.tenant_id)
        }
        targets: dict[tuple[int, int], Sums] = defaultdict(Sums)
        by_minute: dict[int, Sums] = defaultdict(Sums)
        async for line in self._store.books.lines(list(groups), int(time.time() // 60) - minutes + 1):
            target = line.group_id, line.publisher
            targets[target] = targets[target].plus(line.sums)
            by_minute[line.minute] = by_minute[line.minute].plus(line.sums)
        claims = {(claim.group_id, claim.publisher): claim for claim in await self._store.directory.claims()}
        registered = {target: claims[target] for target in targets if target in claims}
        drifts = await self._store.publisher_states.drifts(list(registered.values()))
        drift_of = dict(zip(registered, drifts, strict=True))
        return Answer(
            BooksAnswer(
                minutes=minutes,
                total=BookRow(**_amounts(reduce(Sums.plus, targets.values(), Sums()))),
                targets=[
                    _target(groups[target[0]], registered.get(target), drift_of.get(target), sums)
                    for target, sums in sorted(targets.items())
                ],
                by_minute=[
                    BookOfMinute(time=60 * minute, **_amounts(sums)) for minute, sums in sorted(by_minute.items())
                ],
            )
        )


def since_seconds(text: str) -> int:
    """Return the seconds of a span such as ``90s``, ``30m`` or ``2h``. Raise ``InvalidValue`` for any other text, or
    for more than ``HOURS_KEPT``.
    """
    match = _SINCE.fullmatch(text)
    seconds = 0 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= 3600 * HOURS_KEPT:
        raise InvalidValue(
            f"since is {shown(text)}; send how long ago it begins, such as 30m or 2h, at most {HOURS_KEPT}h",
            field="since",
        )
    return seconds


def _target(group: GroupName, claim: Claim | None, drift: Drift | None, sums: Sums) -> BookOfTarget:
    return BookOfTarget(
        tenant_id=group.tenant_id,
        model_name=group.model_name,
        instance_id=None if claim is None else claim.registration.instance_id,
        dp_rank=None if claim is None else claim.registration.dp_rank,
        credit=1.0 if drift is None else round(1.0 - drift.share, 3),
        **_amounts(sums),
    )


def _amounts(sums: Sums) -> dict[str, Any]:
    """Return the fields of ``BookRow``."""
    return {name: getattr(sums, name) for name in _AMOUNTS} | {
        "prompt_tokens": sums.prompt,
        "completion_tokens": sums.completion,
        "chosen_by_medium": {place: getattr(sums, place) for place in ("device", "host", "disk", "shared")},
        "ttft_ms": round(sums.first_token_ms / sums.first_tokens, 1) if sums.first_tokens else None,
    }
