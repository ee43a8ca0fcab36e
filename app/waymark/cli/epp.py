"""``waymark epp``: the endpoint picker of Envoy."""

from __future__ import annotations

import argparse
import sys

from waymark.cli.exits import EXIT_OK, EXIT_USAGE

_EXAMPLES = """\
examples (run as many of these processes as you like):
  $ waymark epp --redis-url redis://redis:6379/0
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark epp --port 9002 --health-port 9003
  $ WAYMARK_PICKER_CONFIG=/etc/waymark/picker.yaml WAYMARK_REDIS_URL=redis://redis:6379/0 waymark epp
"""


def add_flags(parser: argparse.ArgumentParser, _: str) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
    parser.add_argument("--host", help="the address to listen on, in place of WAYMARK_HOST")
    parser.add_argument("--port", help="the port for Envoy, in place of WAYMARK_EPP_PORT")
    parser.add_argument("--health-port", help="the port for health checks, in place of WAYMARK_EPP_HEALTH_PORT")


def run(arguments: argparse.Namespace) -> int:
    from waymark.base import logs
    from waymark.cli import loop
    from waymark.runtime import picker

    settings = loop.settings_with(
        {
            "redis_url": arguments.redis_url,
            "host": arguments.host,
            "epp_port": arguments.port,
            "epp_health_port": arguments.health_port,
        }
    )
    logs.configure(settings.log_level, settings.log_format)
    if settings.redis_url == "memory://":
        print(
            "waymark epp: WAYMARK_REDIS_URL is memory://, which other processes cannot reach; give a redis:// URL",
            file=sys.stderr,
        )
        return EXIT_USAGE
    sockets = picker.open_port(settings)
    try:
        loop.run(picker.run(settings, sockets=sockets))
    finally:
        for socket in sockets:
            socket.close()
    return EXIT_OK
