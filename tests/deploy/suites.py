"""The chart's own suites in ``helm/tests``, run without the helm-unittest plugin they are written for.

What is here is what the suites use: a suite's ``set``, a test's ``template`` and ``set``, an assertion's
``documentIndex``, and the assertions below. A word that is not known is an error, never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.deploy.chart import CHART, at, merged, parsed, texts

_MISSING = object()
#: One step of a path: ``name``, ``[0]`` or ``["a/b.c"]``.
_STEP = re.compile(r'\.?(?:(?P<name>[\w-]+)|\[(?P<index>\d+)\]|\["(?P<quoted>[^"]+)"\])')


@dataclass(frozen=True, slots=True)
class Case:
    """One ``it`` of a suite."""

    suite: str
    it: str
    template: str
    release: str
    values: dict[str, Any]
    asserts: list[dict[str, Any]]


def cases() -> list[Case]:
    """All tests of all suites."""
    return [case for path in sorted((CHART / "tests").glob("*_test.yaml")) for case in _cases(path)]


def run(case: Case) -> None:
    """Render, and hold every assertion against the documents; AssertionError says which one failed."""
    failure: str | None = None
    documents: list[dict[str, Any]] = []
    try:
        text = texts(case.values, name=case.release)[case.template]
        documents = parsed(text)
    except helm_python.HelmError as exc:
        failure = str(exc)
    for each in case.asserts:
        index = each.get("documentIndex")
        (word, wanted), *more = ((word, value) for word, value in each.items() if word != "documentIndex")
        assert not more, f"one assertion at a time: {each}"
        if word == "failedTemplate":
            assert failure is not None, "it was rendered"
            assert wanted.get("errorMessage", "") in failure, failure
            assert re.search(wanted.get("errorPattern", ""), failure), failure
            continue
        assert failure is None, failure
        if word == "hasDocuments":
            assert len(documents) == wanted["count"]
            continue
        chosen = documents if index is None else [documents[index]]
        assert chosen, f"{case.template} has no document"
        for document in chosen:
            found = document.get("kind") if word == "isKind" else find(document, wanted["path"])
            assert _ASSERTIONS[word](found, wanted), f"{each}; there is {found if found is not _MISSING else 'nothing'}"


def find(document: Any, path: str) -> Any:
    """What is at the path, or a mark that nothing is."""
    end = 0
    for step in _STEP.finditer(path):
        assert step.start() == end, f"{path!r} is no path"
        end = step.end()
        name = step["name"] or step["quoted"]
        try:
            document = document[int(step["index"]) if name is None else name]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    assert end == len(path), f"{path!r} is no path"
    return document


def _contains(found: Any, wanted: dict[str, Any]) -> bool:
    if not isinstance(found, list):
        return False
    content = wanted["content"]
    # `any`: further fields do not matter.
    return any(content.items() <= each.items() for each in found) if wanted.get("any") else content in found


_ASSERTIONS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "isKind": lambda found, wanted: found == wanted["of"],
    "equal": lambda found, wanted: found == wanted["value"] and type(found) is type(wanted["value"]),
    "exists": lambda found, wanted: found is not _MISSING,
    "notExists": lambda found, wanted: found is _MISSING,
    "contains": _contains,
    "notContains": lambda found, wanted: isinstance(found, list) and not _contains(found, wanted),
    "isSubset": lambda found, wanted: isinstance(found, dict) and wanted["content"].items() <= found.items(),
    "lengthEqual": lambda found, wanted: isinstance(found, list) and len(found) == wanted["count"],
    "matchRegex": lambda found, wanted: isinstance(found, str) and re.search(wanted["pattern"], found) is not None,
}


def _cases(path: Path) -> list[Case]:
    suite = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    found = []
    for test in suite["tests"]:
        template = test.get("template", suite["templates"][0])
        assert template in suite["templates"], f"{path.name}: {template} is none of the suite's templates"
        assert "template" in test or len(suite["templates"]) == 1, f"{path.name}: of which template is {test['it']!r}?"
        values = merged(*(at(name, value) for part in (suite, test) for name, value in part.get("set", {}).items()))
        found.append(Case(suite["suite"], test["it"], template, suite["release"]["name"], values, test["asserts"]))
    return found
