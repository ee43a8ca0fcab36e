"""Private names of other packages: each one that is used is listed here, with its reason, and its package is bounded.

A private name may change in any release. So the package that has it is bounded above in ``pyproject.toml``, and the
list below is exactly what is found in the tree.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "app" / "waymark"

#: (file below app/waymark, name as it is written there) -> (package that it is from, why it is used).
BORROWED: dict[tuple[str, str], tuple[str, str]] = {
    ("store/redis/connect.py", "self._in_use_connections"): (
        "redis",
        "a connection that is released while its task is cancelled must not be missing from the pool for good",
    ),
    ("store/redis/read_connection.py", "redis._parsers.BaseParser"): (
        "redis",
        "an error reply becomes the driver's own exception class",
    ),
}
#: Names of the standard library that are public although they begin with an underscore.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Private names that this module gives to something of its own."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                names |= {str(each.value) for each in ast.walk(value) if isinstance(each, ast.Constant)}
    return {name for name in names if is_private(name)}


def own_modules(nodes: list[ast.AST]) -> set[str]:
    """The modules of ours that this one imports."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "waymark":
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def borrowed(nodes: list[ast.AST], own: set[str]) -> Iterator[str]:
    """Private names in a module that are not among ``own``: imported, read from an object, or asked for by getattr."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if any(map(is_private, alias.name.split("."))))
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] != "waymark":
                for alias in names:
                    if any(map(is_private, [*module.split("."), alias.name])):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]
            ) if is_private(name) and name not in own:
                yield ast.unparse(node)


def found_in(sources: Path) -> set[tuple[str, str]]:
    """Every borrowed name in a tree of modules."""
    read = {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in sources.rglob("*.py")}
    modules = {".".join(path.relative_to(sources.parent).with_suffix("").parts): path for path in read}
    names = {path: own_names(nodes) for path, nodes in read.items()}
    found = set()
    for path, nodes in read.items():
        own = names[path].union(*(names[modules[name]] for name in own_modules(nodes) & modules.keys()))
        found |= {(str(path.relative_to(sources)), name) for name in borrowed(nodes, own)}
    return found


@pytest.mark.slow
def test_every_private_name_of_another_package_is_listed() -> None:
    found = found_in(SOURCES)
    assert found - BORROWED.keys() == set(), "use what the package documents, or list it here with a reason"
    assert BORROWED.keys() - found == set(), "these are used no more: take them off the list"


def test_a_package_whose_private_names_are_used_is_bounded_above() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    bounded = {
        requirement.name
        for requirement in map(Requirement, lines)
        if any(each.operator in ("<", "<=", "==", "~=") for each in requirement.specifier)
    }
    assert {package for package, _ in BORROWED.values()} - bounded == set()
    assert all(reason for _, reason in BORROWED.values())


def test_borrowed_names_are_found(tmp_path: Path) -> None:
    package = tmp_path / "waymark"
    package.mkdir()
    (package / "ours.py").write_text("class Ours:\n    def _mine(self): ...\n")
    (package / "theirs.py").write_text(
        "import other._parts\n"
        "from other import _helper\n"
        "from other._inner import Thing\n"
        "from waymark.ours import Ours\n"
        "class Sub(Thing):\n"
        "    def go(self, ours, thing):\n"
        "        self._own = ours._mine() + self._inherited\n"
        "        thing._secret.value\n"
        "        getattr(thing, '_asked')\n"
        "        return self._own, thing.__class__\n"
    )
    assert {name for _, name in found_in(package)} == {
        "other._parts",
        "other._helper",
        "other._inner.Thing",
        "self._inherited",
        "thing._secret",
        "getattr(thing, '_asked')",
    }
