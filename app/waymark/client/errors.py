"""What a client raises.

ClientError
  Refused      Waymark answered with 4xx
  Unavailable  there was no answer, or none that helps
"""

from __future__ import annotations


class ClientError(Exception):
    """The base of both."""


class Refused(ClientError):
    """A 4xx: the request does not fit, is not allowed, or names a missing object. A second try does not help."""

    def __init__(self, status: int, sentence: str, reason: str | None, field: str | None) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        """One of the slugs of the contract, such as ``not_found``."""
        self.field = field
        """The name of the wrong field; None if no single field is wrong."""


class Unavailable(ClientError):
    """No server answers, the answer comes too late, or it is a 5xx."""
