"""The application of a process that answers its first questions before the application is imported.

``/query`` and ``/query_by_hash`` need half of the modules of a replica, and go the straight way. So a replica listens
with these alone, and imports the rest in a thread: that takes a third of a second, during which the loop runs. Every
other request waits until the application is made, ``/health`` and ``/ready`` among them, so nothing takes the replica
for ready before. If an import fails, the process ends with the error, as if it had failed before.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from waymark.api.first import FirstQuestions
from waymark.base.asgi import AsgiApplication, AsgiReceive, AsgiScope, AsgiSend, StraightQuestion
from waymark.base.settings import Settings
from waymark.runtime import parts

#: How long the thread may hold the interpreter while the loop has work. Python's default is ten times as long, and a
#: query needs the interpreter a few times.
_HOLD_SECONDS = 0.0005
#: How long the imports wait for the queries that have come since the port was opened.
_FIRST_SECONDS = 0.05


class LaterApplication:
    """An ASGI application whose requests wait until it is made."""

    def __init__(self, first: FirstQuestions, settings: Settings, stopping: asyncio.Event) -> None:
        self.straight: dict[bytes, StraightQuestion] = dict(first.straight())
        """The straight questions: at the beginning the first ones."""
        self.failure: Exception | None = None
        """Why the application cannot be made."""
        self._first = first
        self._settings = settings
        self._stopping = stopping
        self._app: AsgiApplication | None = None
        self._made: asyncio.Future[AsgiApplication] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        # A request whose client leaves is cancelled, and must not cancel what the others wait for.
        app = self._app
        if app is None:
            app = await asyncio.shield(self._made)
        await app(scope, receive, send)

    async def make(self) -> None:
        """Import the application, and make it. If it cannot be made, note the failure, and stop the process."""
        await asyncio.sleep(_FIRST_SECONDS)
        try:
            with _short_holds():
                application = await asyncio.to_thread(import_module, "waymark.api.application")
            app = application.app_with(self._first, parts.selection_options(self._settings), self._stopping)
        except Exception as exc:
            self.failure = exc
            self._made.set_exception(exc)
            self._made.exception()  # there may be no request that waits for it
            self._stopping.set()
        else:
            self._app = app
            self.straight.update(app.straight)
            self._made.set_result(app)


@contextmanager
def _short_holds() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_HOLD_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
