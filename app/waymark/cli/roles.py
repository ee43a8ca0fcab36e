"""``waymark serve``, ``query``, ``ingest``, ``gateway`` and ``epp``: the processes of the service."""

from __future__ import annotations

import argparse
import gc
import sys

from waymark import __version__
from waymark.cli.parser import EXIT_OK, EXIT_USAGE, settings_with

#: A role -> whether it has the HTTP API, whether it has an ingest worker.
_ROLES = {"serve": (True, True), "query": (True, False), "ingest": (False, True), "gateway": (False, False)}
_GATEWAY = "gateway"
_PICKER = "epp"

#: The default address of a trial.
_TRIAL_HOST = "127.0.0.1"


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
    if command == _PICKER:
        parser.add_argument("--host", help="the address to listen on, in place of WAYMARK_HOST")
        parser.add_argument("--port", help="the port for Envoy, in place of WAYMARK_EPP_PORT")
        parser.add_argument("--health-port", help="the port for health checks, in place of WAYMARK_EPP_HEALTH_PORT")
        return
    if command == _GATEWAY:
        parser.add_argument(
            "--engine", action="append", metavar="URL", help="an engine to register; give one for each engine"
        )
    if _ROLES[command][0] or command == _GATEWAY:
        parser.add_argument("--host", help="the address to listen on, in place of WAYMARK_HOST")
        parser.add_argument("--port", help="the port to listen on, in place of WAYMARK_PORT")


def run(arguments: argparse.Namespace) -> int:
    if arguments.command == _PICKER:
        return _run_picker(arguments)
    gc.disable()  # until ``runtime.freeze_heap``
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    import uvloop

    from waymark.base import logs
    from waymark.runtime import replica

    has_api, has_worker = _ROLES[arguments.command]
    has_gateway = arguments.command == _GATEWAY
    flags = {name: getattr(arguments, name, None) for name in ("redis_url", "host", "port")}
    flags["gateway_engines"] = ",".join(getattr(arguments, "engine", None) or ()) or None
    settings = settings_with(flags)
    logs.configure(settings.log_level, settings.log_format)
    if settings.redis_url == "memory://":
        # A gateway for a trial brings the worker that it needs.
        has_worker = has_worker or has_gateway
        if not ((has_api and has_worker) or has_gateway):
            print(
                f"waymark {arguments.command}: WAYMARK_REDIS_URL is memory://, which other processes cannot reach; "
                "give a redis:// URL, or run 'waymark serve'",
                file=sys.stderr,
            )
            return EXIT_USAGE
        if not settings.is_given("host"):  # a trial is not open to the network unless someone asks for it
            settings = settings.copy_with(host=_TRIAL_HOST)
    sockets = replica.open_port(settings, has_api=has_api or has_gateway)
    if settings.redis_url == "memory://" and settings.log_level != "error":
        print(
            f"waymark {__version__} runs on an embedded, emulated Redis, for a trial. The index is lost when the "
            f"process ends, and it is about nine times slower than a real Redis. Listening on {settings.host}, port "
            f"{settings.port}.",
            file=sys.stderr,
        )
    try:
        uvloop.run(
            replica.run(settings, has_api=has_api, has_worker=has_worker, sockets=sockets, has_gateway=has_gateway)
        )
    finally:
        for socket in sockets:
            socket.close()
    return EXIT_OK


def _run_picker(arguments: argparse.Namespace) -> int:
    import uvloop

    from waymark.base import logs
    from waymark.runtime import picker

    settings = settings_with(
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
        uvloop.run(picker.run(settings, sockets=sockets))
    finally:
        for socket in sockets:
            socket.close()
    return EXIT_OK
