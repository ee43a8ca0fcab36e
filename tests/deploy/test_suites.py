"""The chart's suites pass, there is one for every template, and they are written as the house writes."""

from __future__ import annotations

import pytest

from tests.deploy.chart import CHART
from tests.deploy.suites import Case, cases, find, run

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suite}: {case.it}")
def test_a_template_renders_as_its_suite_says(case: Case) -> None:
    assert case.it.startswith("should ")
    assert case.asserts
    run(case)


def test_every_template_has_a_suite() -> None:
    templates = {path.stem for path in (CHART / "templates").rglob("*.yaml")}
    assert {case.suite for case in CASES} == templates
    assert {case.template.rpartition("/")[2].removesuffix(".yaml") for case in CASES} == templates


@pytest.mark.parametrize(
    "asserts",
    [
        pytest.param({"equal": {"path": "spec.replicas", "value": 3}}, id="another-value"),
        pytest.param({"equal": {"path": "spec.replicas", "value": "2"}}, id="another-type"),
        pytest.param({"notExists": {"path": "spec.replicas"}}, id="it-is-there"),
        pytest.param({"exists": {"path": "spec.replica"}}, id="it-is-not-there"),
        pytest.param({"hasDocuments": {"count": 2}}, id="another-number"),
        pytest.param({"failedTemplate": {}}, id="it-was-rendered"),
        pytest.param({"contains": {"path": "spec.template.spec.containers", "content": {}}}, id="not-in-it"),
    ],
)
def test_a_suite_that_is_wrong_fails(asserts: dict[str, dict[str, object]]) -> None:
    values = {"redis": {"url": "redis://redis:6379/0"}}
    case = Case("query-deployment", "should fail", "query-deployment.yaml", "wm", values, [asserts])
    with pytest.raises(AssertionError):
        run(case)


def test_a_word_that_the_runner_does_not_know_is_no_pass() -> None:
    values = {"redis": {"url": "redis://redis:6379/0"}}
    asserts: list[dict[str, object]] = [{"isEqual": {"path": "kind", "value": "Deployment"}}]
    with pytest.raises(KeyError):
        run(Case("query-deployment", "should fail", "query-deployment.yaml", "wm", values, asserts))


def test_paths_lead_through_maps_lists_and_quoted_names() -> None:
    assert find({"a": [{"b/c.d": 1}]}, 'a[0]["b/c.d"]') == 1
    with pytest.raises(AssertionError):
        find({"a": 1}, "a..b")
