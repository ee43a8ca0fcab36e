"""The commands in a terminal of 80 columns: nothing is wider, and no name is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest

from waymark.console import ask, books, publishers, select
from waymark.console.screen import Screen, ScreenPart

PUBLISHER = {
    "tenant_id": "default",
    "model_name": "Qwen/Qwen3-0.6B",
    "instance_id": "vllm-decode-0",
    "dp_rank": 0,
    "scope": "instance",
    "status": "unreachable",
    "lag_seconds": 71.2,
    "blocks": {"GPU": 120_000, "CPU": 40_000},
    "weight": 0.0,
    "load": {"requests": 3},
    "complaint": "no connection to tcp://10.0.0.7:5557: the connection was refused; is the engine running?",
}
LINE = dict.fromkeys(books.SUMMED, 1_234_567) | {
    "tenant_id": "default",
    "model_name": "Qwen/Qwen3-0.6B",
    "instance_id": "vllm-decode-0",
    "credit": 0.75,
}
TARGET = {"instance_id": "vllm-decode-0", "dp_rank": 0, "address": "http://10.0.0.7:8000", "device_tokens": 128}
SCORE = TARGET | {
    "score": None,
    "cost": 1234.5,
    "host_tokens": 0,
    "disk_tokens": 0,
    "new_tokens": 4,
    "wait_tokens": 123_456,
    "active_requests": 12,
    "parts": {"prefill": 12.0, "wait": 1234.0},
}


def drawn() -> dict[str, Sequence[ScreenPart]]:
    of_publishers: dict[str, Any] = {"warnings": [], "workers": [{}], "registered": 1, "is_bad": False}
    selection = {
        "target": TARGET | {"new_tokens": 4},
        "policy": "least-work",
        "decision": "kv_aware",
        "degraded": True,
        "reservation": None,
    }
    row = {"longest_matched": 32, "GPU": 32, "CPU": 0, "DISK": 0, "blocks": "G" * 32 + "." * 32, "note": "x" * 30}
    return {
        "publishers": publishers.parts(of_publishers | {"publishers": [PUBLISHER]}),
        "books": books.parts({"total": LINE, "minutes": 60, "lines": [LINE]}),
        "select": select.parts({"selected": selection, "scores": [SCORE], "total_tokens": 132, "not_considered": {}}),
        "ask": ask.parts({"model": "m", "tokens": 1, "instances": {"vllm-decode-0": row}, "reasons": []}),
    }


@pytest.mark.parametrize("command", ["publishers", "books", "select", "ask"])
def test_a_command_fits_into_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    Screen(output, width=80).show(drawn()[command])
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).splitlines()]
    assert [line for line in lines if len(line) > 80] == []
    # A complaint takes so much room that the name of its engine goes on in the next line.
    assert any(("vllm-deco" if command == "publishers" else "vllm-decode-0") in line for line in lines)


def test_a_prompt_of_one_token_is_said_in_english() -> None:
    output = io.StringIO()
    Screen(output, width=80).show(drawn()["ask"])
    assert output.getvalue().startswith("m: a prompt of 1 token\n")


def test_a_degraded_decision_is_said() -> None:
    output = io.StringIO()
    Screen(output, width=200).show(drawn()["select"])
    assert "degraded: none of the engines can be reached now" in output.getvalue()
