"""Who may call what."""

from __future__ import annotations

import hmac
from typing import Literal, TypeAlias

from waymark.api.bodies import Headers
from waymark.api.errors import Unauthorized

Access: TypeAlias = Literal["open", "read", "write"]


class Gate:
    """Checks the bearer token: for what writes where a token is set, for what reads where reads are protected."""

    def __init__(self, token: str | None, *, protect_reads: bool) -> None:
        self._token = token.encode() if token else None
        self._protect_reads = protect_reads

    def check(self, access: Access, headers: Headers) -> None:
        """Raise ``Unauthorized`` unless the request may pass."""
        if self._token is None or access == "open" or (access == "read" and not self._protect_reads):
            return
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
                    return
        raise Unauthorized
