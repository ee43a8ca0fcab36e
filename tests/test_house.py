"""How the house is built, where a program can check it; ``tests/test_layers.py`` has who may import whom."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from waymark.apply import applier
from waymark.apply.options import ApplyOptions
from waymark.domain.status import StreamStatus
from waymark.settings import Settings
from waymark.simulator.options import SimulateOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "app" / "waymark"
#: A file has one subject, so most have less than 300 lines. These have one subject and need more.
LINES_MAX, LONG = 500, {"domain/resolver.py": "one state machine", "settings.py": "a table"}
#: Words that names, logs and metrics use with a meaning of their own.
WORDS = set(
    re.findall(
        r"\w+",
        """
        adapter batch block chain depth engine fence fenced fold frame gap gauges generation group head heartbeat holder
        incarnation instance lag lease life load match medium namespace piece policy pool publisher replay reservation
        row salt seq seq_hash shard single slot stale stream sweep target watermark
        """,
    )
)


#: Names that were replaced by words of the field, and those of the standard library.
RETIRED_NAMES = {"Lender", "Take", "Standing", "Teller", "Turns", "Lanes", "Surroundings", "is_news", "_why_never"} | {
    *("Sequence", "Path", "Mapping", "Iterable"),
}


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_streams_and_requests_write_by_one_pipeline() -> None:
    users = {name.partition("/")[0] for name, text in sources().items() if "from waymark.apply.applier import" in text}
    assert users == {"api", "ingest"}


def test_options_of_the_pipeline_are_settings() -> None:
    assert ApplyOptions() == ApplyOptions.of(Settings()), "a field and its setting have the same default"
    assert set(ApplyOptions.__slots__) <= set(Settings.model_fields)


def test_the_applier_lists_its_states() -> None:
    states = re.findall(r"^- \*\*([a-z ]+)\*\*:", applier.__doc__ or "", re.MULTILINE)
    assert len(states) > 2
    assert len(set(states)) == len(states)


def test_a_file_has_one_subject_and_few_lines() -> None:
    lines = {name: text.count("\n") for name, text in sources().items()}
    assert {name: count for name, count in lines.items() if count > LINES_MAX}.keys() == LONG.keys()


def test_flags_of_simulate_are_fields_of_a_model() -> None:
    assert issubclass(SimulateOptions, BaseModel)


def test_a_status_of_a_stream_is_a_member_of_its_enum() -> None:
    """No other text is compared with a status: a misspelt one would be no error."""
    words = "|".join(StreamStatus)
    compared = re.compile(rf"""\bstatus (?:[!=]=|(?:not )?in|is) [({{\["']*(?:{words})\b["']""")
    assert compared.search('if stream.status == "lost":')
    assert {name for name, text in sources().items() if compared.search(text)} == set()


def test_engines_are_asked_over_http_by_one_client() -> None:
    """The gateway passes requests on, and bounds them otherwise; the others ask a Waymark."""
    opened = re.compile(r"\b(?:aiohttp\.ClientSession|httpx\.(?:Async)?Client)\(")
    assert {name for name, text in sources().items() if opened.search(text)} == {
        *("asker.py", "gateway/upstream.py"),
        *("client/asynchronous.py", "client/blocking.py", "remote/service.py"),
    }


def test_names_are_words_of_the_field() -> None:
    """A metaphor that needs its docstring is no name, and names of the standard library are its own."""
    defined = re.compile(r"^ *(?:async def|def|class) (\w+)", re.MULTILINE)
    names = {name for text in sources().values() for name in defined.findall(text)}
    assert "ReadConnection" in names
    assert names & RETIRED_NAMES == set()


def test_the_glossary_has_each_word_of_the_house() -> None:
    rows = re.findall(r"^\| (\*\*.*?) \| (.*) \|$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    words = Counter(word for cell, _ in rows for word in re.findall(r"\*\*(.+?)\*\*", cell))
    assert WORDS - words.keys() == set()
    assert [meaning for _, meaning in rows if not meaning.endswith(".")] == [], "a meaning is a sentence"
