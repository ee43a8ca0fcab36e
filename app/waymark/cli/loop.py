"""The event loop of commands that wait."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from typing import Any

import uvloop

from waymark.base.settings import PREFIX, Settings


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on a loop of its own. Return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def settings_with(flags: Mapping[str, str | None]) -> Settings:
    """Read the settings from the environment; a flag wins. Raise SettingsError for a mistake."""
    overrides = {PREFIX + name.upper(): value for name, value in flags.items() if value is not None}
    return Settings.from_env(dict(os.environ) | overrides)
