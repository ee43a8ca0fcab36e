"""The types of ASGI, as the server calls an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias


class BrokenAnswer(Exception):
    """An answer that cannot be ended, which only the end of the connection can say. It is no failure of ours."""


AsgiScope: TypeAlias = MutableMapping[str, Any]
"""What the server knows about a request before its body."""
AsgiMessage: TypeAlias = MutableMapping[str, Any]
"""A part of a request or of its answer."""
AsgiReceive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
"""Returns the next part of the request."""
AsgiSend: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
"""Sends a part of the answer."""
AsgiApplication: TypeAlias = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]
RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values, in the order in which they came."""
