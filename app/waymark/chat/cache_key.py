"""Which requests an earlier answer may answer, and the key under which it is kept. Pure.

A request may if it asks for the most likely tokens: its ``temperature`` is 0 or absent. The key is made of everything
that could change the answer: path, tenant, and every field that is not known to be neutral. So a field that is new, or
unknown here, makes another key and never a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

#: Fields that say whose request it is.
_NEUTRAL = frozenset({"user"})


def is_cacheable(fields: Mapping[str, Any]) -> bool:
    """Whether the same request again may get the same answer."""
    temperature = fields.get("temperature")
    is_zero = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return temperature is None or is_zero


def cache_key(path: str, tenant_id: str, fields: Mapping[str, Any], *more: str) -> bytes:
    """32 bytes. ``more`` is what changes an answer and is no field, such as the version that a header asks for."""
    said = {name: value for name, value in fields.items() if name not in _NEUTRAL}
    if said.get("temperature") is None:
        said.pop("temperature", None)
    text = json.dumps([path, tenant_id, said, more], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return sha256(text.encode()).digest()
