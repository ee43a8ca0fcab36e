"""Measures the structure of the source: its rooms, the arrows between them, its files and functions, and its English.

    python -m tools.house [TREE...] [--crumbs | --picture]

A *room* is a package without the packages in it; ``waymark`` is one, and every room may import the version from its
``__init__``. An *arrow* leads from a room to a room that it imports. A room that imports no other is on the first
floor, and any other room is one floor above the highest room that it imports. With several trees there is a column for
each. ``--crumbs`` lists the modules with exactly one importer, the smallest first. ``--picture`` draws the rooms for
docs/design.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
#: A function with more lines than this is long.
FUNCTION_LINES = 40
#: A module with at most this number of lines and one importer is a *crumb*: it may belong in that importer.
CRUMB_LINES = 80
#: Phrase -> its pattern. Phrases are counted per 1,000 words of docstrings and comments. The value ``None`` does not
#: count as "none".
PHRASES = {
    '"what" as a noun': r"\b[Ww]hat\b(?!\?)",
    '"where" for "if" or "when"': r"\bwhere\b",
    '"none", "nothing", "nobody"': r"\b(?:none|nothing|nobody)\b",
    '"that is", "that has" behind a noun': r"\bthat (?:is|are|has|have)\b",
    '"of it", "of them", "of these"': r"\bof (?:it|them|these)\b",
    '"if", "when"': r"\b(?:if|when)\b",
}
#: Words that occur as names, but are not nouns: pronouns, prepositions and irregular participles.
NO_NOUNS = frozenset(
    re.findall(
        r"\w+",
        """
        all any anything both each either every it its none nothing one other others some that them this what who
        above after against among at before behind below beside between by for from in into of on over since till to
        under until with within without
        been begun bought brought built came come done drawn fallen felt found given gone got grown heard held kept
        known left lost made meant met put read said seen sent set shown sold spent stood taken thought told written
        """,
    )
)

Graph: TypeAlias = Mapping[str, set[str]]


@dataclass(slots=True)
class Module:
    """One file of the package."""

    name: str
    """The dotted name below ``waymark``; an ``__init__`` has the name of its package."""
    is_package: bool
    tree: ast.Module
    text: str
    imports: set[str] = field(default_factory=set)
    """The names of the modules that this one imports, including imports in functions and for types only."""

    @property
    def room(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0] or "waymark"

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def read_modules(tree: Path) -> dict[str, Module]:
    """Return the modules of the package in a checkout, by name."""
    root = tree / "app" / "waymark"
    modules: dict[str, Module] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, is_package, ast.parse(text), text)
    for module in modules.values():
        module.imports = {name for name in _imported(module.tree, modules.keys()) if name not in ("", module.name)}
    return modules


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, nested ones included. Walking through expressions, too, would take ten times as
    long."""
    for field_name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, field_name, ()):
            yield statement
            yield from statements_of(statement)


def _imported(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    for node in statements_of(tree):
        match node:
            case ast.Import(names=aliases):
                written = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(package), names=aliases):
                written = [f"{package}.{alias.name}" for alias in aliases]
            case _:
                continue
        for name in written:
            package, _, inner = name.partition(".")
            if package == "waymark":
                # A name that is not a module is a name in the module before the last dot.
                yield inner if inner in names else inner.rpartition(".")[0]


def arrows_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the rooms, each with the rooms that it imports."""
    arrows: dict[str, set[str]] = {module.room: set() for module in modules.values() if module.name}
    for module in modules.values():
        if module.name:
            arrows[module.room] |= {modules[name].room for name in module.imports} - {module.room}
    return arrows


def reachable(graph: Graph, start: str) -> set[str]:
    """Return the nodes that can be reached from ``start``, which is one of them only if it is part of a circle."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(graph[node])
    return found


def floors_of(graph: Graph) -> dict[str, int]:
    """Return the floor of each room. The rooms of a circle are on the same floor."""
    below = {room: reachable(graph, room) for room in graph}
    floors: dict[str, int] = {}
    # A room with fewer rooms below it comes first, so that its floor is known when the rooms above need it.
    for room in sorted(graph, key=lambda room: (len(below[room] - {room}), room)):
        lower = [floors[other] for other in below[room] if room not in below[other] and other in floors]
        floors[room] = 1 + max(lower, default=0)
    return floors


def circles_of(graph: Graph) -> list[str]:
    """Return the rooms that import themselves through other rooms."""
    return sorted(room for room in graph if room in reachable(graph, room))


def crumbs_of(modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the modules with exactly one importer, each with that importer."""
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for module in modules.values():
        for name in module.imports:
            importers[name].append(module.name)
    return {name: found[0] for name, found in importers.items() if len(found) == 1 and not modules[name].is_package}


def functions_of(tree: ast.Module) -> list[int]:
    """Return the number of lines of each function."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in statements_of(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that are statements of their own: docstrings, including those of attributes."""
    for node in statements_of(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield constant
            case _:
                pass


def lines_of(module: Module) -> int:
    """Return the number of lines with code, that is, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for constant in _docstrings(module.tree):
        lines.difference_update(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
    return len(lines)


def prose_of(module: Module) -> str:
    """Return the docstrings and comments of a module, without quoted code."""
    parts = [str(constant.value) for constant in _docstrings(module.tree)]
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            parts.append(token.string.lstrip("#: "))
    return re.sub(r"(`+).*?\1", " ", "\n".join(parts), flags=re.DOTALL)


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield each name that a statement or a parameter binds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                if name not in ("self", "cls", "_") and not name.startswith("__"):
                    yield name
            case _:
                pass


def settings_of(modules: Mapping[str, Module]) -> int:
    """Return the number of fields of ``Settings``."""
    return sum(
        isinstance(statement, ast.AnnAssign)
        for module in modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
        for statement in node.body
    )


def measure(tree: Path) -> dict[str, str]:
    """Return the figures of a checkout, in the order of the table."""
    modules = read_modules(tree)
    arrows = arrows_of(modules)
    crumbs = crumbs_of(modules)
    functions = [lines for module in modules.values() for lines in functions_of(module.tree)]
    return {
        "rooms": f"{len(arrows):,}",
        "arrows": f"{sum(map(len, arrows.values())):,}",
        "floors": f"{max(floors_of(arrows).values(), default=0):,}",
        "rooms in a circle": ", ".join(circles_of(arrows)) or "0",
        "Python files": f"{len(modules):,}",
        "modules with exactly one importer": f"{len(crumbs):,}",
        f"of these, of at most {CRUMB_LINES} lines": f"{sum(modules[name].lines <= CRUMB_LINES for name in crumbs):,}",
        "settings": f"{settings_of(modules):,}",
        "functions": f"{len(functions):,}",
        f"functions above {FUNCTION_LINES} lines": f"{sum(lines > FUNCTION_LINES for lines in functions):,}",
        "lines without blank lines, comments and docstrings": f"{sum(map(lines_of, modules.values())):,}",
        **english(modules),
    }


def english(modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the figures of docstrings, comments and names."""
    prose = "\n".join(map(prose_of, modules.values()))
    words = len(re.findall(r"[A-Za-z']+", prose))
    names = [name for module in modules.values() for name in names_of(module.tree)]
    others = sum(name.strip("_") in NO_NOUNS for name in names)
    return {
        "words of docstrings and comments": f"{words:,}",
        **{
            f"{phrase}, in 1,000 words": f"{1000 * len(re.findall(pattern, prose)) / max(1, words):.1f}"
            for phrase, pattern in PHRASES.items()
        },
        "names that are pronouns, prepositions or participles, %": f"{100 * others / max(1, len(names)):.1f}",
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table of the figures, with a row for each figure and a column for each tree."""
    rows = list(dict.fromkeys(row for figures in columns.values() for row in figures))
    lines = [["", *columns], *([row, *(figures.get(row, "") for figures in columns.values())] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" if index != 1 else f"|-{line}-|" for index, line in enumerate(text))


def crumbs_table(tree: Path) -> str:
    """Return a table of the modules with exactly one importer, the smallest first."""
    modules = read_modules(tree)
    crumbs = dict(sorted(crumbs_of(modules).items(), key=lambda crumb: (modules[crumb[0]].lines, crumb)))
    return table(
        {
            "lines": {name: str(modules[name].lines) for name in crumbs},
            "importer": crumbs,
            "its lines": {name: str(modules[importer].lines) for name, importer in crumbs.items()},
        }
    )


def picture(tree: Path) -> str:
    """Return the rooms of a checkout as a Mermaid flowchart, one row for each floor, the highest first.

    An arrow to a room that a longer path also reaches is left out, because a picture with all arrows cannot be read.
    """
    arrows = arrows_of(read_modules(tree))
    floors = floors_of(arrows)
    lines = ["flowchart TD"]
    for floor in sorted(set(floors.values()), reverse=True):
        lines.append(f'  subgraph floor{floor}["level {floor}"]')
        lines += [f'    {_node(room)}["{room.replace(".", "/")}"]' for room in sorted(floors) if floors[room] == floor]
        lines.append("  end")
    for room in sorted(arrows):
        indirect = set().union(*(reachable(arrows, other) for other in arrows[room]))
        lines += [f"  {_node(room)} --> {_node(other)}" for other in sorted(arrows[room] - indirect)]
    return "\n".join(lines)


def _node(room: str) -> str:
    """Return a node for a room. Its id differs from its label, because ``end`` and dots have a special meaning in
    Mermaid."""
    return f"room_{room.replace('.', '_')}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description="Count how the source is built.")
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="a checkout; this one by default")
    parser.add_argument("--crumbs", action="store_true", help="list the modules with exactly one importer")
    parser.add_argument("--picture", action="store_true", help="draw the rooms, as the flowchart of docs/design.md")
    options = parser.parse_args(words)
    trees: list[Path] = options.trees or [ROOT]
    for tree in trees:
        if not (tree / "app" / "waymark").is_dir():
            parser.error(f"{tree} is not a checkout: it has no app/waymark")
    if options.crumbs:
        print("\n\n".join(map(crumbs_table, trees)))
    elif options.picture:
        print("\n\n".join(map(picture, trees)))
    else:
        print(table({"now" if tree == ROOT else str(tree): measure(tree) for tree in trees}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
