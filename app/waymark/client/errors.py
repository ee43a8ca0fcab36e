"""The errors that a client raises.

ClientError
  Refused           Waymark answered with 4xx, or would
    ModelNotFound   the model is not registered
  Unavailable       there was no usable answer
"""

from __future__ import annotations

import json
import re
from typing import Any

_MEANT = re.compile(r'did you mean ("(?:[^"\\]|\\.)*")\?$')


class ClientError(Exception):
    """The base class of the client's errors."""


class Refused(ClientError):
    """A 4xx: the request does not fit, is not allowed, or names a missing object. A second try does not help, except
    after 429: every target has as many requests as it may have.
    """

    def __init__(self, status: int, sentence: str, reason: str | None, field: str | None) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        """One of the slugs of the contract, such as ``not_found``."""
        self.field = field
        """The name of the wrong field; None if no single field is wrong."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self), self.reason, self.field)


class ModelNotFound(Refused):
    """Nobody has registered the model of a decision."""

    @property
    def nearest(self) -> str | None:
        """The probable name of the model."""
        match = _MEANT.search(str(self))
        return None if match is None else str(json.loads(match[1]))


class Unavailable(ClientError):
    """No server answers, the answer comes too late, or it is a 5xx."""
