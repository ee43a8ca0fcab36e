"""``GET /policies/compare`` and ``POST /policies/replay``: other policies over kept decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

from waymark.api.books import since_seconds
from waymark.api.comparison import compare, replay
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import OptionalName, RequestBody
from waymark.decide.options import Shadow
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.presets import preset
from waymark.decide.question import PolicyChoice
from waymark.domain.names import OPTIONAL_NAME
from waymark.store.kept_decisions import KeptDecision
from waymark.store.store import Store

PARAMETERS = ("model", "tenant", "since")
_DEFAULT = "24h"
#: The newest kept decisions that one answer is about: a replay of so many takes a second or two of CPU.
DECISIONS_MAX = 10_000
FILE_MAX = 16_384


class TryPolicyRequest(RequestBody):
    """A policy to try over the kept decisions: its name, or the text of a picker file."""

    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="the name of a policy; the default is the file"
    )
    file: Annotated[str, Field(min_length=1, max_length=FILE_MAX)] | None = Field(
        default=None, description=f"the text of an EndpointPickerConfig in YAML, at most {FILE_MAX} characters"
    )
    model: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only decisions for this model")
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only decisions for this tenant")
    since: Annotated[str, Field(max_length=16)] = Field(
        default=_DEFAULT, description=f"how long ago the decisions begin, such as 30m or 2h ({_DEFAULT})"
    )


class PoliciesView:
    """The handlers."""

    def __init__(self, store: Store, shadows: Sequence[Shadow]) -> None:
        self._store = store
        self._shadows = shadows
        self._one_at_a_time = asyncio.Semaphore(1)

    async def compare(self, body: Body) -> Answer:
        seconds = since_seconds(body.path.get("since") or _DEFAULT)
        async with self._one_at_a_time:
            decisions, unreadable, is_one_group = await self._read(
                body.caller.has, body.path.get("model") or None, body.path.get("tenant") or None, seconds
            )
            return Answer(await compare(decisions, self._shadows, is_one_group=is_one_group, unreadable=unreadable))

    async def replay(self, body: Body) -> Answer:
        request = TryPolicyRequest.of(body.fields)
        if (request.policy is None) == (request.file is None):
            raise InvalidBody("send policy, the name of a policy, or file, the text of a picker file", field="policy")
        seconds = since_seconds(request.since)
        if request.file is not None:
            # The parser holds the GIL in small steps only.
            config = await asyncio.to_thread(read_picker_config, request.file)
            policy = Shadow("file", PolicyChoice.of(config))
        else:
            chosen = preset(request.policy or "")
            policy = Shadow(chosen.name, PolicyChoice.of(chosen))
        async with self._one_at_a_time:
            decisions, unreadable, is_one_group = await self._read(
                body.caller.has, request.model, request.tenant_id, seconds
            )
            return Answer(await replay(decisions, [policy], is_one_group=is_one_group, unreadable=unreadable))

    async def _read(
        self, has: Callable[[str], bool], model: str | None, tenant_id: str | None, seconds: int
    ) -> tuple[list[KeptDecision], int, bool]:
        """Read the newest decisions of the groups that the caller sees, in the order of time.

        Also return how many records cannot be read, and whether all decisions are of one group.
        """
        since_ms = int(1000 * (time.time() - seconds))
        decisions: list[KeptDecision] = []
        unreadable = groups = 0
        for group, entry in (await self._store.directory.groups()).items():
            is_meant = model in (None, group.model_name) and tenant_id in (None, group.tenant_id)
            if is_meant and has(group.tenant_id):
                reading = await self._store.kept_decisions.read(
                    entry.group_id, since_ms=since_ms, decisions_max=DECISIONS_MAX
                )
                decisions += reading.decisions
                unreadable += reading.unreadable
                groups += bool(reading.decisions)
                # Of many groups no more are held at a time than those of two.
                decisions = sorted(decisions, key=_time)[-DECISIONS_MAX:]
        return decisions, unreadable, groups == 1


def _time(decision: KeptDecision) -> Any:
    return decision.time_ms
