"""Runs ``waymark status`` once its flags are parsed."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

from waymark.console import status_view
from waymark.console.screen import Part, Screen, text
from waymark.errors import StoreUnavailable
from waymark.inspection import status
from waymark.inspection.look import looking
from waymark.settings import Settings


async def run_status(arguments: argparse.Namespace, settings: Settings, screen: Screen) -> None:
    """Draw it once, or until cancelled."""
    wanted = status.Wanted(arguments.tenant, arguments.model, tuple(arguments.status))
    async with looking(settings) as look:

        async def draw() -> Sequence[Part]:
            try:
                return status_view.parts(await status.gather(look, wanted), is_plain=screen.is_plain)
            except StoreUnavailable as exc:
                if not arguments.watch:
                    raise
                return [text(exc.sentence, "bold red")]  # it may come back; whoever watches waits for that

        if arguments.json:
            while True:
                gathered = status.as_json(await status.gather(look, wanted))
                screen.write(json.dumps(gathered, indent=None if arguments.watch else 2))
                if not arguments.watch:
                    return
                await asyncio.sleep(arguments.watch)
        elif arguments.watch:
            await screen.watch(arguments.watch, draw)
        else:
            screen.show(await draw())
