"""``waymark reset``: empty a Redis of Waymark's keys, such as those of a release with another layout."""

from __future__ import annotations

import argparse
import sys

from waymark.cli.exits import EXIT_OK, EXIT_USAGE

_EXAMPLES = """\
examples, after all roles are stopped:
  $ waymark reset --yes --redis-url redis://127.0.0.1:6379/0
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark reset --yes
"""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is changed")


def run(arguments: argparse.Namespace) -> int:
    from waymark.base import logs
    from waymark.cli import loop
    from waymark.store.store import Store

    settings = loop.settings_with({"redis_url": arguments.redis_url})
    logs.configure("error", "text")
    pattern = f"{settings.key_prefix or ''}wm:*"
    if not arguments.yes:
        print(
            f"waymark reset deletes all keys of {pattern} in this Redis: the index, registrations and reservations. "
            "Stop all roles, save the answer of GET /services if publishers were registered by hand, and add --yes.",
            file=sys.stderr,
        )
        return EXIT_USAGE

    async def reset() -> int:
        store = Store.of(settings)
        try:
            return await store.reset()
        finally:
            await store.close()

    count = loop.run(reset())
    print(f"deleted {count} keys of {pattern}")
    return EXIT_OK
