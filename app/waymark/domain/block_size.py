"""The block size of a group whose request names none."""

from __future__ import annotations

from collections.abc import Collection

from waymark.base.errors import InvalidValue
from waymark.domain.table import HolderTable


def only_block_size(sizes: Collection[int]) -> int | None:
    """The one block size of a group's engines; None where it has no engine. InvalidValue where they have several."""
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        raise InvalidValue(
            f"block_size is missing, and the engines of this model have several ({shown}); send one of them",
            reason="missing",
            field="block_size",
        )
    return next(iter(sizes), None)


def block_size_of(table: HolderTable | None) -> int | None:
    """As ``only_block_size``, of the engines in a table; a pool that they share has no size of its own."""
    rows = () if table is None else table.publishers.values()
    return only_block_size({row.block_size for row in rows if row.scope == "instance"})
