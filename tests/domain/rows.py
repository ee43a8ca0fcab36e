"""Rows and entries as text: in Redis the scripts write them, so the package has no such functions."""

from __future__ import annotations

from waymark.domain.packing import pack
from waymark.domain.rows import HolderEntry, Row


def format_row(row: Row) -> bytes:
    """Return a row as text."""
    holders = b"".join(b" %d:%x" % pair for pair in row.holders.items())
    return row.slots + (b"+" if row.is_marked else b"") + holders


def format_entry(entry: HolderEntry) -> bytes:
    """Return an entry as text."""
    return (b"%016x:" % entry.namespace if entry.namespace else b"") + pack(entry.hashes)
