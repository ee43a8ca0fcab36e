"""Session tokens: a client that sends one back stays at the instance that answered it."""

from __future__ import annotations

import base64
import binascii

SESSION = "x-session-token"
"""The header that carries one."""
_TOKEN_BYTES_MAX = 2048


def session_of(token: str | bytes | None) -> str | None:
    """The instance that a token names; None without one that can be read."""
    if not token or len(token) > _TOKEN_BYTES_MAX:
        return None
    try:
        return base64.b64decode(token, validate=True).decode() or None
    except (binascii.Error, ValueError):
        return None


def session_token(instance_id: str) -> str:
    """The token by which a client's further requests go to the same instance."""
    return base64.b64encode(instance_id.encode()).decode()
