"""tools.conformance.gateway_clients: what it makes of machines without the clients, and that its scripts are Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.conformance import gateway_clients
from tools.conformance.gateway_clients import (
    EXIT_SKIPPED,
    MODELS_ELSEWHERE,
    SCRIPTS,
    SUITES,
    Skipped,
    ending,
    environment,
    failures,
    main,
    models_of,
)


def test_without_a_registry_it_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "pip" in command:
            raise subprocess.CalledProcessError(1, command, stderr="warning\nERROR: no matching distribution")
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(Skipped, match="ERROR: no matching distribution"):
        environment(tmp_path / "env", has_suites=False)
    monkeypatch.setattr("sys.argv", ["gateway_clients", "--environment", str(tmp_path / "env")])
    assert main() == EXIT_SKIPPED
    assert capsys.readouterr().err.startswith("skipped: ")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_of_a_client_is_python_and_checks_something(name: str) -> None:
    code = gateway_clients._HEAD + SCRIPTS[name]
    compile(code, name, "exec")
    assert code.count('check("') + code.count('check(f"') >= 4


OUTPUT = """\
FF.                                                                      [100%]
/x/openai/_base_client.py:1099: openai.NotFoundError: Error code: 404 - there is no such response
/x/openai/_base_client.py:1099: openai.NotFoundError: Error code: 404 - there is no such response
FAILED tests/test_responses.py::TestResponses::test_cancel[strict] - openai.NotFoundError
FAILED tests/test_responses.py::TestAsync::test_cancel[loose] - openai.NotFoundError
2 failed, 1 passed in 0.39s
+------------------------------------
"""


def test_what_an_sdks_tests_found_is_counted_by_its_error() -> None:
    assert ending(OUTPUT) == "2 failed, 1 passed in 0.39s"
    assert failures(OUTPUT) == [
        "  failed: test_cancel",
        "  2 times: openai.NotFoundError: Error code: 404 - there is no such response",
    ]
    assert ending("it has not ended within 1 s") == "it has not ended within 1 s"


def test_every_model_that_an_sdks_tests_ask_for_is_found(tmp_path: Path) -> None:
    (test,) = SUITES["anthropic"][0].split()
    for name, text in (
        (test, 'create(model="a-1")'),
        (MODELS_ELSEWHERE["anthropic"], 'OLD = {\n    "b-2": "soon",\n}'),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert models_of("anthropic", tmp_path) == {"a-1", "b-2"}
