"""The alert rules ask for what is exported, say enough, and have a runbook and a trial each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql_parser import parse_duration

from tests.deploy.promql import complaints, exported, labels_of, read, selected
from waymark import cli

ROOT = Path(__file__).parents[2]
GROUPS: list[dict[str, Any]] = yaml.load((ROOT / "helm/files/alerts.yml").read_bytes(), Loader=yaml.CSafeLoader)[
    "groups"
]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
TRIALS: dict[str, Any] = yaml.load((ROOT / "tests/deploy/alerts_test.yml").read_bytes(), Loader=yaml.CSafeLoader)
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def runbook(alert: str) -> str:
    """The section of the page under the alert's name; empty where there is none."""
    return PAGE.partition(f"\n### {alert}\n")[2].partition("\n#")[0]


def test_names_are_given_once() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)


@each_rule
def test_a_rule_has_the_form_prometheus_reads(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Waymark[A-Za-z]+", rule["alert"])
    assert parse_duration(rule.get("for", "1m")).total_seconds() > 0
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


@each_rule
def test_a_rule_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    assert list(complaints(rule["expr"])) == []


@each_rule
def test_a_rule_speaks_of_labels_its_result_has(rule: dict[str, Any]) -> None:
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels_of(rule["expr"])


@each_rule
def test_a_rule_says_what_is_wrong_and_where_to_read_on(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert annotations["summary"].endswith(".")
    assert "{{" not in annotations["summary"]
    assert annotations["description"].endswith(".")
    assert annotations["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"


@each_rule
def test_a_rule_has_a_runbook(rule: dict[str, Any]) -> None:
    text = runbook(rule["alert"])
    ours = [name for name in selected(read(rule["expr"])) if name.startswith("waymark_")]
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours}
    assert families <= set(re.findall(r"`(waymark_\w+)", text)), (
        f"{rule['alert']} has no runbook that names its metrics"
    )
    assert "**Causes.**" in text
    assert re.search(r"\*\*Look\.\*\*.*`(waymark|kubectl|curl|redis-cli) ", text, re.DOTALL)
    assert "**Do.**" in text


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`waymark ([^`]+)`", PAGE))))
def test_a_command_of_a_runbook_is_one(command: str) -> None:
    cli.parse(shlex.split(command))


def test_no_runbook_is_for_an_alert_that_is_not_there() -> None:
    section = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_the_page_names_only_metrics_that_there_are() -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert set(re.findall(r"\bwaymark_[a-z_]+\b", PAGE)) <= families


@each_rule
def test_a_rule_is_tried_both_ways(rule: dict[str, Any]) -> None:
    trials = [trial for trial in TRIALS["tests"] if trial["name"] == rule["alert"]]
    assert trials
    for trial in trials:
        quiet, firing = trial["promql_expr_test"]
        assert parse_duration(quiet["eval_time"]) < parse_duration(firing["eval_time"])
        assert quiet["exp_samples"] == []
        assert firing["exp_samples"] == [{"labels": f'{{alertname="{rule["alert"]}"}}', "value": 1}]


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(waymark_nothing_total[5m])", "no metric waymark_nothing_total"),
        ('waymark_streams{state="failed"}', "waymark_streams has no label state"),
        ("sum by (model) (waymark_streams)", "no label model in what is grouped"),
        ("rate(waymark_streams[5m])", "rate of the gauge waymark_streams"),
        ("waymark_streams * on (job) group_left (color) waymark_build_info", "no label color in what is grouped"),
    ],
)
def test_what_is_wrong_with_an_expression_is_found(expression: str, complaint: str) -> None:
    assert complaint in list(complaints(expression))
