"""New tables of a stream's knowledge, by the selected implementation."""

from __future__ import annotations

from waymark.base import native
from waymark.domain.known import KnownBlocks, Places, Spot
from waymark.domain.pure_known import PureKnownBlocks, PurePlaces
from waymark.domain.rows import Place


def new_places() -> Places:
    if native.selected is not None:
        places: Places = native.selected.Places(Place, Spot)
        return places
    return PurePlaces()


def new_known(places: Places, *, has_keys: bool) -> KnownBlocks:
    """Return an empty table; its blocks will be in ``places``."""
    if isinstance(places, PurePlaces):
        return PureKnownBlocks(places, has_keys)
    assert native.selected is not None
    table: KnownBlocks = native.selected.KnownBlocks(places, has_keys)
    return table
