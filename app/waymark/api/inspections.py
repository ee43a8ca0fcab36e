"""What ``waymark status`` shows of an installation, for those who cannot reach its Redis."""

from __future__ import annotations

from collections.abc import Mapping

from waymark.api.bodies import Body
from waymark.api.operations import Answer
from waymark.domain.status import StreamStatus
from waymark.errors import InvalidValue
from waymark.inspection.look import Look
from waymark.inspection.status import Wanted, as_json, gather
from waymark.shown import shown
from waymark.store.store import Store

PARAMETERS = ("tenant_id", "model", "status")


class Inspections:
    """Handlers under ``/inspect`` that are about the whole installation."""

    def __init__(self, store: Store) -> None:
        self._look = Look(store)

    async def status(self, body: Body) -> Answer:
        """What ``waymark status --json`` prints."""
        return Answer(as_json(await gather(self._look, _wanted(body.path))))


def _wanted(parameters: Mapping[str, str]) -> Wanted:
    """``status`` may be several, by commas. Raises ``InvalidValue``."""
    statuses = tuple(filter(None, parameters.get("status", "").split(",")))
    known = [status.value for status in StreamStatus]
    for each in statuses:
        if each not in known:
            raise InvalidValue(
                f"status is {shown(each)}; it is one or more of {', '.join(known)}, by commas", field="status"
            )
    return Wanted(parameters.get("tenant_id") or None, parameters.get("model") or None, statuses)
