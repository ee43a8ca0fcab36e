"""The page on routing has the tables of the code; ``python -m tests.decide.policies.test_tables`` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decide.policies.tables import TABLES
from waymark.decide.policies.plugins import PLUGINS, PluginKind
from waymark.decide.policies.presets import DEFAULT, PRESETS
from waymark.decide.policies.scorers import SCORERS

PAGE = Path(__file__).parents[3] / "docs" / "routing.md"


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table_of_the_code(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    assert text.count(start) == text.count(end) == 1
    table = text.partition(start)[2].partition(end)[0].strip()
    assert table == TABLES[name](), "run `python -m tests.decide.policies.test_tables`"


def cells(name: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = TABLES[name]().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert {len(row) for row in rows if "---" not in row[0]} == {len(rows[0])}, "each row has all columns"
    return rows[2:]


def test_each_policy_has_a_row_with_what_it_needs() -> None:
    rows = cells("policies")
    assert [row[0].strip("*` ").removesuffix("`** (default)") for row in rows] == list(PRESETS)
    assert [row[0] for row in rows if "(default)" in row[0]] == [f"**`{DEFAULT}`** (default)"]
    assert {row[0]: row[3].strip("| ") for row in rows if row[3].strip("| ")} == {
        "`llm-d`": "gauges",
        "`sticky`": "prefix key",
    }


def test_each_constant_has_a_row_with_its_default_and_its_range() -> None:
    rows = {(row[0], row[1]): row[2:] for row in cells("constants")}
    assert len(rows) == sum(len(preset.constants) for preset in PRESETS.values())
    assert rows["`least-work`", "`active_weight`"][:2] == ["`512`", "0 to 1e+09"]
    assert rows["`least-work`", "`host_credit`"][:2] == ["`0.75`", "0 to 16"]
    assert rows["`dynamo`", "`track_prefill_tokens`"][:2] == ["`true`", "true or false"]
    assert rows["`composite`", "`fallback`"][:2] == ["`sticky`", "sticky, least-work, lmetric, longest"]


def test_each_scorer_has_a_row_with_what_it_needs() -> None:
    needs = {row[0].strip("`"): row[2].strip("| ") for row in cells("scorers")}
    assert list(needs) == list(SCORERS)
    assert {name for name, need in needs.items() if need == "gauges"} == {
        name for name, scorer in SCORERS.items() if scorer.needs_gauges
    }
    assert {name: need for name, need in needs.items() if need not in ("", "gauges")} == {
        "predicted-latency-scorer": "`ttft_ms`, `tpot_ms`"
    }


def test_each_plugin_of_another_part_has_a_row() -> None:
    assert {row[0].strip("`"): row[1].strip("| ") for row in cells("others")} == {
        name: plugin.note for name, plugin in PLUGINS.items() if plugin.kind is PluginKind.OTHER
    }


def write() -> None:
    """Write every table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
