"""The options of a run of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath

from waymark.base.native import Implementation


@dataclass(frozen=True, slots=True)
class Options:
    is_quick: bool = False
    """Whether to do a tenth of the work, to see that it runs; the figures then mean little."""
    trace: FilePath | None = None
    """A file of requests with ``hash_ids``; None for synthetic conversations."""
    peer_python: str | None = None
    """The Python that has ai-dynamo-runtime; None for rows without the peer."""
    paths: tuple[Implementation, ...] = ("pure",)
    """The implementations with which replicas are measured: also ``native`` if it was built."""
