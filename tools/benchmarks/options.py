"""What a run of the benchmarks goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath

from waymark.base.native import Implementation


@dataclass(frozen=True, slots=True)
class Options:
    is_quick: bool = False
    """A tenth of the work: to see that it runs, not to believe."""
    trace: FilePath | None = None
    """A file of requests with ``hash_ids``; without it synthetic conversations."""
    peer_python: str | None = None
    """The Python that has ai-dynamo-runtime; None: rows without the peer."""
    paths: tuple[Implementation, ...] = ("pure",)
    """Which ways of hashing prompts replicas are measured with: ``native`` too, where it was built."""
