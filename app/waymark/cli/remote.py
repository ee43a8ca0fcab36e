"""The commands that ask a running Waymark, such as ``ask``, ``publishers``, ``drain``, ``top`` and ``events``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from waymark.base.shape import plain
from waymark.base.shown import printable
from waymark.cli.parser import EXIT_FAILED, EXIT_OK
from waymark.console import arguments as flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from waymark.console.screen import Screen, ScreenPart
    from waymark.console.service import RemoteService

    Command = Callable[[RemoteService, argparse.Namespace], Any]
    Drawing = Callable[[Any], Sequence[ScreenPart]]


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    flags.add_service(parser)
    if command in ("ask", "select"):
        flags.add_prompt(parser)
    match command:
        case "select":
            parser.add_argument("--policy", help="the policy; the default is set by WAYMARK_POLICY")
            parser.add_argument(
                "--reserve", action="store_true", help="add the request to the load of the engine, as a router does"
            )
        case "publishers":
            parser.add_argument("--model", help="show only publishers of this model")
            parser.add_argument(
                "--status",
                action="append",
                default=[],
                choices=flags.PUBLISHER_STATUSES,
                metavar="STATUS",
                help=f"only this status; may be repeated: {', '.join(flags.PUBLISHER_STATUSES)}",
            )
            parser.add_argument("--bad", action="store_true", help="only those with something wrong")
            flags.add_watch(parser)
        case "repair":
            parser.add_argument("engine", metavar="NAME", help="the instance_id")
            parser.add_argument("--dp-rank", type=int, help="repair this rank only")
        case "drain":
            _add_drain_flags(parser)
        case "top":
            parser.add_argument("--seconds", type=flags.seconds_of, default=2.0, help="seconds between two updates (2)")
        case "events":
            parser.add_argument("-f", "--follow", action="store_true", help="go on with each further event")
        case "books":
            parser.add_argument("--by", choices=("engine", "model", "tenant"), default="engine", help="a line for each")
            parser.add_argument("--model", help="only this model")
            parser.add_argument("--since", default="1h", help="how long ago they begin: 30m, 2h, at most 24h (1h)")
            parser.add_argument("--plot", metavar="FILE", help="draw the minutes into this file (.png or .svg), too")
        case "placement":
            parser.add_argument("--model", help="only this model")
        case "policies":
            parser.add_argument(
                "deed",
                choices=("compare", "replay"),
                metavar="compare|replay",
                help="the shadows, or the policy that follows",
            )
            parser.add_argument("policy", nargs="?", metavar="FILE", help="replay: a picker file, or a policy by name")
            parser.add_argument("--model", help="only decisions for this model")
            parser.add_argument("--since", default="24h", help="how long ago they begin: 30m, 2h, at most 24h (24h)")
        case "doctor":
            parser.add_argument(
                "--no-ports", action="store_true", help="do not connect to the event sockets of engines"
            )


def _add_drain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="NAME", nargs="?", help="the instance_id, or the URL that its requests go to")
    parser.add_argument(
        "--cheapest", type=int, metavar="N", help="instead of NAME: so many engines with the least to lose"
    )
    parser.add_argument("--model", help="with --cheapest: the model of the engines")
    parser.add_argument(
        "--wait-seconds", type=flags.wait_seconds_of, default=120.0, help="how long to wait for requests (120)"
    )
    parser.add_argument("--unregister", action="store_true", help="unregister the engine when it has no requests")
    parser.add_argument("--resume", action="store_true", help="send the engine requests again")
    parser.add_argument(
        "--weight", type=float, default=1.0, help="with --resume: the weight of the engine, its share of requests (1)"
    )


def run(arguments: argparse.Namespace) -> int:
    from waymark.console.screen import Screen
    from waymark.console.service import RemoteService

    flags.settle(arguments)
    screen = Screen()
    with RemoteService(arguments.url, arguments.api_token) as service:
        match arguments.command:
            case "repair":
                return _repair(service, arguments)
            case "drain":
                return _drain(service, arguments)
            case "top":
                return _top(service, arguments, screen)
            case "doctor":
                return _doctor(service, arguments, screen)
            case "events":
                return _events(service, arguments, screen)
            case "books":
                return _books(service, arguments, screen)
            case _:
                return _print_answer(service, arguments, screen)


def _print_answer(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> int:
    """Run a command that prints one answer."""
    command: Command
    parts: Drawing
    match arguments.command:
        case "ask":
            from waymark.console.ask import ask as command
            from waymark.console.ask import parts
        case "select":
            from waymark.console.decisions import parts_of_selection as parts
            from waymark.console.decisions import select as command
        case "policies":
            from waymark.console.decisions import parts_of_policies as parts
            from waymark.console.decisions import policies as command
        case "placement":
            from waymark.console.drain import parts_of_placement as parts
            from waymark.console.drain import placement as command
        case _:
            from waymark.console.publishers import parts
            from waymark.console.publishers import publishers as command
    return print_answer(service, arguments, screen, command, parts)


def print_answer(
    service: RemoteService, arguments: argparse.Namespace, screen: Screen, command: Command, parts: Drawing
) -> int:
    """Print the answer of ``command``, drawn by ``parts`` or as JSON; with ``--watch`` again and again."""
    if getattr(arguments, "watch", None):
        return _watch(service, arguments, screen, command, parts)
    answer = command(service, arguments)
    if arguments.json:
        screen.write(json.dumps(plain(answer), indent=2))
    else:
        screen.show(parts(answer))
    return EXIT_OK


def _watch(
    service: RemoteService, arguments: argparse.Namespace, screen: Screen, command: Command, parts: Drawing
) -> int:
    """Print the answer again and again, until Ctrl-C. A service and its Redis may be unavailable for a while."""
    import asyncio
    import signal

    from waymark.base.errors import WaymarkError
    from waymark.console.screen import text
    from waymark.console.service import may_pass

    async def draw() -> Sequence[ScreenPart]:
        try:
            return parts(await asyncio.to_thread(command, service, arguments))
        except WaymarkError as error:
            if not may_pass(error):
                raise
            return [text(str(error), "bold red")]

    async def lines() -> None:
        while True:
            try:
                screen.write(json.dumps(plain(await asyncio.to_thread(command, service, arguments))))
            except WaymarkError as error:
                if not may_pass(error):
                    raise
                print(f"waymark {arguments.command}: {printable(str(error))}", file=sys.stderr, flush=True)
            await asyncio.sleep(arguments.watch)

    command(service, arguments)  # without a service, or after a refusal, the command ends at once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(lines() if arguments.json else screen.watch(arguments.watch, draw))
    return EXIT_OK


def _events(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> int:
    from waymark.base.errors import WaymarkError
    from waymark.console.events import follow, line, newest

    for event in follow(service) if arguments.follow else newest(service):
        if isinstance(event, WaymarkError):
            print(f"waymark events: {printable(str(event))}; trying again", file=sys.stderr, flush=True)
        elif arguments.tenant_id not in (None, event.content.get("tenant_id")):
            continue
        elif arguments.json:
            screen.write(json.dumps(event.content))
        else:
            screen.show([line(event.content)])
    return EXIT_OK


def _repair(service: RemoteService, arguments: argparse.Namespace) -> int:
    from waymark.console.publishers import repair

    answer = repair(service, arguments)
    if arguments.json:
        print(json.dumps(plain(answer)))
    for name in () if arguments.json else map(printable, answer.asked_instances):
        print(f"{name}: its worker asks for a snapshot, or for all batches; 'waymark publishers' shows the stream")
    return EXIT_OK


def _drain(service: RemoteService, arguments: argparse.Namespace) -> int:
    from waymark.base.errors import InvalidValue
    from waymark.console.drain import cheapest, drain, drain_all, named, why

    if (arguments.engine is None) == (arguments.cheapest is None):
        raise InvalidValue("waymark drain needs the NAME of an engine, or --cheapest N with --model, and not both")
    if arguments.cheapest is None:
        arguments.engine = named(service, arguments)
        lines = ((arguments.engine, line) for line in drain(service, arguments))
        return _drained(service, arguments, [arguments.engine], {}, lines)
    if arguments.cheapest < 1 or arguments.resume:
        raise InvalidValue(f"--cheapest is {arguments.cheapest}; it takes an integer of 1 or more, and no --resume")
    targets = cheapest(service, arguments)
    arguments.tenant_id = targets[0].tenant_id
    reasons = {target.instance_id: why(target) for target in targets}
    return _drained(service, arguments, list(reasons), reasons, drain_all(service, arguments, targets))


def _drained(
    service: RemoteService,
    arguments: argparse.Namespace,
    names: Sequence[str],
    reasons: Mapping[str, str],
    lines: Iterator[tuple[str, str]],
) -> int:
    """Print the lines of a drain; ``reasons`` say why the engines were chosen."""
    from waymark.base.errors import WaymarkError
    from waymark.console.drain import NotDrained, left_as

    messages_of: dict[str, list[str]] = {name: [] for name in names}

    def say(name: str, line: str) -> None:
        messages_of[name].append(line)
        if not arguments.json:
            print(printable(line), flush=True)

    is_done = False
    try:
        for reason in () if arguments.json else reasons.values():
            print(printable(reason), flush=True)
        for name, line in lines:
            say(name, line)
        is_done = True
    except KeyboardInterrupt:
        for name in names:
            try:
                line = left_as(service, argparse.Namespace(**vars(arguments) | {"engine": name}))
            except WaymarkError as exc:
                line = f"whether {name} gets new requests is not known: {exc}"
            if line:
                say(name, line)
        raise
    except NotDrained as exc:
        print(f"waymark drain: {printable(str(exc))}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        return EXIT_FAILED  # the reader is gone, so the drain ends here, perhaps with requests under way
    finally:
        if arguments.json and any(messages_of.values()):  # one document, when the output is complete
            document = {"done": is_done} | _drained_engines(messages_of, reasons, arguments.model)
            print(json.dumps(document))
    return EXIT_OK


def _drained_engines(
    messages_of: Mapping[str, Sequence[str]], reasons: Mapping[str, str], model_name: str | None
) -> dict[str, Any]:
    """Return the engines of a drain for a program: one by name, or those that were chosen, with the reasons."""
    engines = [
        ({"why": reasons[name]} if name in reasons else {}) | {"instance_id": name, "messages": messages}
        for name, messages in messages_of.items()
    ]
    return {"model_name": model_name, "engines": engines} if reasons else engines[0]


def _top(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> int:
    from waymark.console import top

    if arguments.json:
        screen.write(json.dumps(plain(service.workers()), indent=2))
    else:
        top.run(service, arguments.seconds, screen)
    return EXIT_OK


def _books(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> int:
    from importlib.util import find_spec

    from waymark.console.decisions import books, draw, parts_of_books

    if arguments.plot is not None and find_spec("matplotlib") is None:
        print("waymark books: --plot needs matplotlib: pip install 'waymark[plot]', or leave it out", file=sys.stderr)
        return EXIT_FAILED

    def drawn(service: RemoteService, arguments: argparse.Namespace) -> Any:
        report = books(service, arguments)
        if arguments.plot is not None:
            draw(report, arguments.plot)
        return report

    return print_answer(service, arguments, screen, drawn, parts_of_books)


def _complaint() -> str | None:
    """Return the mistakes in the settings of this shell, or None."""
    from waymark.base.errors import SettingsError
    from waymark.base.settings import Settings

    try:
        Settings.from_env()
    except SettingsError as error:
        return str(error)
    return None


def _doctor(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> int:
    from waymark.console.doctor import examine, parts

    findings = examine(service, arguments, _complaint())
    if arguments.json:
        screen.write(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        screen.show(parts(findings))
    return EXIT_FAILED if any(finding.verdict == "failed" for finding in findings) else EXIT_OK
