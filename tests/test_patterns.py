"""Regular expressions for text from others: none takes time that grows with the square of the length of the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from tests.trees import tree_of
from waymark.tokenization.segments import Splitter

APP = Path(__file__).parents[1] / "app" / "waymark"
#: The parts whose patterns only read arguments and files of the person who starts the process.
OPERATORS = ("cli", "console", "remote", "cli/demonstration.py", "base/settings.py", "simulator")
#: For a text of this length, a pattern that tries again at each character takes a second of CPU; others take less than
#: a millisecond.
LENGTH, SECONDS = 2**14, 0.1
_FLAGS: dict[str, int] = {"ASCII": re.ASCII, "DOTALL": re.DOTALL, "MULTILINE": re.MULTILINE}


#: The functions that try a pattern at each character of a text, not only at its beginning.
SEARCHES = ("search", "findall", "finditer", "sub", "subn", "split")


def is_searched(source: str, call: ast.Call, function: str) -> bool:
    """Return whether a call searches a text for its pattern, and does not match it at a known place."""
    if function != "compile":
        return function in SEARCHES
    line = source.splitlines()[call.lineno - 1]
    name = re.match(r"\s*(?:self\.)?(\w+)", line)
    assert name is not None
    return re.search(rf"\b{name[1]}\.({'|'.join(SEARCHES)})\b", source) is not None


def patterns() -> Iterator[tuple[str, str | bytes, int, bool]]:
    """Yield the place, the pattern and the flags of each call of ``re`` with a literal pattern, and whether the call
    searches for it."""
    for path in sorted(APP.rglob("*.py")):
        place = path.relative_to(APP)
        if place.parts[0] in OPERATORS:
            continue
        source = path.read_text()
        if "import re\n" not in source:
            continue
        for node in ast.walk(tree_of(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            first = node.args[0]
            if (
                isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str | bytes)
            ):
                flags: int = sum(
                    _FLAGS[each.attr]
                    for argument in node.args[1:]
                    for each in ast.walk(argument)
                    if isinstance(each, ast.Attribute) and each.attr in _FLAGS
                )
                yield f"{place}:{node.lineno}", first.value, flags, is_searched(source, node, node.func.attr)


def attacks(pattern: str) -> Iterator[str]:
    """Yield texts that begin like the pattern, and then repeat something that the pattern may repeat."""
    literals = list(dict.fromkeys(re.findall(r"[A-Za-z0-9_:/.,=\"%@#{-]+", re.sub(r"\\(.)", r"\1", pattern))))[:6]
    repeated = [
        " ",
        "\n",
        "\r",
        "\t",
        "a",
        "0",
        "_",
        "-",
        ".",
        ":",
        "/",
        '"',
        "\\",
        "@",
        "%",
        "{",
        "(",
        "A",
        "é",
        *literals,
    ]
    for beginning in ("", *literals, "".join(literals[:2])):
        for piece in repeated:
            yield beginning + piece * (LENGTH // len(piece)) + "\0"
        yield (beginning + " ") * (LENGTH // (len(beginning) + 1))


def test_every_pattern_is_linear() -> None:
    found = list(patterns())
    assert len(found) > 40
    for place, pattern, flags, searched in found:
        check(pattern, flags, searched, place)


def check(pattern: str | bytes, flags: int = 0, is_searched: bool = True, place: str = "") -> None:
    compiled: re.Pattern[Any] = re.compile(pattern, flags)
    for text in attacks(pattern if isinstance(pattern, str) else pattern.decode("latin-1")):
        subject: Any = text if isinstance(pattern, str) else text.encode()
        began = thread_time()
        for read in (compiled.search,) if is_searched else (compiled.match, compiled.fullmatch):
            read(subject)
        assert thread_time() - began < SECONDS, f"{place} {pattern!r} on {text[:30]!r}..."


@pytest.mark.slow
def test_a_pattern_that_tries_again_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"on"):
        check(r"a+b")


def test_a_long_added_token_of_a_model_is_not_searched_for() -> None:
    splitter = Splitter({"a" * 100_000 + "b": 1, "<|end|>": 2}, [], 0)
    began = thread_time()
    assert splitter.split("a" * 2**16).texts == ["a" * 2**16]
    assert thread_time() - began < 1
