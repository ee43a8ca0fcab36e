"""The transport to Redis: clients, Cluster, Sentinel and read connections.

A replica answers its first queries before it imports redis-py. The modules that need it then, such as
``read_connection``, name its errors through ``errors``, which imports redis-py when the first name is looked up: in an
``except`` clause only an error does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis import exceptions as errors
else:
    from importlib import import_module
    from typing import Any

    class _Errors:
        def __getattr__(self, name: str) -> Any:
            error = getattr(import_module("redis.exceptions"), name)
            setattr(self, name, error)
            return error

    errors = _Errors()

__all__ = ["errors"]
