"""The dashboard asks for what is exported, and can be read at three in the morning."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from promql_parser import AggregateExpr

from tests.base.test_metrics import EXPORTED
from tests.deploy.promql import ENGINES, complaints, grouping, labels_of, nodes, read, selected
from waymark.base.instruments import rows
from waymark.base.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "helm/files/dashboard.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
CHARTS: list[dict[str, Any]] = [panel for panel in PANELS if panel["type"] != "alertlist"]
RUNBOOKS = re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_it_begins_with_whether_all_is_well() -> None:
    titles = ["Is it well?", "Queries", "Decisions", "Books", "Gateway"]
    titles += ["Streams", "Discovery and engines", "Index against engine", "Index and Redis", "Processes"]
    assert [row["title"] for row in ROWS] == titles
    assert DASHBOARD["panels"][0] == ROWS[0]
    assert not any(row["collapsed"] for row in ROWS)


def test_ids_and_titles_are_given_once() -> None:
    for field in ("id", "title"):
        values = [panel[field] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)


def test_no_two_panels_overlap_and_none_stands_out_of_the_grid() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    for title, at in places:
        assert at["x"] >= 0, title
        assert at["x"] + at["w"] <= 24, title
    for (one, a), (other, b) in itertools.combinations(places, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_beside or is_above, f"{one} and {other} overlap"


def test_every_panel_says_what_it_means() -> None:
    for panel in PANELS:
        assert len(panel["description"]) > 30, panel["title"]
        assert set(re.findall(r"[Rr]unbook (\w+)", panel["description"])) <= set(RUNBOOKS), panel["title"]


def test_a_panel_asks_for_what_is_exported() -> None:
    for panel in CHARTS:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert list(complaints(target["expr"])) == [], panel["title"]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels_of(target["expr"]), panel["title"]


def test_what_each_installation_counts_is_added_up_over_the_installations() -> None:
    """All namespaces are chosen at first: the greatest of their counts would hide the others."""
    own = {"primary", "record", "backend"}  # a Redis, or an engine, may be that of several
    counts = {
        row.full_name for row in rows(Metrics) if row.over == "max" and row.help.startswith("How many")
        if own.isdisjoint(row.labels)
    }  # fmt: skip
    assert len(counts) > 8
    for target in (target for panel in CHARTS for target in panel["targets"]):
        for node in nodes(read(target["expr"])):
            if isinstance(node, AggregateExpr) and str(node.op) == "max" and counts & set(selected(node)):
                assert "namespace" in grouping(node), target["expr"]


def test_a_panel_shows_only_what_was_chosen() -> None:
    for target in (target for panel in CHARTS for target in panel["targets"]):
        selectors = re.findall(r"\b(?:waymark|process)_\w+(\{[^}]*\})?", target["expr"])
        assert all('namespace=~"$namespace", job=~"$job"' in selector for selector in selectors), target["expr"]


def test_a_panel_has_a_unit_and_the_chosen_data_source() -> None:
    for panel in CHARTS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for where in (panel, *panel["targets"]):
            assert where["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]


def test_a_panel_links_to_each_runbook_that_it_names() -> None:
    linked = 0
    for panel in PANELS:
        named = [name for name in RUNBOOKS if name in panel["description"]]
        links = {link["title"]: link["url"] for link in panel.get("links", ())}
        assert links == {f"Runbook {name}": f"docs/operations.md#{name.lower()}" for name in named}, panel["title"]
        linked += len(links)
    assert linked > 10


def test_the_index_is_shown_against_what_engines_say_of_themselves() -> None:
    (row,) = [row for row in ROWS if row["title"] == "Index against engine"]
    below = [panel for panel in CHARTS if panel["gridPos"]["y"] == row["gridPos"]["y"] + 1]
    assert len(below) == 3
    for panel in below:
        names = {name for target in panel["targets"] for name in selected(read(target["expr"]))}
        assert any(name in ENGINES for name in names), panel["title"]
        assert any(name.startswith("waymark_") for name in names), panel["title"]


def test_the_row_of_the_books_has_what_was_promised_and_what_came() -> None:
    start = DASHBOARD["panels"].index(next(row for row in ROWS if row["title"] == "Books")) + 1
    below = list(itertools.takewhile(lambda panel: panel["type"] != "row", DASHBOARD["panels"][start:]))
    shown = {name for panel in below for target in panel["targets"] for name in selected(read(target["expr"]))}
    amounts = {f"waymark_tokens_{amount}_total" for amount in ("available", "chosen", "expected", "delivered")}
    assert amounts | {"waymark_drifts_total", "waymark_shadow_decisions_total", "waymark_shadow_tokens_total"} <= shown
    (drift,) = [panel for panel in below if panel["title"] == "Targets found to drift"]
    assert "WaymarkDrift" in drift["description"]


def test_what_can_be_chosen_comes_from_the_processes_themselves() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job", "role"]
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("namespace", "job", "role"):
        query = variables[name]["query"]["query"]
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label == name
        assert list(complaints(selector)) == []
        # A series without the label at all is among "all", too.
        assert variables[name]["allValue"] == ".*"


def test_every_metric_has_its_place_on_it() -> None:
    shown = " ".join(target["expr"] for panel in CHARTS for target in panel["targets"])
    missing = [
        name for exported in EXPORTED if not re.search(rf"\b{(name := exported.partition('{')[0])}(_|\b)", shown)
    ]
    assert missing == []


def test_restarts_and_takeovers_are_marked_on_every_panel() -> None:
    marks = {each["name"]: each for each in DASHBOARD["annotations"]["list"]}
    counters = {"Engine restarts": "waymark_restarts_total", "Takeovers": "waymark_takeovers_total"}
    assert set(marks) == set(counters)
    for name, mark in marks.items():
        assert set(selected(read(mark["expr"]))) == {counters[name]}
        assert mark["enable"]
        assert mark["datasource"]["uid"] == "${datasource}"
        assert list(complaints(mark["expr"])) == []
