"""What every script promises by its first line, and what none of them may use."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waymark.store.redis.client import LUA_DIR, SCRIPTS
from waymark.store.scripts import Verdict

SIGNATURE = re.compile(r"-- (?P<name>\w+)\((?P<keys>[^;()]*); (?P<argv>[^;()]*)\) -> (?P<reply>\{.+\})\n")
FILES = sorted(LUA_DIR.glob("*.lua"))


def each_script(test: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all scripts, of which the failure names one: four hundred tests of a line each cost seconds."""

    def of_all() -> None:
        for path in FILES:
            try:
                test(path)
            except AssertionError as error:
                error.add_note(path.name)
                raise

    of_all.__name__ = of_all.__qualname__ = test.__name__
    return of_all


def signature(path: Path) -> re.Match[str]:
    match = SIGNATURE.match(path.read_text(encoding="utf-8"))
    assert match, f"{path.name}: the first line is not a signature"
    return match


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("--"))])


def code(path: Path) -> str:
    """Without comments, and with empty texts in place of strings."""
    text = re.sub(r"--[^\n]*", "", path.read_text(encoding="utf-8"))
    return re.sub(r"'[^'\n]*'", "''", text)


def globals_set(text: str) -> set[str]:
    """Names that are assigned to and nowhere declared local, as parameter or as loop variable."""
    declared: set[str] = set()
    names, parameters = r"\b(?:local|for) (?!function)([\w, ]+?)(?: in\b| *=|\n)", r"\bfunction[ \w]*\(([\w, ]*)\)"
    for declaration in (names, parameters):
        declared.update(re.findall(r"\w+", " ".join(re.findall(declaration, text))))
    declared.update(re.findall(r"\blocal function (\w+)", text))
    while re.search(r"\{[^{}]*\}", text):  # fields of a table are no variables
        text = re.sub(r"\{[^{}]*\}", "", text)
    assigned: set[str] = set(re.findall(r"(?<![\w.])function (\w+)", text))
    for names in re.findall(r"(?<![\w.\])])(\w+(?: *, *\w+)*) *=(?!=)", text):
        assigned.update(re.findall(r"\w+", names))
    return assigned - declared


def calls() -> Iterator[tuple[str, set[str], bool]]:
    """The name of each script that Waymark calls, the keywords, and whether these are all."""
    for path in (LUA_DIR.parent / "app" / "waymark").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.search(r"scripts\.(run|reply|call)\b", ast.unparse(node)):
                names = [word.value for word in node.args if isinstance(word, ast.Constant)]
                if names and names[0] in SCRIPTS:
                    keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    yield names[0], keywords, len(keywords) == len(node.keywords)


def test_there_is_a_file_for_every_script_and_a_call_of_every_script() -> None:
    assert {name for name, _, _ in calls()} == SCRIPTS.keys() == {path.stem for path in FILES}


def test_calls_have_the_names_of_the_signatures() -> None:
    for name, keywords, are_all in calls():
        declared = {parameter.name for parameter in (*SCRIPTS[name].keys, *SCRIPTS[name].args)}
        assert keywords == declared if are_all else keywords < declared, name


def test_a_call_with_other_names_has_no_words() -> None:
    for names in ("worker", "workers worker keep_seconds leaving more", "workers worker keep_seconds other"):
        with pytest.raises((TypeError, KeyError)):
            SCRIPTS["beat"].words(dict.fromkeys(names.split(), ""))


@each_script
def test_the_name_in_a_signature_is_that_of_the_file(path: Path) -> None:
    assert signature(path)["name"] == path.stem


@each_script
def test_header_tells_of_every_key_and_argument(path: Path) -> None:
    match, text = signature(path), header(path)
    assert "\n-- KEYS " in text
    assert "\n-- ARGV " in text
    for name in re.findall(r"(\w+\*?)(?:\?|#\d*)?", match["keys"] + " " + match["argv"]):
        explained = rf"\n-- +(KEYS|ARGV)?[ \w,]*\b{re.escape(name)}(?!\w)"
        assert re.search(explained, text), f"{name} is not explained"


@each_script
def test_every_verdict_is_one_that_python_knows_and_the_header_explains(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    explained = set(re.findall(r"^-- \{'(\w+)'", header(path), re.MULTILINE))
    returned = set(re.findall(r"return \{'(\w+)'", text))
    assert explained == returned
    assert returned <= set(Verdict)


@each_script
def test_keys_used_are_declared(path: Path) -> None:
    names = re.findall(r"\w+\*?", signature(path)["keys"])
    if not any(name.endswith("*") for name in names):
        used = {int(number) for number in re.findall(r"KEYS\[(\d+)\]", code(path))}
        assert used == set(range(1, len(names) + 1))
        assert len(re.findall(r"\bKEYS\b", code(path))) == len(re.findall(r"KEYS\[\d+\]", code(path)))
    assert "wm:" not in path.read_text(encoding="utf-8"), "a key is built in Lua"


@each_script
def test_no_script_sets_a_global(path: Path) -> None:
    assert globals_set(code(path)) == set()


def test_a_global_would_be_found() -> None:
    assert globals_set("local a = 1\nfor i, x in ipairs(t) do b, a = 2, 3 end") == {"b"}
    assert globals_set("local t = {n = 1}; t.n = 2; t[1] = 3; m = 4") == {"m"}
    assert globals_set("function f(x) x = 1 end") == {"f"}


@each_script
def test_no_script_uses_what_the_emulation_or_an_old_redis_does_not_have(path: Path) -> None:
    text = code(path)
    assert not text.lstrip().startswith("#!")
    for word in ("cmsgpack", "struct", "bit", "cjson", "sha1hex", "setresp", "pcall", "loadstring"):
        assert not re.search(rf"\b{word}\b", text), word


def test_keys_and_arguments_are_only_ever_unpacked_in_pieces() -> None:
    """`unpack` fails at 8,000 values."""
    for path in FILES:
        for arguments in re.findall(r"unpack\((KEYS|ARGV)([^)]*)\)", code(path)):
            assert arguments[1].count(",") == 2, f"{path.name}: {arguments}"


def test_only_the_calls_put_the_words_of_a_script_in_order() -> None:
    """Everybody else gives them by keyword."""
    app = LUA_DIR.parent / "app" / "waymark"
    ordered = re.compile(r"\bSCRIPTS\[|client\.run\(")
    assert ordered.search('await self._client.run("beat", [workers], [worker])')
    found = {
        path.relative_to(app).as_posix()
        for path in app.rglob("*.py")
        if ordered.search(path.read_text(encoding="utf-8"))
    }
    # The template of alike calls is made of the words in the order of the signature.
    assert found == {"store/redis/client.py", "store/scripts.py", "store/alike_calls.py"}
