"""Turns a failure of Redis into one sentence, which names the problem and, if there is one, the remedy."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from waymark.base.errors import RecordDamaged, StoreFull, StoreUnavailable
from waymark.store.redis import errors
from waymark.store.redis.credentials import SecretUnreadable

#: Parts of the errors that mean that a value has another type, or that a script cannot use it. Redis 6.2 to 8, Valkey
#: and the embedded Redis write them.
_DAMAGE = ("WRONGTYPE", "user_script", "unning script", "not an integer", "not a valid float")
_REFUSALS = ("OOM", "READONLY", "MISCONF", "LOADING", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "NOPERM", "unknown")


def unavailable(url: str, variable: str, exc: Exception) -> StoreUnavailable:
    """Return the error for ``exc`` of redis-py. ``url`` has no secrets; ``variable`` is the setting from which the URL
    comes.
    """
    causes = list(_causes(exc))
    for cause in causes:
        if isinstance(cause, SecretUnreadable):
            return StoreUnavailable(f"Redis at {url} cannot be used: {cause}")
    for cause in causes:
        if isinstance(cause, errors.AuthenticationError):
            return StoreUnavailable(
                f"Redis at {url} refuses the login ({cause}): check the user and password in {variable}, or "
                "WAYMARK_REDIS_USERNAME and WAYMARK_REDIS_PASSWORD_FILE; for Sentinels WAYMARK_REDIS_SENTINEL"
            )
        if isinstance(cause, errors.NoPermissionError):
            return StoreUnavailable(
                f"Redis at {url} does not permit this ({cause}): give the user of {variable} the permissions that "
                "docs/configuration.md lists, or set another one in WAYMARK_REDIS_USERNAME"
            )
        if isinstance(cause, errors.OutOfMemoryError):
            return StoreFull(
                f"Redis at {url} has no memory left ({_kind(cause)}: {cause}): raise its maxmemory, or spread the "
                "blocks over a Cluster"
            )
        if isinstance(cause, ssl.SSLError):
            return StoreUnavailable(
                f"Redis at {url} has no trusted TLS certificate ({cause}): check WAYMARK_REDIS_TLS, "
                f"and whether {variable} has the right scheme"
            )
    if is_damage(exc):
        return RecordDamaged(
            f"Redis at {url} has a key of a wrong type, or with a wrong value ({exc}): lua/README.md lists the types, "
            "and 'waymark status' the records that cannot be read; correct the key or delete it"
        )
    return StoreUnavailable(
        f"Redis at {url} is unavailable or answers with an error ({_kind(exc)}: {exc}); try again in a moment"
    )


def is_damage(exc: BaseException) -> bool:
    """Return whether Redis refused a command because of the values of its keys. Only the text of the error shows it.

    Other refusals (out of memory, read-only, loading) concern every key. They have their own exception types in the
    driver, or a script repeats their error code.
    """
    if type(exc) is not errors.ResponseError:
        return False
    text = str(exc)
    return any(word in text for word in _DAMAGE) and not any(word in text for word in _REFUSALS)


def kind_of(exc: Exception) -> str:
    """Return the kind of a failure, as one of a few fixed words for the counter."""
    kinds: dict[str, tuple[type[BaseException], ...]] = {
        "not_allowed": (SecretUnreadable, errors.AuthenticationError, errors.NoPermissionError),
        "tls": (ssl.SSLError,),
        "timeout": (errors.TimeoutError, TimeoutError),
        "loading": (errors.BusyLoadingError,),
        "read_only": (errors.ReadOnlyError,),
        "out_of_memory": (errors.OutOfMemoryError,),
        "no_primary": (errors.MasterDownError, errors.ClusterDownError),
        "connection": (errors.ConnectionError, OSError),
    }
    if is_damage(exc):
        return "damaged"
    causes = list(_causes(exc))
    kinds_found = (kind for kind, types in kinds.items() if any(isinstance(cause, types) for cause in causes))
    return next(kinds_found, "other")


def _causes(exc: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = exc
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _kind(exc: Exception) -> str:
    """Return the error code of Redis if the type of the exception stands for one; else the name of the type."""
    words = {
        errors.ReadOnlyError: "READONLY",
        errors.OutOfMemoryError: "OOM",
        errors.MasterDownError: "MASTERDOWN",
        errors.ClusterDownError: "CLUSTERDOWN",
    }
    return words.get(type(exc), type(exc).__name__)
