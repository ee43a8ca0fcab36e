"""Registers a simulated engine with a running Waymark."""

from __future__ import annotations

import asyncio
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.client import AsyncClient, Refused, Unavailable

PAUSE_SECONDS = 0.5


async def register(
    base_url: str, fields: dict[str, Any], *, api_token: str | None = None, within_seconds: float = 30.0
) -> None:
    """POST ``/register``, again and again while Waymark is not up (no answer, 5xx), at most ``within_seconds``.

    ``InvalidValue`` where Waymark rejects it, with Waymark's own sentence, or does not come up in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    name = fields["instance_id"]
    async with AsyncClient(base_url, api_token=api_token, retry_seconds=0) as waymark:
        while True:
            try:
                await waymark.register(**fields)
                return
            except Refused as error:
                raise InvalidValue(f"{base_url} refused {name}: {error.status} {error}", field="register") from error
            except Unavailable as error:
                if loop.time() + PAUSE_SECONDS > deadline:
                    reason = "the connection was refused" if _is_refused(error) else str(error)
                    waited = f" within {within_seconds:g} s" if within_seconds else ""
                    sentence = f"{base_url} did not register {name}{waited}: {reason}"
                    raise InvalidValue(sentence, field="register") from error
            await asyncio.sleep(PAUSE_SECONDS)


def _is_refused(error: BaseException | None) -> bool:
    """Whether nobody listens there: an attempt of the connection, deep among the causes, was refused."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    if isinstance(error, BaseExceptionGroup) and any(map(_is_refused, error.exceptions)):
        return True
    return _is_refused(error.__cause__ or error.__context__)
