"""``waymark placement`` and ``drain``: the worth of each cache, and the engines to stop.

A drained engine gets no new requests and ends those that it has; then it can be unregistered.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue, NotFound, WaymarkError
from waymark.base.shown import several, shown
from waymark.console.publishers import drain_of, is_target
from waymark.console.screen import Grid, ScreenPart, text
from waymark.console.service import RemoteService, may_pass
from waymark.contract.publishers import Publisher, UnregisterAnswer, WeightAnswer
from waymark.contract.results import PlacementAnswer, ValuedTarget

#: The pause between two looks at a walk, or at the requests under way.
_PAUSE_SECONDS = 0.5


# ---- waymark placement -----------------------------------------------------------------------------

#: For how long a command waits for the first walk over the rows of a model.
_WALK_SECONDS = 60.0
_AMOUNTS = {"ONLY": "only_tokens", "FEW": "few_tokens", "USED": "only_used_tokens"}


class NotValued(WaymarkError):
    """No worker has valued the caches in time."""


def placement(service: RemoteService, arguments: argparse.Namespace) -> PlacementAnswer:
    """Return the answer of ``/placement``."""
    wanted = {"model": arguments.model, "tenant": arguments.tenant_id}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    return service.get_for(PlacementAnswer, f"/placement?{query}")


def parts_of_placement(answer: PlacementAnswer) -> list[ScreenPart]:
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


# ---- waymark drain ---------------------------------------------------------------------------------


class NotDrained(WaymarkError):
    """Requests are still under way."""


def named(service: RemoteService, arguments: argparse.Namespace) -> str:
    """Return the instance_id: the name itself, or that of the engine whose requests go to this URL."""
    name: str = arguments.engine
    if not name.startswith(("http://", "https://")):
        return name
    tenant, url = arguments.tenant_id or "default", name.rstrip("/")
    names: set[str] = {
        publisher.instance_id
        for publisher in service.workers().publishers
        if publisher.tenant_id == tenant and (publisher.address or "").rstrip("/") == url
    }
    if len(names) > 1:
        raise InvalidValue(f"several engines have the address {shown(url)}: {', '.join(sorted(names))}; give a name")
    if not names:
        raise NotFound(
            f"no engine of tenant {shown(tenant)} has the address {shown(url)}; 'waymark publishers' lists them"
        )
    return names.pop()


def drain(service: RemoteService, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield lines to print. If it raises ``NotFound``, ``ServiceRefused`` or ``NotDrained``, no engine is
    unregistered.
    """
    name, tenant = arguments.engine, arguments.tenant_id or "default"
    ranks = _ranks(service, name, tenant)
    if not ranks:
        raise NotFound(
            f"no engine {shown(name)} is registered for tenant {shown(tenant)}; 'waymark publishers' lists them"
        )
    engine = {"instance_id": name, "tenant_id": tenant}
    if arguments.resume:
        changed = service.post_for(WeightAnswer, "/weight", engine | {"weight": arguments.weight})
        was = "gets requests again, with weight" if any(map(drain_of, ranks)) else "was not drained; its weight is now"
        yield f"{name} {was} {changed.weight:g}"
        return
    service.post("/weight", engine | {"weight": 0})
    yield f"{name} gets no new requests"
    deadline, reported = time.monotonic() + arguments.wait_seconds, ""
    while requests := _under_way(service, name, tenant):
        seconds_left = deadline - time.monotonic()
        if seconds_left < 0:
            raise NotDrained(
                f"{name} has {requests} after {arguments.wait_seconds:g} s. "
                f"Run the command again to wait on, or {_resume(arguments)}"
            )
        if requests != reported:
            reported = requests
            yield f"{requests}, {seconds_left:.0f} s left"
        time.sleep(_PAUSE_SECONDS)
    yield f"{name} is drained: it has no request under way"
    if arguments.unregister:
        removed = service.post_for(UnregisterAnswer, "/unregister", engine).removed_instances
        yield from (f"unregistered {removed_id}" for removed_id in removed)


def drain_all(
    service: RemoteService, arguments: argparse.Namespace, targets: Sequence[ValuedTarget]
) -> Iterator[tuple[str, str]]:
    """Drain these targets of ``/placement``: first all new requests to them end, and then each is waited for.

    Yield the name of an engine and a line to print. If one cannot be drained, all get requests again: it raises
    ``ServiceRefused``, or ``NotDrained`` if that fails, too. It raises ``NotDrained`` at the end if requests are still
    under way.
    """
    weighed: list[dict[str, Any]] = []
    try:
        for target in targets:
            engine = {"instance_id": target.instance_id, "tenant_id": target.tenant_id}
            weighed.append(engine | {"weight": target.weight})
            service.post("/weight", engine | {"weight": 0})
    except WaymarkError as error:
        if not may_pass(error):
            weighed.pop()  # a refusal changes nothing; an answer that is lost may have
        lost = [engine["instance_id"] for engine in weighed if not _is_restored(service, engine)]
        if lost:
            raise NotDrained(f"{error}; whether {', '.join(lost)} get new requests is not known") from error
        raise
    problems: list[str] = []
    for target in targets:
        name = target.instance_id
        own = argparse.Namespace(**vars(arguments) | {"engine": name, "tenant_id": target.tenant_id})
        try:
            for line in drain(service, own):
                yield name, line
        except NotDrained as error:
            problems.append(str(error))
    if problems:
        raise NotDrained("; ".join(problems))


def _is_restored(service: RemoteService, engine: dict[str, Any]) -> bool:
    """Give an engine its weight again. Return whether that succeeded."""
    try:
        service.post("/weight", engine)
    except WaymarkError:
        return False
    return True


def left_as(service: RemoteService, arguments: argparse.Namespace) -> str:
    """Return the state of an engine whose drain was interrupted; an empty text if it gets requests."""
    ranks = _ranks(service, arguments.engine, arguments.tenant_id or "default")
    if not any(map(drain_of, ranks)):
        return ""
    under_way = several(_requests(ranks), "request")
    return f"{arguments.engine} stays drained, {under_way} under way; {_resume(arguments)}"


def _resume(arguments: argparse.Namespace) -> str:
    return way_back(arguments.engine, arguments.tenant_id)


def way_back(engine: str, tenant: str | None) -> str:
    """Return the part of a sentence that says how a drained engine gets requests again."""
    flag = ("--tenant-id", tenant) if tenant else ()
    words = shlex.join(["waymark", "drain", engine, "--resume", *flag])
    return f"'{words}' gives it requests again"


def _under_way(service: RemoteService, name: str, tenant: str) -> str:
    """Return the requests of an engine in words; empty if it has none and gets none.

    A replica may be unavailable for a while, and another command may have given the engine its weight again.
    """
    try:
        ranks = _ranks(service, name, tenant)
    except WaymarkError as error:
        if not may_pass(error):
            raise
        return f"requests that cannot be counted ({error})"
    if any(rank.weight for rank in ranks if is_target(rank)):
        return "a weight above 0 again"
    requests = _requests(ranks)
    return f"{several(requests, 'request')} under way" if requests else ""


def _requests(ranks: list[Publisher]) -> int:
    return sum(rank.load.requests for rank in ranks)


def _ranks(service: RemoteService, name: str, tenant: str) -> list[Publisher]:
    return [
        publisher
        for publisher in service.workers().publishers
        if (publisher.instance_id, publisher.tenant_id) == (name, tenant)
    ]
