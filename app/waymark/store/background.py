"""How parts of the store start tasks in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a background task. Closing the store cancels the task."""
