"""``python -m tools.sanitize.fuzz --seconds 60``: fuzzes each function of the C module, with sanitizers.

An input is kept, and changed further, if it reaches new code in the function. Every result is compared with that of a
reference in Python. No call may change its arguments, or an object that the whole process shares. The same ``--seed``
makes the same inputs.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import count

from tools.sanitize.build import DIRECTORY, VARIABLE, Variant, build, check_preloaded, preload, run

if VARIABLE in os.environ:
    preload()  # the next imports also import the module

from tools.sanitize.shared import SharedObjects
from tools.sanitize.targets import TARGETS, Arguments, Target

#: The bound on the bytes of an input; longer inputs reach no new code.
SIZE_MAX = 4096
#: The file with the current input, because a sanitizer that ends the process does not report the input.
LAST = DIRECTORY / "last-input"
LAST_BYTES = 1 << 20


class Finding(Exception):
    """The result of a function differs from that of its reference, or it has changed an object that is not its own."""


def change_bytes(draw: random.Random, value: bytes, target: Target, others: list[bytes]) -> bytes:
    """Return the bytes with one to three small changes."""
    changed = bytearray(value)
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randint(0, len(changed))
        length = draw.choice([0, 1, 1, 2, 3, 4, 7, 8, 9, 16, 64, len(changed)])
        match draw.randrange(7):
            case 0:
                del changed[at : at + length]
            case 1:
                changed[at : at + draw.choice([0, 0, length])] = draw.choice(target.words or [draw.randbytes(8)])
            case 2:
                changed[at : at + 1] = draw.randbytes(1)
            case 3:
                changed[at:at] = changed[at : at + length] * draw.choice([1, 1, 2, 20])
            case 4:
                del changed[len(changed) - min(length, len(changed)) :]
            case 5:
                del changed[:length]
            case 6:
                other = draw.choice(others)
                changed[at : at + length] = other[draw.randint(0, len(other)) :][:length]
    return bytes(changed[:SIZE_MAX])


def change(draw: random.Random, arguments: Arguments, target: Target, corpus: list[Arguments]) -> Arguments:
    """Return the arguments with one or two of them changed."""
    changed = list(arguments)
    places = [place for place in range(len(changed)) if place not in target.kept]
    for place in draw.choices(places, k=draw.choice([1, 1, 2])):
        value, other = changed[place], draw.choice(corpus)[place]
        if place in target.numbers:
            near = [] if value is None else [value - 1, value + 1, value ^ 1 << draw.randrange(16)]
            changed[place] = draw.choice([*target.numbers[place], *near])
        elif isinstance(value, list):
            items = [*value, *other, None, b"1", b"x" * 30]
            same = [draw.choice([each, each, draw.choice(items)]) for each in value[: SIZE_MAX // 8]]
            changed[place] = same + draw.choices(items, k=draw.choice([0, 1, 5]))
        else:
            changed[place] = change_bytes(draw, value, target, [other, value])
    return tuple(changed)


def answer(function: Callable[..., object], arguments: Arguments) -> object:
    """Return the result of a function, or ``"refused"`` if it raises the error for an argument that is not valid."""
    try:
        return function(*arguments)
    except (TypeError, ValueError, OverflowError):
        return "refused"


def check(function: Callable[..., object], target: Target, arguments: Arguments, shared: SharedObjects) -> None:
    before = repr(arguments)
    found = answer(function, arguments)
    if (changed := shared.changed()) is not None:
        raise Finding(changed)
    if (after := repr(arguments)) != before:
        raise Finding(f"it was called with {before} and has made {after} of it")
    expected = answer(target.reference, arguments)
    if found != expected:
        raise Finding(f"it answers {found!r}, the reference {expected!r}")


def fuzz(name: str, seconds: float, seed: int) -> None:
    """Fuzz one function for this time. Raise ``Finding`` if a result is wrong."""
    target = TARGETS[name]
    function = target.function(name)
    counter = ctypes.CDLL(os.environ[VARIABLE])
    shared, draw = SharedObjects(), random.Random(f"{seed} {name}")
    corpus: list[Arguments] = []
    queue = list(reversed(target.seeds))
    deadline = time.monotonic() + seconds
    steps = 0
    with LAST.open("r+b") as file, mmap.mmap(file.fileno(), LAST_BYTES) as last:
        for calls in count():
            if not queue and calls % 64 == 0 and time.monotonic() >= deadline:
                break
            # Change the newest inputs more often than old ones.
            newest = draw.choice([corpus, corpus, corpus[-20:]]) if corpus else corpus
            arguments = queue.pop() if queue else change(draw, draw.choice(newest), target, corpus)
            text = repr((name, arguments)).encode()[: LAST_BYTES - 1] + b"\0"
            last[: len(text)] = text
            check(function, target, arguments, shared)
            fresh = counter.end_call()
            steps += fresh
            if fresh or calls < len(target.seeds):
                corpus.append(arguments)
    print(f"{name}: {calls} calls, {len(corpus)} inputs kept, {steps} steps seen", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for everything together (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the changes (default: %(default)d)")
    parser.add_argument("--only", choices=TARGETS, help="one function instead of all")
    parser.add_argument("--variant", choices=[each.value for each in Variant], help="one variant instead of both")
    options = parser.parse_args()
    names = [options.only] if options.only else list(TARGETS)
    variants = [Variant(options.variant)] if options.variant else list(Variant)
    if VARIABLE in os.environ:
        check_preloaded()
        for name in names:
            fuzz(name, options.seconds / len(variants) / len(names), options.seed)
        return 0
    for variant in variants:
        module = build(variant)
        LAST.write_bytes(bytes(LAST_BYTES))
        print(variant.value, flush=True)
        done = run(module, ["-m", "tools.sanitize.fuzz", *sys.argv[1:]])
        if done.returncode != 0:
            text = LAST.read_bytes().partition(b"\0")[0].decode()
            print(f"the input was {text}\nput it among the first inputs of tools/sanitize/targets.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
