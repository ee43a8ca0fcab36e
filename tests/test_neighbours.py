"""The pages for users of other projects: whatever they say Waymark has, it has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.base.test_metrics import EXPORTED
from tests.neighbours import NAMES
from tests.trees import tree_of
from waymark.base.settings import SETTINGS
from waymark.cli.parser import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "neighbours").glob("*.md"))
HEADER = "| There | Here | Difference |"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def rows(page: Path) -> list[list[str]]:
    """Return the cells of each table row of a page."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line != HEADER]


@cache
def paths() -> frozenset[str]:
    """Return the method and path of every operation of a replica and of a gateway."""
    table = (ROOT / "app" / "waymark" / "api" / "application.py").read_text(encoding="utf-8")
    return frozenset(map(" ".join, re.findall(r'"(GET|POST|PATCH|DELETE)",\s*"(/[^"]*)"', table)))


@cache
def words() -> frozenset[str]:
    """Return every word of the strings and names in the source, without docstrings."""
    found: set[str] = set()
    for file in (ROOT / "app" / "waymark").rglob("*.py"):
        nodes = list(ast.walk(tree_of(file.read_text(encoding="utf-8"))))
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case _ if id(node) in prose:
                    pass
                case ast.Constant(value=str(text)):
                    found |= {text, *re.split(r"[^A-Za-z0-9_.-]+", text)}
                case ast.Constant(value=bytes(text)):
                    found.add(text.decode("latin-1"))
                case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                    found.add(name)
    return frozenset(found) | {word.lower() for word in found}


def is_here(name: str) -> bool:
    """Return whether a name on a page exists in Waymark."""
    if name.startswith("WAYMARK_"):
        return name.removeprefix("WAYMARK_").lower() in SETTINGS
    if name.startswith("waymark_"):
        return name in {each.partition("{")[0] for each in EXPORTED}
    if name.startswith("waymark "):
        return name.split()[1] in COMMANDS
    if re.match(r"(GET|POST|PATCH|DELETE) ", name):
        return name in paths()
    return name in words() or name.lower() in words()


@each_page
def test_what_a_page_says_is_here_is_here(page: Path) -> None:
    found = rows(page)
    assert found
    for there, here, _ in found:
        names = re.findall(r"`([^`]+)`", here)
        assert [name for name in names if not is_here(name)] == [], there
        assert bool(names) != (here == "none"), there


@each_page
def test_settings_and_metrics_in_the_rest_of_a_page_are_here(page: Path) -> None:
    for name in re.findall(r"`((?:WAYMARK|waymark)_\w+)`", page.read_text(encoding="utf-8")):
        assert is_here(name), name


def missing(cells: list[str], names: str) -> list[str]:
    """Return the names, and the defaults in brackets after them, that no cell has."""
    found = []
    for name in names.split():
        text, _, default = name.replace("~", " ").partition("=")
        # Several names may share the default after the last one.
        given = rf"`{re.escape(text)}`(, `[^`]+`)* \({re.escape(default)}\)"
        whole = f"`{text}={default}`" if default else f"`{text}`"
        if not any(whole in cell or (default and re.search(given, cell)) for cell in cells):
            found.append(name)
    return found


@each_page
def test_every_name_that_a_neighbour_publishes_is_on_its_page(page: Path) -> None:
    assert missing([there for there, *_ in rows(page)], NAMES[page.stem]) == []


def test_a_name_that_is_missing_is_noticed() -> None:
    cells = ["`a`, `b` (7), `c=d`", "`GET /x`: `f` (1 MiB)"]
    nowhere = "a=8 b=1 d GET~/y f=2~MiB b=77 x"
    assert missing(cells, "a a=7 b=7 c=d GET~/x f=1~MiB") == []
    assert missing(cells, nowhere) == nowhere.split()


def test_a_name_that_is_nowhere_is_noticed() -> None:
    for name in (
        "WAYMARK_NOTHING",
        "waymark_nothing_total",
        "waymark nothing",
        "GET /nothing",
        "POST /health",
        "no_such",
    ):
        assert not is_here(name)
    for name in ("WAYMARK_PORT", "waymark_streams", "waymark epp", "POST /admin/kv-index/clear", "x-session-token"):
        assert is_here(name)
