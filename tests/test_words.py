"""No text that a user reads has a retired word: pages, chart, contract, metrics, settings, errors, logs and help.

``docs/glossary.md`` has the words. Redis, requests and processes are not persons, one word has one meaning, and a
native speaker reads each sentence once. A word that was rewritten is retired here, so that it does not come back.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "app" / "waymark"

#: Pattern -> what is written in its place.
RETIRED = {
    r"\b(is|are|was|goes|go|been) away\b": "unavailable",
    r"\bwhoever\b": "name the person or the process",
    r"\banew\b": "again",
    r"\bbeside it\b": "name the thing, with 'next to' or 'in addition'",
    r"\bwhat is left of it\b": "the rest",
    r"\bof late\b": "recently",
    r"\bjust so\b": "exactly",
    r"\bhow it came\b": "name the source",
    r"\bas it should( be)?\b": "correct, or name the error",
    r"\b(be|is|been) had\b|\bhad again\b": "is available, can be recovered",
    r"\bhears?\b|\bheard\b": "receives",
    r"\btells?\b|\btold\b": "reports, shows, sends",
    r"\bsays nothing\b|\bsaid nothing\b": "does not answer, contains nothing",
    r"\bsomebody else\b": "another process, another user",
    r"\bin whole\b": "completely",
    r"\bfor good\b": "permanently",
    r"\bby why\b": "by reason",
    r"\bat hand\b": "in the cache",
    r"\bthe process turns\b": "the process is alive",
    r"\bchanged? hands\b": "moves to another worker",
    r"\blets? us in\b": "accepts the login",
    r"\bgiven? back\b|\bgives back\b": "release, return",
    r"\btake[ns]? out\b": "remove",
    r"\bcut off\b|\bis cut\b": "closed",
    r"\bthrows? away\b|\bthrown away\b": "drop",
    r"\bis that of\b": "belongs to, is compatible with, or repeat the noun",
    r"\bthe default is (that|those) of\b": "the default is set by",
    r"(?<!separated )(?<!joined )\bby commas\b": "separated by commas",
    r"\bat the least\b": "at least",
    r"\bsome (percent|hundreds)\b": "a few percent, or the number",
    r"\banswers the headers?\b": "returns the header",
    r"\bof which any\b": "as many as you like",
    r"\bnobody need\b": "you do not need",
}


#: Any of them, to read most texts once only.
ANY_RETIRED = re.compile("|".join(RETIRED), re.IGNORECASE)
#: What is between the two parts of a text that goes on in the next line.
JOINED = re.compile(r'"\s*\n\s*f?"')


def pages() -> list[Path]:
    return [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / name for name in ("Makefile", "Dockerfile", "docker-compose.yml")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(path for path in (ROOT / "lua").iterdir() if path.suffix in (".md", ".lua")),
        *sorted(path for path in (PACKAGE / "api" / "ui").iterdir() if path.suffix in (".html", ".js")),
        *sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix in (".sh", ".py")),
        *sorted((ROOT / ".github").rglob("*.yml")),
        *(
            path
            for path in sorted((ROOT / "helm").rglob("*"))
            if path.suffix in (".md", ".yaml", ".yml", ".json", ".txt")
        ),
        *sorted(path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yml", ".yaml", ".json")),
    ]


@cache
def sources() -> dict[Path, str]:
    """The text of each module."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module, with their lines: no docstring, but the sentences of settings and bodies."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    sentences = _sentences(tree)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    hidden = inside | (docstrings - sentences)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node.lineno, node.value


def _sentences(tree: ast.Module) -> set[int]:
    """The docstrings that are shown to users: those of settings, of flags and of bodies."""
    shown: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if node.name == "Settings" or "Options" in bases:
            body = node.body[1:]
        elif bases & {"Model", "Request", "_Prompt", "_Grouped"}:
            body = node.body[:1]
        else:
            continue
        shown |= {id(each.value) for each in body if isinstance(each, ast.Expr)}
    return shown


def found(line: int, text: str) -> list[str]:
    plain = re.sub(r"(`+)[^`]*\1", "", text)
    if ANY_RETIRED.search(plain) is None:
        return []
    return [
        f"{line}: {match[0]!r} in {' '.join(text.split())[:160]!r}; write: {instead}"
        for pattern, instead in RETIRED.items()
        for match in re.finditer(pattern, plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_retired_word(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    complaints = [complaint for number, line in enumerate(lines, 1) for complaint in found(number, line)]
    assert not complaints, "\n".join(complaints)


def test_pages_in_folders_and_texts_of_programs_are_read() -> None:
    """Also the help of make, the notes after an installation, and the text of the page in a browser."""
    names = {page.relative_to(ROOT).as_posix() for page in pages()}
    assert {
        *("docs/engines/vllm.md", "docs/notes/hot-path.md", "lua/README.md", "lua/apply_rows.lua", "Makefile"),
        *("app/waymark/api/ui/index.html", "app/waymark/api/ui/prompt.js", "helm/templates/NOTES.txt"),
        *("scripts/matrix.sh", "CONTRIBUTING.md", ".github/workflows/ci.yml"),
    } <= names


def test_strings_have_no_retired_word() -> None:
    complaints = [
        f"{path.relative_to(PACKAGE)}:{complaint}"
        for path, source in sources().items()
        if ANY_RETIRED.search(JOINED.sub("", source))  # most have none, and to parse them all takes long
        for line, text in strings(path)
        for complaint in found(line, text)
    ]
    assert not complaints, "\n".join(complaints)


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a module, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_and_comments_have_no_retired_word() -> None:
    complaints = [
        f"{path.relative_to(PACKAGE)}:{complaint}"
        for path, source in sources().items()
        if ANY_RETIRED.search(source)
        for line, text in remarks(source)
        for complaint in found(line, text)
    ]
    assert not complaints, "\n".join(complaints)


#: A docstring that begins so leaves its noun to the name that it describes.
WITHOUT_NOUN = re.compile(r"\s*(?:Of|Those|By|None|That of)\s")


def without_noun(source: str) -> list[str]:
    """The docstrings of a module, attributes' too, that say nothing without the name they stand under."""
    if re.search(rf"[\"']{WITHOUT_NOUN.pattern}", source) is None:  # most modules have none, and parsing takes long
        return []
    return [f"{line}: {text[:80]!r}" for line, text in remarks(source) if WITHOUT_NOUN.match(text)]


def test_docstrings_have_a_noun() -> None:
    complaints = [
        f"{path.relative_to(PACKAGE)}:{each}" for path, source in sources().items() for each in without_noun(source)
    ]
    assert not complaints, "begin with the noun:\n" + "\n".join(complaints)


def test_a_docstring_without_a_noun_is_found() -> None:
    assert len(without_noun('class A:\n    """Of a kind."""\n    b: int\n    """By name."""\n')) == 2
    assert without_noun('class A:\n    """Offers."""\n    b: int\n    """The bytes, by name."""\n') == []


def test_a_comment_and_a_docstring_are_remarks() -> None:
    source = 'def f() -> None:\n    """It tells."""\n    # for good\n    return "whoever"\n'
    assert sorted(remarks(source)) == [(2, "It tells."), (3, "# for good")]


def test_a_retired_word_is_found_where_users_read_it() -> None:
    assert found(1, "Redis is away; start it anew") != []
    assert found(1, "`away` is a word of this page") == []
    settings = dict(strings(PACKAGE / "settings.py"))
    assert any("The TCP port that the HTTP API listens on." in text for text in settings.values())
    bodies = dict(strings(PACKAGE / "api" / "query_schemas.py"))
    assert any("in msgpack a bin of little-endian u32" in text for text in bodies.values())
