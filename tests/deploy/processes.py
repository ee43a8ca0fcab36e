"""Commands as containers would run them: with just the environment that is given."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.patience import within

EXIT_SECONDS = 20.0
RUN_SECONDS = 60.0


@asynccontextmanager
async def started(
    command: Sequence[str], environ: Mapping[str, str], directory: Path | str, log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process inside; told to end, and ended, afterwards. What it says is in ``log``."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), cwd=directory, stdout=output, stderr=output
        )
    try:
        yield process
        process.terminate()
        async with within(EXIT_SECONDS):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(command: Sequence[str], environ: Mapping[str, str], directory: Path | str) -> tuple[int, str, str]:
    """Run to its end: the exit code, what it printed, and what it complained about."""
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(environ), cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with within(RUN_SECONDS):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, printed.decode(), complaints.decode()
