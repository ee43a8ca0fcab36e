"""Tell a running Waymark about a simulated engine, over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from waymark.errors import InvalidValue

ATTEMPT_SECONDS = 5.0
PAUSE_SECONDS = 0.5


async def register(
    base_url: str, fields: dict[str, Any], *, api_token: str | None = None, within_seconds: float = 30.0
) -> None:
    """POST ``/register``, again and again while Waymark is not up (no answer, 5xx), at most ``within_seconds``.

    ``InvalidValue`` where it refuses, with its own sentence, or does not come up in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    while (complaint := await asyncio.to_thread(_post, base_url, fields, api_token)) is not None:
        if loop.time() + PAUSE_SECONDS > deadline:
            raise InvalidValue(
                f"{base_url} did not register {fields['instance_id']} within {within_seconds:g} s: {complaint}",
                field="register",
            )
        await asyncio.sleep(PAUSE_SECONDS)


def _post(base_url: str, fields: dict[str, Any], api_token: str | None) -> str | None:
    """None when it is done; what went wrong where trying again may help."""
    request = urllib.request.Request(
        base_url.rstrip("/") + "/register",
        data=json.dumps(fields).encode(),
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_token}"} if api_token else {}),
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=ATTEMPT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2000).decode(errors="replace")
        if error.code < 500:
            raise InvalidValue(
                f"{base_url} refused {fields['instance_id']}: {error.code} {said}", field="register"
            ) from error
        return f"{error.code} {said}"
    except (OSError, http.client.HTTPException) as error:
        return str(error)
