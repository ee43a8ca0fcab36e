"""``waymark export``, ``import`` and ``reset``: an index to a file, back into the same or another Redis, or deleted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waymark.cli.parser import EXIT_OK, EXIT_USAGE, settings_with

if TYPE_CHECKING:
    from waymark.base.settings import Settings


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "reset":
        parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
        parser.add_argument("--yes", action="store_true", help="delete; without it nothing is changed")
        return
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument("--model", help="only publishers of this model")
    parser.add_argument("--tenant", help="only publishers of this tenant")
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
    if command == "import":
        parser.add_argument(
            "--replace",
            action="store_true",
            help="replace registrations of the same names, with their blocks; without it such a name is an error",
        )


def run(arguments: argparse.Namespace) -> int:
    import uvloop

    from waymark.base import logs
    from waymark.base.errors import InvalidValue, SettingsError

    settings = settings_with({"redis_url": arguments.redis_url})
    logs.configure("error", "text")
    if arguments.command == "reset" and not arguments.yes:
        print(
            f"waymark reset deletes all keys of {_pattern(settings)} in this Redis: the index, registrations and "
            "reservations. Stop all roles, save the answer of GET /services if publishers were registered by hand, "
            "and add --yes.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if settings.redis_url == "memory://":
        raise SettingsError(
            "WAYMARK_REDIS_URL is memory://, an emulated Redis inside another process; give the URL of a real one "
            "(--redis-url redis://host:6379/0)"
        )
    if arguments.command == "export" and (arguments.file.is_dir() or not arguments.file.name):
        raise InvalidValue(f"{arguments.file} is a directory; give the name of a file")
    work: Callable[[argparse.Namespace, Settings], Coroutine[Any, Any, str]]
    work = {"export": _export, "import": _import, "reset": _reset}[arguments.command]
    print(uvloop.run(work(arguments, settings)))
    return EXIT_OK


async def _export(arguments: argparse.Namespace, settings: Settings) -> str:
    from waymark.runtime.commands import export_to

    path: Path = arguments.file
    report, size = await export_to(settings, path, model=arguments.model, tenant=arguments.tenant)
    text = f"exported {report.publishers} publishers with {report.blocks:,} blocks to {path}, {size:,} bytes"
    if report.unreadable:
        text += f"\n{report.unreadable} rows or entries in Redis cannot be read, and are left out, as in queries"
    return text + _changed(report.changed)


async def _import(arguments: argparse.Namespace, settings: Settings) -> str:
    from waymark.runtime.commands import import_from

    report = await import_from(
        settings, arguments.file, model=arguments.model, tenant=arguments.tenant, replaces=arguments.replace
    )
    return f"imported {report.publishers} publishers with {report.blocks:,} blocks" + _changed(report.changed)


async def _reset(_: argparse.Namespace, settings: Settings) -> str:
    from waymark.runtime.commands import reset

    return f"deleted {await reset(settings)} keys of {_pattern(settings)}"


def _pattern(settings: Settings) -> str:
    """Return the pattern of all keys of Waymark."""
    return f"{settings.key_prefix or ''}wm:*"


def _changed(streams: int) -> str:
    if not streams:
        return ""
    return (
        f"\n{streams} streams changed all the time while they were exported: their blocks are not those of one moment, "
        "and their copies are not counted after an import"
    )
