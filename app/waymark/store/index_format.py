"""The field in Redis that names the format of the index, so that no release reads an index of another format."""

from __future__ import annotations

from waymark.base.shown import shown
from waymark.domain.rows import FORMAT

#: The field of ``wm:groups`` with the format of the index. The script that writes the first group writes this field.
FIELD = "format"
#: A field that every index with a group has, in every release.
_ANY_INDEX = "last_group"
#: The two fields to read, in the order of ``complaint``.
FIELDS = (FIELD, _ANY_INDEX)


def complaint(version: bytes | None, last_group: bytes | None) -> str | None:
    """Why the index in this Redis cannot be used, as a sentence with the way out; None if it can, or if it is empty."""
    if version == FORMAT.encode() or (version is None and last_group is None):
        return None
    name = "none" if version is None else shown(version.decode(errors="replace"))
    return (
        f"the index in this Redis has another format (found: {name}, wanted: {FORMAT}): stop all processes of Waymark, "
        "run 'waymark reset --yes' or use another database, and start them again; engines with a replay endpoint then "
        "send their blocks again"
    )
