"""How the house is built, where a program can check it; ``tests/test_layers.py`` has who may import whom."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from waymark import demo
from waymark.apply import applier
from waymark.apply.options import ApplyOptions
from waymark.domain.status import StreamStatus
from waymark.settings import Settings
from waymark.simulator.options import SimulateOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "app" / "waymark"
#: A file has one subject, so it has at most so many lines; these have one subject and need more.
LINES_MAX = 300
LONG = {
    "api/answer_schemas.py": "a table: the models of the answers of one API",
    "api/path_docs.py": "a table: what each path does",
    "discovery/describe.py": "one dialogue: what an engine is asked about itself, and how each answer is read",
    "domain/held.py": "one data structure: the blocks of a stream, by hash, place and holder",
    "domain/resolver.py": "one state machine: from events to changes of rows",
    "ingest/life.py": "one state: that of a stream, with all that changes it",
    "ingest/stream.py": "one loop: subscribe, replay, apply",
    "metrics.py": "a table: a row for each metric",
    "routing/presets.py": "a table: a function and a row for each policy",
    "settings.py": "a table: a field and a sentence for each setting",
    "store/scripts.py": "a table: a method for each Lua script",
}
#: Words that keys, fields, logs, commands and metrics use with a meaning of their own, and no module's name.
WORDS = set(
    re.findall(
        r"\w+",
        """
        adapter depth drain endpoint epoch fence fold frame gap gateway head instance lag life lost namespace nonce
        overdue piece replay report salt scope seq seq_hash single stale unit watermark
        """,
    )
)
#: Packages whose modules and classes are named by words of the glossary.
CORE = ("domain", "apply", "store", "routing", "selection")
#: Words in these names that mean what they mean everywhere.
ORDINARY = set(
    re.findall(
        r"\w+",
        """
        address applied applier background bound bounding call change choice clearable client cluster config connect
        connection constant count credential dialer directory discovery document driver event fact failure fetch
        fetched fetcher field filter first format full gone half hashing health held id incoming index input item
        kept keyspace known linear list lookup lua malformed map mark member memory moved multimodal name new option
        order outcome pacer pacing packing parameter parser parsing placer placing plain planner plugin primary
        progress prompt ranking read reader reading redis registry reply reported requirement reserved reserver
        resuming reuse ring role room runner scored script selector sentinel sequence served size source space state
        status store subscription sweeper taking term time trait under unreadable value waiting watch way writer
        """,
    )
)


#: Names that words of the field have replaced, and the words; no identifier is one of them, whatever its underscores.
RETIRED_NAMES = {
    **{"Line": "ReadConnection", "Lender": "ReadPool", "Take": "ReplyReader"},
    **{"Exchange": "RequestCycle, ProxiedRequest, ProcessCall", "Refusal": "Rejection"},
    **{"Standing": "RegistrationKeeper", "Teller": "StatusReporter", "Turns": "AdmissionQueue"},
    **{"Texts": "RequestCache, PromptTokenizer", "Rows": "AnswerCache", "Lanes": "RankStreams"},
    **{"Surroundings": "Dependencies", "is_news": "facts_changed", "why_never": "skip_reason"},
    **{"look": "poll, or what is read", "Look": "Inspector"},
    **{"Seat": "PublisherIds", "seat": "ids, or publisher", "Told": "StreamComplaints", "Came": "TryResult"},
    **{"Judgement": "FramePosition", "Lookup": "TargetLookup, CacheLookup", "Pace": "SweepPace, ReplayPace"},
    **{"birth": "incarnation", "beat": "heartbeat"},
    **{
        "CatchUp": "ReplayAttempt",
        "Dialect": "Api",
        "Tier": "MediumBlocks",
        "FleetCounts": "ReplicaCounts",
        "catch_up": "replay",
    },
}
#: Names of scripts, which stay, are names of the functions that call them.
SCRIPT_NAMES = {"beat": ("app/waymark/store/scripts.py", "app/waymark/store/heartbeats.py", "tests/lua/test_beat.py")}
#: Names of the standard library: nobody else defines them.
STANDARD_NAMES = {"Sequence", "Path", "Mapping", "Iterable"}
#: Where one of them may be given, to parse few modules only: a name that nobody gives, nobody uses.
ANY_RETIRED = re.compile(
    rf"(?:(?:def|class|as|import|for)\s|[.(\[{{*]|^\s*)_*(?:{'|'.join(RETIRED_NAMES)})\b"
    rf"|\b_*(?:{'|'.join(RETIRED_NAMES)})(?:\s*[=:]|\s*[,)]\s*\w+\s*[=:])",
    re.MULTILINE,
)


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_streams_and_requests_write_by_one_pipeline() -> None:
    users = {name.partition("/")[0] for name, text in sources().items() if "from waymark.apply.applier import" in text}
    assert users - {"apply"} == {"api", "ingest"}


def test_options_of_the_pipeline_are_settings() -> None:
    assert ApplyOptions() == ApplyOptions.of(Settings()), "a field and its setting have the same default"
    assert set(ApplyOptions.__slots__) <= set(Settings.model_fields)


def test_the_applier_lists_its_states() -> None:
    states = re.findall(r"^- \*\*([a-z ]+)\*\*:", applier.__doc__ or "", re.MULTILINE)
    assert len(states) > 2
    assert len(set(states)) == len(states)


def test_a_file_has_one_subject_and_few_lines() -> None:
    lines = {name: text.count("\n") for name, text in sources().items()}
    assert {name for name, count in lines.items() if count > LINES_MAX} == set(LONG)
    assert all(LONG.values()), "an exception has a reason"


def test_a_status_of_a_stream_is_a_member_of_its_enum() -> None:
    """No other text is compared with a status: a misspelt one would be no error."""
    words = "|".join(StreamStatus)
    # Two of the words are nothing but statuses; the others have further meanings.
    written = re.compile(rf"""\bstatus\b.*["'](?:{words})["']|["'](?:replaying|pending)["']""")
    assert written.search('if each["status"] in ("lost", "failed"):')
    # The words of Dynamo's API, which are fewer.
    assert {name for name, text in sources().items() if written.search(text)} == {
        *("domain/status.py", "api/dynamo_views.py", "api/dynamo_schemas.py"),
    }


def test_a_value_of_a_stranger_is_shown_by_one_function() -> None:
    """``shown`` bounds it, keeps it on one line and in one kind of quotes; ``repr`` does neither."""
    conversion = re.compile(r"""![ra]\}|%r|\brepr\(|'\{(?:self\.)?[a-z_.]+(?:\([a-z_.]*\))?\}'(?! or)""")
    assert conversion.search('raise InvalidValue(f"the field is {value!r}")')
    assert {name for name, text in sources().items() if conversion.search(text)} == {
        "shown.py",
        *("store/index.py", "store/reservations.py"),  # numbers, as Redis has them
        *("simulator/cache.py", "tokenization/tokenizers.py"),  # what is hashed
        *("discovery/reconciler.py", "ingest/polling.py", "ingest/running.py"),  # defects, in a log or an activity
        "domain/events.py",  # a __repr__
        *("remote/drain.py", "inspection/redis_cli.py"),  # commands to run
        "demo.py",  # its own prompts
    }


def test_no_module_reads_source_text() -> None:
    """What a field means is in its model. Pydantic reads the sentences of the simulator's options."""
    read = re.compile(r"^\s*(?:import|from) (?:ast|inspect|tokenize)\b", re.MULTILINE)
    assert read.search("    from ast import parse")
    assert {name for name, text in sources().items() if read.search(text)} == set()
    assert issubclass(SimulateOptions, BaseModel)
    assert all(field.description for field in SimulateOptions.model_fields.values())


def test_the_demo_has_no_table_of_its_own() -> None:
    """What is printed is made by ``console``."""
    assert not hasattr(demo, "table")
    assert {name for name, text in sources().items() if "import rich" in text or "from rich" in text} <= {
        name for name in sources() if name.startswith("console/")
    }


def test_engines_are_asked_over_http_by_one_client() -> None:
    """The gateway passes requests on, and bounds them otherwise; the others ask a Waymark."""
    opened = re.compile(r"\b(?:aiohttp\.ClientSession|httpx\.(?:Async)?Client)\(")
    assert {name for name, text in sources().items() if opened.search(text)} == {
        *("asker.py", "gateway/upstream.py"),
        *("client/asynchronous.py", "client/blocking.py", "remote/service.py"),
    }


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name in a module that the module gives or uses, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name
            case ast.alias(name=name, asname=other):
                yield node.lineno, other or name.rpartition(".")[2]
            case _:
                pass


def retired(path: str, source: str) -> list[str]:
    """The retired names among the identifiers of a module."""
    if ANY_RETIRED.search(source) is None:  # most have none, and to parse them all takes long
        return []
    return [
        f"{path}:{line}: {name} is retired; write {RETIRED_NAMES[plain]}"
        for line, name in identifiers(ast.parse(source))
        if (plain := name.strip("_")) in RETIRED_NAMES and path not in SCRIPT_NAMES.get(plain, ())
    ]


def test_names_are_words_of_the_field() -> None:
    """A metaphor that needs its docstring is no name."""
    paths = [path for folder in ("app", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > len(sources())
    complaints = [
        complaint
        for path in paths
        for complaint in retired(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert complaints == []


@pytest.mark.parametrize("name", RETIRED_NAMES)
def test_a_retired_name_is_found_where_it_is_defined_and_where_it_is_used(name: str) -> None:
    used = (f"class {name}: ...", f"def _{name}() -> None: ...", f"self._{name}()", f"f({name}=1)", f"{name} = 1")
    assert [source for source in used if len(retired("module.py", source)) != 1] == []
    assert retired("module.py", f'{name}_seconds = "{name}"  # {name}') == []


def test_a_word_with_several_meanings_is_the_whole_name_of_one_class_at_most() -> None:
    """A kind, a result or a client says of what it is."""
    defined = re.compile(r"^(?:class (\w+)|([A-Z]\w+)(?:: TypeAlias)? = (?:Literal|Callable))\b", re.MULTILINE)
    names = Counter(name or other for text in sources().values() for name, other in defined.findall(text))
    assert names["Client"] == 1, "that of a router"
    assert {word: names[word] for word in ("Access", "Outcome", "Mark", "Rejected") if names[word] > 1} == {}
    assert {"Turn", "Turns", "Kind"} & names.keys() == set()


#: Classes that share a name, because they are the same thing: a schema of the API, and what the client reads of it.
SHARED_NAMES = {
    "Publisher": {"api/answer_schemas.py", "client/answers.py"},
    "Service": {"api/answer_schemas.py", "client/answers.py"},
}


def types_of(source: str) -> Iterator[str]:
    """The classes and type aliases of a module, without the underscore of private ones."""
    for node in ast.walk(tree := ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                is_variable = ast.unparse(value).startswith("TypeVar(")
                if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) and not is_variable:
                    yield name.lstrip("_")
            case _:
                pass


def test_a_name_of_a_class_has_one_meaning() -> None:
    modules: dict[str, list[str]] = {}
    for path, source in sources().items():
        for name in types_of(source):
            modules.setdefault(name, []).append(path)
    assert len(modules) > 400
    assert {name: found for name, found in modules.items() if len(found) > 1 and name not in SHARED_NAMES} == {}
    assert {name: set(modules[name]) for name in SHARED_NAMES} == SHARED_NAMES, "an exception is needed, or goes"


def test_classes_and_aliases_are_named_types() -> None:
    source = (
        "class A:\n    class _In: ...\nRead = Callable[[], None]\nSize: TypeAlias = int\nMAX = 1\nT_co = TypeVar('T')"
    )
    assert sorted(types_of(source)) == ["A", "In", "Read", "Size"]


def test_names_of_the_standard_library_are_its_own() -> None:
    names = "|".join(STANDARD_NAMES)
    defined = re.compile(rf"^ *(?:class (?:{names})\b|(?:{names})\b[^=\n]*= )", re.MULTILINE)
    assert defined.search("class Path:")
    assert defined.search("Sequence: TypeAlias = list")
    assert {name for name, text in sources().items() if defined.search(text)} == set()


def glossary() -> list[tuple[str, str]]:
    """The rows: a word, and what it means."""
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [(word, meaning) for word, meaning in rows if word != "Word"]


def singular(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    for plural, ending in {"sses": 2, "ches": 2, "shes": 2, "xes": 2, "ss": 0, "us": 0, "is": 0, "s": 1}.items():
        if word.endswith(plural):
            return word[: len(word) - ending]
    return {"media": "medium"}.get(word, word)


def words_of_names() -> dict[str, set[str]]:
    """The words of the modules' names and the last words of the public classes' names, each with its modules."""
    words: dict[str, set[str]] = {}
    for path, source in sources().items():
        if path.partition("/")[0] not in CORE or path.endswith("__init__.py"):
            continue
        heads = re.findall(r"^class (?=[A-Z])\w*?([A-Z][a-z]*)\b", source, re.MULTILINE)
        for word in [*re.findall(r"[a-z]+", Path(path).stem), *map(str.lower, heads)]:
            words.setdefault(singular(word), set()).add(path)
    return words


def test_a_row_of_the_glossary_is_one_word_and_one_sentence() -> None:
    rows = glossary()
    assert len(rows) > 100
    assert [word for word, _ in rows if not re.fullmatch(r"\*\*[\w -]+\*\*(?:, \*\*\w+\*\*)*", word)] == []
    words = Counter(word for cell, _ in rows for word in re.findall(r"\*\*(.+?)\*\*", cell))
    assert {word for word, count in words.items() if count > 1} == set(), "a word has one meaning"
    assert WORDS - words.keys() == set()
    assert [meaning for _, meaning in rows if re.search(r"[.!?] +[A-Z*`]", meaning) or not meaning.endswith(".")] == []


def test_a_name_is_made_of_words_of_the_glossary_and_ordinary_words() -> None:
    known = {singular(word) for cell, _ in glossary() for word in re.findall(r"[a-z]+", cell.lower())}
    words = words_of_names()
    assert len(words) > 150
    assert {word: paths for word, paths in words.items() if word not in known | ORDINARY} == {}
    assert ORDINARY & known == set(), "a word of the glossary is not ordinary"
