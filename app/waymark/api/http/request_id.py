"""The id of a request, by which its lines in the logs of several services are found.

An id that a client sends is kept if it is short and plain; otherwise one is made. The answer carries it in the same
header.
"""

from __future__ import annotations

import re
import secrets

from waymark.base.asgi import RawHeaders

REQUEST_ID = b"x-request-id"

_IS_SANE = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch


def request_id_of(headers: RawHeaders) -> str:
    """Return the client's id, or a new one."""
    for name, value in headers:
        if name == REQUEST_ID and _IS_SANE(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
