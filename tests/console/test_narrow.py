"""The commands in a terminal of 80 columns: nothing is wider, and no name is cut."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.factories import publisher_row
from tests.live import start
from tests.ports import unused_port
from waymark import cli
from waymark.cli import demonstration as demo
from waymark.cli.parser import COMMANDS as COMMANDS_OF_THE_SHELL
from waymark.console import ask, decisions, progress, publishers
from waymark.console.screen import Screen, ScreenPart
from waymark.domain.hashing import extend, token_bytes

PUBLISHER = publisher_row(
    "vllm-decode-0",
    model_name="Qwen/Qwen3-0.6B",
    status="unreachable",
    lag_seconds=71.2,
    blocks={"GPU": 120_000, "CPU": 40_000},
    weight=0.0,
    load={"requests": 3, "tokens": 0},
    complaint="no connection to tcp://10.0.0.7:5557: the connection was refused; is the engine running?",
)
LINE = dict.fromkeys(decisions.SUMMED, 1_234_567) | {
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
    row |= {"not_used": ""}
    return {
        "publishers": publishers.parts(of_publishers | {"publishers": [PUBLISHER]}),
        "books": decisions.parts_of_books({"total": SimpleNamespace(**LINE), "minutes": 60, "lines": [LINE]}),
        "select": decisions.parts_of_selection(
            {"selected": selection, "scores": [SCORE], "total_tokens": 132, "not_considered": {}}
        ),
        "ask": ask.parts({"model": "m", "tokens": 1, "instances": {"vllm-decode-0": row}, "reasons": []}),
    }


@pytest.mark.parametrize("command", ["publishers", "books", "select", "ask"])
def test_large_numbers_fit_into_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    Screen(output, width=80).show(drawn()[command])
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).splitlines()]
    assert [line for line in lines if len(line) > 80] == []
    assert any("vllm-decode-0" in line for line in lines)


def test_a_pipe_gets_the_table_alone_and_standard_error_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"warnings": ["this port is open"], "workers": [{}], "registered": 1, "is_bad": False}
    output = io.StringIO()
    Screen(output).show(publishers.parts(answer | {"publishers": [PUBLISHER]}))
    assert output.getvalue().startswith("TENANT ")
    assert capsys.readouterr().err == "warning: this port is open\n"


#: Names as Kubernetes and model hubs give them.
MODEL, POD, AWAY = "Qwen/Qwen3-30B-A3B-Instruct-2507", "vllm-decode-7f9c6d5b8-x2k4j", "vllm-decode-7f9c6d5b8-q7m2z"
TOKENS, SIZE = list(range(100, 148)), 4
ASKED = ("--tokens", f"{TOKENS[0]}-{TOKENS[-1]}")
#: Every command that prints a table, or lines about an engine; and whether an engine is named there. The commands of
#: `inspect keys` are pasted into a shell, so they stay whole.
COMMANDS: dict[tuple[str, ...], bool] = {
    ("publishers",): True,
    ("publishers", "--bad"): True,
    ("ask", *ASKED): True,
    ("select", *ASKED): True,
    ("events",): True,
    ("books",): True,
    ("books", "--by", "model"): False,
    ("books", "--by", "tenant"): False,
    ("policies", "compare"): False,
    ("policies", "replay", "lmetric"): False,
    ("placement",): True,
    ("doctor",): True,
    ("status",): True,
    ("inspect", "prompt", *ASKED): True,
    ("inspect", "block", "BLOCK"): True,
    ("inspect", "holder", "HOLDER"): True,
    ("inspect", "namespace", "--lora", "sql"): False,
    ("register", "ENGINE"): False,
    ("drain", POD): True,
    ("drain", POD, "--resume"): True,
    ("unregister", AWAY): True,
}
#: Commands that go on until they are stopped, print no line about engines, or have tests of their own for their size.
OTHERS = {
    "top": "test_top.py draws it in terminals of several sizes",
    "demo": "test_the_demo_fits_into_80_columns",
    "repair": "a line without a table", "import": "a line without a table", "export": "a line without a table",
    "reset": "a line without a table", "bench": "a report, which is a file of Markdown",
    "simulate": "one line for each engine, of URLs", "completion": "a script",
    **dict.fromkeys(("serve", "query", "ingest", "gateway", "epp"), "a server, which writes a log"),
}  # fmt: skip


def test_every_command_is_tried_or_has_a_reason() -> None:
    assert {words[0] for words in COMMANDS} | OTHERS.keys() == COMMANDS_OF_THE_SHELL.keys()


@pytest.mark.outside
async def test_every_command_fits_into_80_columns(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real output for a terminal. Only a word that is longer than the line is cut."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    hashes = list(extend(None, token_bytes(TOKENS), SIZE))
    async with (
        start("serve", redis_url, tmp_path / "log", shadow="dynamo,lmetric", decisions_kept=1.0) as live,
        live.client() as client,
    ):

        async def post(path: str, body: dict[str, Any]) -> Any:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for name, blocks in ((POD, 12), ("vllm-decode-7f9c6d5b8-b8h5n", 4)):
            body = {"type": "standard", "model": MODEL, "instance_id": name, "block_size": SIZE}
            await post("/register", body | {"address": f"http://10.0.0.{blocks}:8000"})
            event = {"event_id": 1, "event_type": "stored", "backend_id": name, "base_block_idx": 0}
            await post("/events", event | {"seq_hashes": hashes[:blocks], "token_ids": TOKENS[: SIZE * blocks]})
        away = {"type": "vLLM", "model": MODEL, "instance_id": AWAY, "block_size": SIZE, "weight": 0}
        await post("/register", away | {"endpoint": f"tcp://127.0.0.1:{unused_port()}"})
        for _ in range(3):
            chosen = await post("/select", {"model": MODEL, "token_ids": TOKENS})
            used = {"cached_tokens": 32, "prompt_tokens": len(TOKENS)}
            await post("/release", {"reservation": chosen["reservation"], **used})

        async def printed(*words: str) -> list[str]:
            url = [] if "namespace" in words else ["--url", live.url]
            code = await asyncio.to_thread(cli.main, [*words, *url])
            output, error = capsys.readouterr()
            # `doctor` fails over the engine that is away, and no engine answers at the URL of `register`.
            assert code == (cli.EXIT_FAILED if words[0] in ("doctor", "register") else cli.EXIT_OK), (words, error)
            return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()]

        async def is_told() -> bool:
            lines = "".join(await printed("placement") + await printed("events"))
            return "kept decision" in lines and "unreachable" in lines

        await wait_until(is_told, "the caches are valued, and an engine is unreachable", 30)
        key = f"{hashes[1]:016x}"
        (holder,) = re.findall(rf"(\d+)  {POD}", "\n".join(await printed("inspect", "block", key)))
        given = {"BLOCK": key, "HOLDER": holder, "ENGINE": f"http://127.0.0.1:{unused_port()}"}
        for words, names_engine in COMMANDS.items():
            lines = await printed(*(given.get(word, word) for word in words))
            wide = [line for line in lines if len(line) > 80 and max(map(len, line.split())) <= 80]
            assert wide == [], words
            assert any(POD in line or AWAY in line for line in lines) or not names_engine, (words, lines)


def test_the_demo_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    labels = [question.label for question in demo._questions()]
    output = io.StringIO()
    found = [progress.PromptMatch(label, 320, "engine-0", 320, 256, 64) for label in labels]
    Screen(output, width=80).show(progress.parts(found))
    assert all(label in output.getvalue() for label in labels), "no label goes on in the next line"


def test_a_prompt_of_one_token_is_said_in_english() -> None:
    output = io.StringIO()
    Screen(output, width=80).show(drawn()["ask"])
    assert output.getvalue().startswith("m: a prompt of 1 token\n")


def test_a_degraded_decision_is_said() -> None:
    output = io.StringIO()
    Screen(output, width=200).show(drawn()["select"])
    assert "degraded: none of the engines can be reached now" in output.getvalue()


def test_a_part_of_a_score_that_adds_nothing_is_left_out() -> None:
    """A scorer of gauges has no part for an engine that reports none."""
    selection: dict[str, Any] = {"target": TARGET | {"new_tokens": 4}, "policy": "llm-d", "decision": "kv_aware"}
    selection |= {"degraded": False, "reservation": None}
    score = SCORE | {"parts": {"prefix": 1.5, "kv_cache": None}}
    output = io.StringIO()
    answer = {"selected": selection, "scores": [score], "total_tokens": 132, "not_considered": {}}
    Screen(output, width=200).show(decisions.parts_of_selection(answer))
    assert "prefix=1.5" in output.getvalue()
    assert "kv_cache" not in output.getvalue()
