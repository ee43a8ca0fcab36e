"""Which implementation of the hot loops runs: the C module, or Python.

The C module is built from ``native/`` if there is a compiler; a build without one continues in Python. Each loop has
both implementations behind one function: block keys in ``domain.hashing``, rows in ``domain.row_runs``, the knowledge
of a stream in ``domain.pure_known``, parts in ``domain.parts`` and ``store.calls``, lists in ``api.http.bodies``,
events in ``engines.plain``, requests in ``serving.request_reader``, orders in ``decide.pure_sums`` and
``decide.policies.columns``. Both give the same for every input, and the same tests run over both.

In a checkout, ``native/`` may change without a new build; a module built from other sources is refused.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from waymark.base.errors import StaleBuild

Implementation: TypeAlias = Literal["native", "pure"]

Number: TypeAlias = float | int | None


class NativeFunctions(Protocol):
    """The functions and types of the C module. The files of ``native/`` describe them."""

    sources: str
    """The digest of the files that it was built from; see ``digest_of``."""
    Places: Callable[[type, type], Any]
    KnownBlocks: Callable[[Any, bool], Any]
    Parts: Callable[[type, type, int], Any]
    Waves: Callable[[int], Any]
    # Each of these is called in place of the one in Python of the same name, which declares its arguments.
    rank_sums: Callable[..., list[Any]]
    offer_sums: Callable[..., tuple[list[Any], list[str], list[str]]]
    pack_sums: Callable[..., bytes]
    add_columns: Callable[..., list[float]]
    least_of: Callable[..., list[int]]

    def cut(self, body: bytes, name: bytes, count_max: int, /) -> tuple[int, int, bytes] | None: ...

    def cut_hashes(self, body: bytes, name: bytes, count_max: int, /) -> tuple[int, int, bytes] | None: ...

    def plain_post(self, data: bytes, /) -> tuple[bytes, list[tuple[bytes, bytes]], bytes, int] | None: ...

    def digest(self, payload: bytes | memoryview, seed: int, /) -> int: ...

    def hash_blocks(
        self, tokens: bytes | memoryview, block_size: int, seed: int, parent: int | None, namespace: int, /
    ) -> bytes: ...

    def hash_keys(self, seq_hashes: bytes | memoryview | array[int], namespace: int, /) -> bytes: ...

    def chain(self, local_hashes: bytes | memoryview | array[int], seed: int, parent: int | None, /) -> bytes: ...

    def read_batch(
        self,
        payload: bytes,
        events_max: int,
        stored: type,
        reference: type,
        window: type,
        removed: type,
        cleared: object,
        medium: Callable[[str | None], str | None],
        stored_fields: int,
        removed_fields: int,
        /,
    ) -> tuple[Number, Any, Number, bytes | None, int, bool] | None: ...

    def row_runs(self, keys: bytes, rows: list[bytes | None], /) -> tuple[list[tuple[bytes, int]], int, bool]: ...

    def piece_runs(self, keys: bytes, values: list[bytes | None], /) -> tuple[list[tuple[bytes, int]], int, int]: ...


def digest_of(sources: Path) -> str:
    """Return the digest of the module's source files; ``hatch_build.py`` puts it into the module."""
    files = sorted(path for path in sources.glob("[!.]*.[ch]") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def check_built_from(sources: Path, module: object) -> None:
    """Raise StaleBuild if a module was built from other files than these. An installed package has no such files."""
    if (sources / "module.c").is_file() and getattr(module, "sources", "") != digest_of(sources):
        raise StaleBuild(
            f"{getattr(module, '__file__', module)} was built from other files than those in {sources}; "
            "run 'pip install --editable .' in that checkout"
        )


_built: NativeFunctions | None
try:
    from waymark import _native as _built  # type: ignore[attr-defined, no-redef]  # a stub would repeat ``NativeFunctions``
except ImportError:
    _built = None
else:
    check_built_from(Path(__file__).parents[3] / "native", _built)

is_built = _built is not None

selected: NativeFunctions | None = _built
"""The C module; None if it was not built, or the pure implementation was selected."""


def select(native: bool) -> Implementation:
    """Select the C module from now on, if it was built, or Python. Return the selected one."""
    global selected
    selected = _built if native else None
    return implementation()


def implementation() -> Implementation:
    """Return the implementation in use."""
    return "pure" if selected is None else "native"
