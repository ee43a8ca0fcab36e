"""Runs ``waymark status`` once its flags are parsed."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from waymark.base.errors import StoreUnavailable
from waymark.base.settings import Settings
from waymark.console import status_view
from waymark.console.screen import Screen, ScreenPart, text
from waymark.inspection import status, status_json
from waymark.inspection.inspector import open_inspector


async def run_status(arguments: argparse.Namespace, settings: Settings, screen: Screen) -> None:
    """Draw it once, or until cancelled."""
    wanted = status.PublisherFilter(arguments.tenant, arguments.model, tuple(arguments.status))
    of_tokenizers = await _tokenizer_warnings(settings)
    async with open_inspector(settings) as inspector:

        async def gather() -> status.Status:
            state = await status.gather(inspector, wanted)
            return replace(state, warnings=(*state.warnings, *of_tokenizers))

        async def draw() -> Sequence[ScreenPart]:
            try:
                return status_view.parts(await gather(), is_plain=screen.is_plain)
            except StoreUnavailable as exc:
                if not arguments.watch:
                    raise
                return [text(exc.sentence, "bold red")]  # it may come back, and the next look shows it

        if arguments.json:
            while True:
                gathered = status_json.as_json(await gather())
                screen.write(json.dumps(gathered, indent=None if arguments.watch else 2))
                if not arguments.watch:
                    return
                await asyncio.sleep(arguments.watch)
        elif arguments.watch:
            await screen.watch(arguments.watch, draw)
        else:
            screen.show(await draw())


async def _tokenizer_warnings(settings: Settings) -> list[str]:
    """Return the problems of the tokenizers in this process's settings, which replicas share."""
    if not settings.tokenizers:
        return []
    # Only they need the packages for text.
    from waymark.base.metrics import Metrics
    from waymark.tokenization.tokenizers import Tokenizers

    tokenizers = Tokenizers.of(settings, Metrics())
    try:
        return await tokenizers.file_warnings()
    finally:
        await tokenizers.close()
