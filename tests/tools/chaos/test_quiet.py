"""When everything is compared, and what is taken as known exactly then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.controller import Controller
from tools.chaos.fleet import Crew
from tools.chaos.publishers import Publisher, Spec
from tools.chaos.quiet import Quiet
from tools.chaos.trace import Trace


class Saying:
    """A replica whose ``/workers`` names one list of statuses after the other, and the last one from then on."""

    is_running, log, log_path = True, "", Path("replica.log")

    def __init__(self, publishers: Sequence[Publisher], *statuses: Sequence[str]) -> None:
        self._publishers = publishers
        self._statuses = list(statuses)

    async def get(self, path: str) -> dict[str, Any]:
        assert path == "/workers"
        statuses = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        return {"publishers": [*map(_row, self._publishers, statuses)]}


def _row(publisher: Publisher, status: str) -> dict[str, Any]:
    instance_id, tenant_id, dp_rank = publisher.spec.name.rank
    row = {"instance_id": instance_id, "tenant_id": tenant_id, "dp_rank": dp_rank, "worker": "w", "last_error": None}
    return {**row, "status": status, "watermark": publisher.last_seq, "counters": {}}


async def test_a_stream_that_is_taken_over_while_others_are_waited_for_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had lost batches and said so; its next worker says at first that it is starting, and nothing of the loss."""
    lossy, other = (Publisher(Spec(name, "vllm-map", buffer_batches=0), seed=1) for name in ("lossy", "other"))
    async with AsyncExitStack() as stack:
        await lossy.open(stack)
        await other.open(stack)  # so that their sockets are closed
    lossy.excuse = other.excuse = "it has no replay endpoint"
    crew = Crew()
    replica: Any = Saying(
        [lossy, other], ("degraded", "replaying"), ("starting", "active"), ("degraded", "starting"), ("degraded",) * 2
    )
    crew.replicas.append(replica)
    controller = Controller(crew, [], Trace())
    compared: list[Publisher] = []

    async def agree(unknown: Sequence[Publisher], states: object) -> None:
        compared.extend(unknown)

    async def restore() -> None:
        """Everybody is registered."""

    quiet = Quiet(crew, [lossy, other], {}, controller, Trace(), keeps_on_gap=True, insides={}, block_size=4)
    monkeypatch.setattr(controller, "restore", restore)
    monkeypatch.setattr(quiet, "_agree", agree)
    assert await quiet.compare() == [lossy, other]
    assert compared == [lossy, other]
