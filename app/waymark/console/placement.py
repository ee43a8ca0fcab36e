"""``waymark placement``: the worth of each cache, and the cheapest engines to stop."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue, NotFound, WaymarkError
from waymark.base.shown import several, shown
from waymark.console.screen import Grid, ScreenPart, text
from waymark.console.service import RemoteService
from waymark.contract.results import PlacementAnswer, ValuedTarget

#: For how long a command waits for the first walk over the rows of a model, and the pause between two looks.
_WALK_SECONDS, _PAUSE_SECONDS = 60.0, 0.5
_AMOUNTS = {"ONLY": "only_tokens", "FEW": "few_tokens", "USED": "only_used_tokens"}


class NotValued(WaymarkError):
    """Nobody has valued the caches in time."""


def placement(service: RemoteService, arguments: argparse.Namespace) -> PlacementAnswer:
    """Return the answer of ``/placement``."""
    wanted = {"model": arguments.model, "tenant": arguments.tenant_id}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    return service.get_for(PlacementAnswer, f"/placement?{query}")


def parts(answer: PlacementAnswer) -> list[ScreenPart]:
    """Return the lines and the table."""
    if not answer.targets:
        return [text("no engine is registered")]
    screen_parts: list[ScreenPart] = []
    for model in answer.models:
        name = f"{model.model_name} of tenant {model.tenant_id}"
        if model.reason is not None:
            screen_parts.append(text(f"{name}: {model.reason}", "yellow"))
            continue
        estimate = "" if model.share in (None, 1) else f", estimated from {model.share:.1%} of the rows"
        use = several(model.decisions or 0, "kept decision")
        screen_parts.append(
            text(f"{name}: valued {model.age_seconds or 0:.0f} s ago{estimate}, with the use in {use}", "bold")
        )
    names, numbers = ("TENANT", "MODEL", "ENGINE", "ROLE"), ("WEIGHT", "REQUESTS", "TOKENS", *_AMOUNTS, "SECONDS")
    rows = [
        (
            *(text(str(getattr(target, name))) for name in ("tenant_id", "model_name", "instance_id", "role")),
            text(f"{target.weight:g}", "" if target.weight else "yellow"),
            text(f"{target.requests:,}"),
            *(text(_amount(getattr(target, name))) for name in ("tokens", *_AMOUNTS.values())),
            text("" if target.cost_seconds is None else f"{target.cost_seconds:,.1f}"),
            text(target.reason or ""),
        )
        for target in answer.targets
    ]
    head, spare = (*names, *numbers, "NOTE"), ("TENANT", "ROLE", "FEW", "WEIGHT", "MODEL")
    return [*screen_parts, Grid(head, rows, frozenset(numbers), spare, below="NOTE", named=("ENGINE",))]


def _amount(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens:,}"


def cheapest(service: RemoteService, arguments: argparse.Namespace) -> list[ValuedTarget]:
    """Return the targets that ``--cheapest`` chooses. Raise ``InvalidValue``, ``NotFound`` or ``NotValued``."""
    if arguments.model is None:
        raise InvalidValue("--cheapest needs --model: engines of different models do not replace each other")
    tenant = arguments.tenant_id or "default"
    deadline = time.monotonic() + _WALK_SECONDS
    while True:
        query = urlencode({"model": arguments.model, "tenant": tenant})
        answer = service.get_for(PlacementAnswer, f"/placement?{query}")
        if not answer.models:
            raise NotFound(
                f"tenant {shown(tenant)} has no engine of model {shown(arguments.model)}; see 'waymark publishers'"
            )
        reason = answer.models[0].reason
        if reason is None:
            return choose(answer.targets, arguments.cheapest)
        if time.monotonic() > deadline:
            raise NotValued(f"{reason}. 'waymark publishers' shows whether an ingest worker runs")
        time.sleep(_PAUSE_SECONDS)


def choose(targets: Sequence[ValuedTarget], count: int) -> list[ValuedTarget]:
    """Return the first ``count`` targets that may be stopped. Raise ``InvalidValue`` if there are fewer.

    Engines that get no new requests and those of unknown worth are left out. One engine of each role stays.
    """
    serving = [target for target in targets if target.weight]
    serving_left = Counter(target.role for target in serving)
    chosen: list[ValuedTarget] = []
    for target in serving:
        if len(chosen) < count and target.only_used_tokens is not None and serving_left[target.role] > 1:
            serving_left[target.role] -= 1
            chosen.append(target)
    if len(chosen) < count:
        raise InvalidValue(
            f"--cheapest is {count}, and {several(len(chosen), 'engine')} of {len(serving)} can be chosen: one of each "
            "role stays, and an engine whose cache is not known is not chosen; 'waymark placement' shows them"
        )
    return chosen


def why(target: ValuedTarget) -> str:
    """Return a sentence that says why a target was chosen."""
    seconds = "" if target.cost_seconds is None else f", {target.cost_seconds:,.1f} s of prefill"
    return (
        f"{target.instance_id} is among the cheapest: {target.only_tokens:,} of its {target.tokens:,} tokens "
        f"are nowhere else ({target.only_used_tokens:,} with their use{seconds})"
    )
