"""tools.conformance.gateway_clients: what it makes of machines without the clients, and that its scripts are Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.conformance import gateway_clients
from tools.conformance.gateway_clients import EXIT_SKIPPED, SCRIPTS, Skipped, environment, main


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
