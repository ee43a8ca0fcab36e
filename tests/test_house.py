"""The rules about the structure of the code that a program can check; ``tests/test_layers.py`` has those about
imports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from tools import house
from waymark.apply import applier
from waymark.apply.options import ApplyOptions
from waymark.base.settings import SETTINGS, Settings
from waymark.cli import demonstration as demo
from waymark.domain.status import StreamStatus
from waymark.runtime import parts
from waymark.simulator.options import SimulateOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "app" / "waymark"
#: A module has one subject, so it rarely needs more lines than this; the listed modules have one subject and need more.
LINES_MAX = 500
LONG = {
    "base/settings.py": "a table: a field and a sentence for each setting",
    "decide/reserve.py": "one effect, with the few steps that the usual way and the general one share",
    "store/reservations.py": "one record: its text, the calls that write it, and what their replies say",
    "store/scripts.py": "a table: a method for each script",
}
#: Names of the standard library, which our code must not define.
STANDARD_NAMES = {"Sequence", "Path", "Mapping", "Iterable"}


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@cache
def parsed() -> dict[str, house.Module]:
    """Return the modules by name. They are read once, because it takes a second to parse them."""
    return house.read_modules(ROOT)


def test_streams_and_requests_write_by_one_pipeline() -> None:
    users = {name.partition("/")[0] for name, text in sources().items() if "from waymark.apply.applier import" in text}
    assert users - {"apply"} == {"api", "ingest"}


def test_options_of_the_pipeline_are_settings() -> None:
    assert ApplyOptions() == parts.apply_options(Settings()), "a field and its setting have the same default"
    others = {
        "waiting_blocks",
        "rejected_events",
        "batch_events_max",
        "event_hashes_max",
        "pool_hashes_max",
        "entry_ttl_seconds",
    }
    assert set(ApplyOptions.__slots__) - others <= set(SETTINGS)


def test_the_applier_lists_its_states() -> None:
    states = re.findall(r"^- \*\*([a-z ]+)\*\*:", applier.__doc__ or "", re.MULTILINE)
    assert len(states) > 2
    assert len(set(states)) == len(states)


def test_a_long_file_has_a_reason() -> None:
    lines = {name: text.count("\n") for name, text in sources().items()}
    assert {name for name, count in lines.items() if count > LINES_MAX} - set(LONG) == set()
    assert set(LONG) <= set(lines)
    assert all(LONG.values())


def test_a_status_of_a_stream_is_a_member_of_its_enum() -> None:
    """No status is compared with a literal string, because a misspelt string would not be an error."""
    words = "|".join(StreamStatus)
    # Two of the words are only used as statuses; the others have other meanings, too.
    written = re.compile(rf"""\bstatus\b.*["'](?:{words})["']|["'](?:replaying|pending)["']""")
    assert written.search('if each["status"] in ("lost", "failed"):')
    # Only these have the words of Dynamo's API.
    assert {name for name, text in sources().items() if written.search(text)} == {
        *("domain/status.py", "api/dynamo/workers.py", "contract/dynamo.py"),
    }


def test_a_value_of_a_stranger_is_shown_by_one_function() -> None:
    """``shown`` bounds the length of a value, and keeps it on one line and in one kind of quotes; ``repr`` does not."""
    conversion = re.compile(r"""![ra]\}|%r|\brepr\(|'\{(?:self\.)?[a-z_.]+(?:\([a-z_.]*\))?\}'(?! or)""")
    assert conversion.search('raise InvalidValue(f"the field is {value!r}")')
    assert {name for name, text in sources().items() if conversion.search(text)} == {
        "base/shown.py",
        *("store/calls.py", "store/reservations.py"),  # numbers from Redis
        *("simulator/cache.py", "tokenization/tokenizers.py"),  # input of a hash
        *("discovery/reconciler.py", "ingest/polling.py", "ingest/running.py"),  # a defect, in a log or an activity
        *("base/record.py", "base/settings.py", "domain/events.py"),  # a __repr__
        *("console/drain.py", "inspection/redis_cli.py"),  # commands to run
        "cli/demonstration.py",  # its own prompts
    }


def test_no_module_reads_source_text() -> None:
    """The meaning of a field is in its model. Pydantic reads the docstrings of the simulator's options."""
    read = re.compile(r"^\s*(?:import|from) (?:ast|inspect|tokenize)\b", re.MULTILINE)
    assert read.search("    from ast import parse")
    assert {name for name, text in sources().items() if read.search(text)} == set()
    assert issubclass(SimulateOptions, BaseModel)
    assert all(field.description for field in SimulateOptions.model_fields.values())


def test_the_demo_has_no_table_of_its_own() -> None:
    """The output of the demo is made by ``console``."""
    assert not hasattr(demo, "table")
    assert {name for name, text in sources().items() if "import rich" in text or "from rich" in text} <= {
        name for name in sources() if name.startswith("console/")
    }


def test_engines_are_asked_over_http_by_one_client() -> None:
    """Requests to engines use the sessions of ``asker``; the other listed clients send requests to a Waymark."""
    opened = re.compile(r"\b(?:aiohttp\.ClientSession|httpx\.(?:Async)?Client|BoundedClient)\(")
    assert {name for name, text in sources().items() if opened.search(text)} == {
        *("base/asker.py", "client/asynchronous.py", "client/blocking.py", "client/bounded.py", "console/service.py"),
    }


def test_event_streams_are_split_in_one_module() -> None:
    """``StreamEnd`` of the gateway examines the content of the last event, and does not split events."""
    split = re.compile(r"""\\r\?\\n\\r\?\\n|split\(b?"\\n\\n|iter_lines\(|\(b?"data: ?"\)|== b?.data\b""")
    assert split.search('last = body.rsplit(b"\\n\\n", 1)[-1]')
    assert split.search('elif name == "data":')
    assert {name for name, text in sources().items() if split.search(text)} == {"base/event_streams.py"}


def test_a_bound_on_what_was_used_last_is_kept_by_one_cache() -> None:
    """The simulator has its own, because its caches are those of the simulated engines."""
    evicts = re.compile(r"\bpopitem\(last=False\)|\bmove_to_end\(")
    assert {name for name, text in sources().items() if evicts.search(text)} == {
        *("base/bounded_cache.py", "simulator/cache.py", "decide/simulated_fleet.py"),
        "ingest/replay_places.py",  # turns, none of which is evicted
    }


def test_token_ids_of_a_command_are_read_by_one_function() -> None:
    read = re.compile(r"arguments\.tokens\b(?! is )")
    found = {name: read.findall(text) for name, text in sources().items() if read.search(text)}
    assert set(found) == {"console/prompts.py", "console/inspections.py"}
    for name, uses in found.items():
        assert sources()[name].count("read_tokens(arguments.tokens, option=") == len(uses), name


def test_a_word_with_several_meanings_is_the_whole_name_of_one_class_at_most() -> None:
    """The name of a kind, a result or a client has to say what it belongs to."""
    defined = re.compile(r"^(?:class (\w+)|([A-Z]\w+)(?:: TypeAlias)? = (?:Literal|Callable))\b", re.MULTILINE)
    names = Counter(name or other for text in sources().values() for name, other in defined.findall(text))
    assert names["Client"] == 1, "that of a router"
    assert {word: names[word] for word in ("Access", "Outcome", "Mark", "Rejected") if names[word] > 1} == {}
    assert {"Turn", "Turns", "Kind"} & names.keys() == set()


#: Class names that two modules may share, because both classes describe the same thing -> the modules.
SHARED_NAMES = {
    "Service": {"contract/publishers.py", "client/answers.py"},
    "Usage": {"client/calls.py", "domain/books.py"},
}


def types_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes and type aliases of a module, without the underscore of private ones."""
    for node in house.statements_of(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                is_type = re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name)
                if is_type and not ast.unparse(value).startswith("TypeVar("):
                    yield name.lstrip("_")
            case _:
                pass


def test_a_name_of_a_class_has_one_meaning() -> None:
    modules: dict[str, list[str]] = {}
    for module in parsed().values():
        path = module.name.replace(".", "/") + ("/__init__.py" if module.is_package else ".py")
        for name in types_of(module.tree):
            modules.setdefault(name, []).append(path)
    assert len(modules) > 400
    assert {name: found for name, found in modules.items() if len(found) > 1 and name not in SHARED_NAMES} == {}
    assert {name: set(modules[name]) for name in SHARED_NAMES} == SHARED_NAMES, "an exception is needed, or goes"


def test_classes_and_aliases_are_named_types() -> None:
    source = (
        "class A:\n    class _In: ...\nRead = Callable[[], None]\nSize: TypeAlias = int\nMAX = 1\nT_co = TypeVar('T')"
    )
    assert sorted(types_of(ast.parse(source))) == ["A", "In", "Read", "Size"]


def test_names_of_the_standard_library_are_its_own() -> None:
    names = "|".join(STANDARD_NAMES)
    defined = re.compile(rf"^ *(?:class (?:{names})\b|(?:{names})\b[^=\n]*= )", re.MULTILINE)
    assert defined.search("class Path:")
    assert defined.search("Sequence: TypeAlias = list")
    assert {name for name, text in sources().items() if defined.search(text)} == set()


def glossary() -> list[tuple[str, str]]:
    """Return the rows of the glossary: a word and its meaning."""
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [(word, meaning) for word, meaning in rows if word != "Word"]


def test_a_row_of_the_glossary_is_one_word_and_one_sentence() -> None:
    rows = glossary()
    assert len(rows) > 100
    assert [word for word, _ in rows if not re.fullmatch(r"\*\*[\w -]+\*\*(?:, \*\*\w+\*\*)*", word)] == []
    words = Counter(word for cell, _ in rows for word in re.findall(r"\*\*(.+?)\*\*", cell))
    assert {word for word, count in words.items() if count > 1} == set(), "a word has one meaning"
    assert [meaning for _, meaning in rows if re.search(r"[.!?] +[A-Z*`]", meaning) or not meaning.endswith(".")] == []


#: Rows of ``make house`` about the English of docstrings, comments and names -> the bound, and the goal. A bound only
#: moves towards its goal. "If" and "when" are the only words that should not become rarer.
ENGLISH = {
    '"what" as a noun, in 1,000 words': (1.2, 2),
    '"where" for "if" or "when", in 1,000 words': (0.2, 1),
    '"none", "nothing", "nobody", in 1,000 words': (1.0, 1),
    '"that is", "that has" behind a noun, in 1,000 words': (1.3, 1),
    '"of it", "of them", "of these", in 1,000 words': (0.5, 0.5),
    '"if", "when", in 1,000 words': (9.5, 8),
    "names that are pronouns, prepositions or participles, %": (1.0, 1),
}


@pytest.mark.slow
def test_the_english_of_the_code_gets_no_worse() -> None:
    figures = house.english(parsed())
    measured = {row: float(figures[row]) for row in ENGLISH}
    wrong = {
        row: measured[row]
        for row, (bound, _) in ENGLISH.items()
        if (measured[row] < bound if row.startswith('"if"') else measured[row] > bound)
    }
    assert not wrong, f"{wrong}: say the noun in place of the pronoun, and if or when in place of where (make house)"
