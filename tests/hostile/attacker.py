"""The process that attacks: what all attackers share, and its ``main``.

    python -m tests.hostile.attacker '{"doors": ["page"], "seed": 1, "seconds": 5, "part": 1, "target": {...}}'

An attacker is a stranger: it has only what a door shows to strangers, an address or a directory. Each of its public
methods is one attack, which is over in a second or two and is repeated with other numbers. It says on its output, one
JSON object a line, which attack it begins and what it has found, so that the session knows whom to blame.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from time import monotonic
from typing import Any, TypeVar

import aiohttp
import pytest

from tests.patience import patient, within

_Item = TypeVar("_Item")
#: After which an attack that is not over has found something: whoever is attacked has let it wait.
ATTACK_SECONDS = 30.0
#: How long an answer to a stranger may take.
ANSWER_SECONDS = 15.0
#: What it looks like to be cut: a good answer to an attack.
CUT = (OSError, EOFError, aiohttp.ClientError, asyncio.IncompleteReadError)


class Found(Exception):
    """What an attacker has seen that must not be."""


def expect(is_so: bool, seen: str) -> None:
    if not is_so:
        raise Found(seen)


class Attacker:
    """``target`` is what a stranger knows of the door; ``random`` is set anew for each attack, by its seed.

    ``part`` is the part of each attack that is made, of its requests or of its time.
    """

    def __init__(self, target: Mapping[str, Any], stack: AsyncExitStack, part: float = 1.0) -> None:
        self.target = target
        self.part = part
        self.stack = stack
        self.random = Random()
        self.http: aiohttp.ClientSession

    @classmethod
    def attacks(cls) -> list[str]:
        """Its public methods, in order."""
        return [name for name, made in vars(cls).items() if inspect.iscoroutinefunction(made) and name[0] != "_"]

    async def open(self) -> None:
        """Everything that the attacks need."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(patient(ANSWER_SECONDS)), connector=connector)
        self.http = await self.stack.enter_async_context(session)
        await self._prepare()

    async def _prepare(self) -> None:
        """What the attacker of one door needs besides."""

    def _times(self, count: int) -> int:
        return max(1, round(count * self.part))

    def _some(self, items: Sequence[_Item], count: int) -> list[_Item]:
        """At least one of them."""
        return self.random.sample(items, self._times(count))

    async def _post(self, url: str, body: Any, /, **headers: str) -> tuple[int, bytes]:
        """POST ``body``, as JSON where it is not bytes; ``headers`` have ``_`` for ``-``. A 500 is a find."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            async with self.http.post(url, data=data, headers=named) as answer:
                status, received = answer.status, await answer.read()
        except TimeoutError:
            raise Found(f"POST {url} is not answered: {data[:200]!r}") from None
        expect(status != 500, f"POST {url} is answered with 500 {received[:200]!r}: {data[:200]!r}")
        return status, received

    async def _said(self, port: int, *pieces: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """All that is said to these bytes on a connection of their own until it is closed, or nothing is said."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = bytearray()
        try:
            async with within(seconds):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                while piece := await reader.read(65536):
                    answer += piece
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
        return bytes(answer)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def attacker_of(door: str) -> type[Attacker]:
    """The class in the door's file."""
    module = importlib.import_module(f"tests.hostile.{door}")
    (found,) = (
        made
        for made in vars(module).values()
        if isinstance(made, type) and issubclass(made, Attacker) and made.__module__ == module.__name__
    )
    return found


async def attack(
    door: str, seed: int, seconds: float, part: float, target: Mapping[str, Any], only: Sequence[str]
) -> None:
    """All attacks in an order by the seed, and again with the next seed, until so many seconds have passed.

    Each of them is made once, however long it takes.
    """
    async with AsyncExitStack() as stack:
        attacker = attacker_of(door)(target, stack, part)
        await attacker.open()
        began, number = monotonic(), 0
        names = [name for name in attacker.attacks() if not only or name in only]
        say(door=door, attacks=names)
        for of_round in range(seed, sys.maxsize):
            for name in Random(of_round).sample(names, len(names)):
                if number >= len(names) and monotonic() - began > seconds:
                    return
                number += 1
                attacker.random = Random(f"{name} {of_round}")
                say(begin=name, seed=of_round)
                since = monotonic()
                try:
                    async with within(ATTACK_SECONDS):
                        await getattr(attacker, name)()
                except Found as found:
                    say(found=str(found))
                except TimeoutError:
                    say(found=f"it is not over after {patient(ATTACK_SECONDS):.0f} s")
                except CUT:
                    pass
                except pytest.fail.Exception as failure:
                    say(found=str(failure))
                except Exception:
                    say(found=f"the attacker itself has failed: {traceback.format_exc()}")
                say(end=name, seconds=round(monotonic() - since, 3))


def main() -> None:
    told = json.loads(sys.argv[1])
    for door in told.pop("doors"):
        asyncio.run(attack(door, **told))


if __name__ == "__main__":
    # By its usual name: the files of the doors import it from there.
    importlib.import_module("tests.hostile.attacker").main()
