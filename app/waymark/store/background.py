"""How parts of the store begin work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Begin = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Begins work that ends with the store at the latest."""
