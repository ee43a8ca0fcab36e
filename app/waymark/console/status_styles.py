"""How the statuses of streams look on a terminal, in the order from the best to the worst."""

from __future__ import annotations

from waymark.domain.status import StreamStatus

STATUS_STYLES: dict[str, str] = {
    StreamStatus.ACTIVE: "green",
    StreamStatus.REPLAYING: "cyan",
    StreamStatus.PENDING: "yellow",
    StreamStatus.DEGRADED: "yellow",
    StreamStatus.UNREACHABLE: "red",
    StreamStatus.LOST: "bold red",
    StreamStatus.FAILED: "bold red",
}
