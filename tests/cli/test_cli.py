"""The command line: what it prints, how it ends, and what becomes of its flags."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.patience import patient
from waymark import __version__, cli
from waymark.base import native
from waymark.cli import parser
from waymark.cli.parser import MEANINGS
from waymark.simulator.options import AnswerFaults, Faults, SimulateOptions

ROOT = Path(__file__).parents[2]
RUNNING = ("serve", "query", "ingest", "register", "unregister", "reset", "demo", "status", "inspect", "simulate")
REMOTE = (
    *("events", "ask", "select", "publishers", "repair", "drain", "top", "books", "policies", "placement", "doctor"),
)
COMMANDS = (*RUNNING, "gateway", *REMOTE, "epp", "bench", "completion", "export", "import")
INSPECTIONS = ("prompt", "block", "holder", "keys", "namespace")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of the test; and the log stays pytest's."""
    for name in [name for name in os.environ if name.startswith("WAYMARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("waymark.base.logs.configure", lambda level, form: None)


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been run, instead of running it."""
    ran: list[dict[str, Any]] = []

    async def run(settings: Any, **roles: Any) -> None:
        ran.append({"settings": settings, **roles})

    monkeypatch.setattr("waymark.runtime.replica.open_port", lambda settings, *, has_api: [])

    monkeypatch.setattr("waymark.runtime.replica.run", run)
    return ran


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[SimulateOptions]:
    given: list[SimulateOptions] = []

    async def simulate(
        options: SimulateOptions,
        *,
        stop: object,
        on_start: Callable[[str], None],
        on_prompt: object,
        register: object,
    ) -> str:
        given.append(options)
        on_start("engine-0: started")
        return "summary"

    monkeypatch.setattr("waymark.simulator.run.simulate", simulate)
    return given


@pytest.mark.outside
def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "waymark", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=patient(30))
    assert done.stdout == f"waymark {__version__} ({'native' if native.is_built else 'pure'})\n"


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == cli.EXIT_OK
    return capsys.readouterr().out


def test_help_lists_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys).partition("examples:\n")[0]
    groups = re.findall(r"^(\w[^\n]*):\n((?:    .+\n)+)", text, re.MULTILINE)
    listed = [line.split()[0] for _, lines in groups for line in lines.splitlines()]
    assert sorted(listed) == sorted(COMMANDS)
    assert len(groups) >= 4


def test_no_words_are_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.EXIT_OK
    assert capsys.readouterr().out == help_of(capsys)


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS if name != "bench"), *(("inspect", what) for what in INSPECTIONS)]
)
def test_every_help_has_examples_that_can_be_typed(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    examples = help_of(capsys, *command).partition("\nexamples")[2]
    shown = re.findall(r"^  \$ (.+)$", examples, re.MULTILINE)
    assert shown
    for line in shown:
        before, _, words = re.split(r"   +| > |\|(?= jq)", line)[0].rpartition("waymark ")
        assert re.fullmatch(r"(cat \S+ \| )?(WAYMARK_\w+=\S+ )*", before), (
            f"{before!r} is no command that everybody has"
        )
        assert tuple(shlex.split(words))[: len(command)] == command
        cli.parse(shlex.split(words))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_the_help_of_a_command_says_what_it_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = " ".join(help_of(capsys).split())
    description = " ".join(help_of(capsys, command).split("\n\n")[1].split())
    assert f"{command} {description}" in listed


def test_help_tells_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys).partition("exit codes:\n")[2]
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert [int(code) for code in re.findall(r"^  (\d+)  ", text, re.MULTILINE)] == sorted(codes)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["statsu"], "status"),
        (["inspect", "promt"], "prompt"),
        (["status", "--wtach"], "--watch"),
        (["status", "--status", "failedd"], "failed"),
        (["inspect", "keys", "--modle", "x"], "--model"),
        (["simulate", "--fault-drop-evry", "3"], "--fault-drop-every"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert f"; did you mean '{near}'?" in error
    command = " ".join(word for word in words if word in (*COMMANDS, *INSPECTIONS))
    assert f"usage: waymark {command}" in error


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("resume", "drain NAME --resume"),
        ("undrain", "drain NAME --resume"),
        ("engines", "publishers"),
        ("ls", "publishers"),
    ],
)
def test_a_word_of_others_leads_to_the_command(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([word, "vllm-0"])
    assert f"there is no '{word}'; use 'waymark {meant}'" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["rest", "resett", "rset"])
def test_what_deletes_everything_is_never_suggested(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([word])
    assert "did you mean 'reset'" not in capsys.readouterr().err


def test_a_word_like_no_other_gets_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["zzzzzz"])
    error = capsys.readouterr().err
    assert all(name in error for name in COMMANDS)


def test_a_command_that_ctrl_c_ends_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("waymark.cli.registrations.run", interrupted)
    assert cli.main(["register", "http://127.0.0.1:1"]) == cli.EXIT_INTERRUPTED


@pytest.mark.parametrize("command", [["status"], ["inspect"], *(["inspect", what] for what in INSPECTIONS)])
def test_every_flag_of_the_console_has_words(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = re.findall(r"^  (--\S+)(.*)$", help_of(capsys, *command), re.MULTILINE)
    assert [flag for flag, rest in flags if not re.search(r"  \S|^ \S+$", rest)] == []


# ---- bench -----------------------------------------------------------------------------------------


def test_bench_gives_all_its_words_to_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], Path]] = []

    def call(command: list[str], *, cwd: Path) -> int:
        ran.append((command, cwd))
        return 7

    monkeypatch.setattr(subprocess, "call", call)
    assert cli.main(["bench", "--quick", "--only", "P5", "--help"]) == 7
    assert ran == [([sys.executable, "-m", "tools.benchmarks", "--quick", "--only", "P5", "--help"], ROOT)]


def test_bench_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("waymark.cli.trials.__file__", str(tmp_path / "app" / "waymark" / "cli" / "trials.py"))
    assert cli.main(["bench"]) == cli.EXIT_USAGE
    assert "run it in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["query", "--unknown"],
        ["ingest", "--port", "1"],
        ["demo", "extra"],
        ["simulate", "--engines", "x"],
    ],
)
def test_wrong_arguments_end_it_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == cli.EXIT_USAGE
    assert "usage: waymark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"), [("policies", "compare|replay"), ("inspect", "prompt|block|holder|keys|namespace")]
)
def test_a_missing_word_is_named_by_its_choices(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command])
    assert f"the following arguments are required: {words}\n" in capsys.readouterr().err


@pytest.mark.outside
@pytest.mark.parametrize("role", ["serve", "query", "ingest"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WAYMARK_PORT", "high"),
        ("WAYMARK_LEASE_SECONDS", "0"),
        ("WAYMARK_REDIS_URL", "localhost:6379"),
        ("WAYMARK_REDIS_URL", "http://localhost:6379"),
        ("WAYMARK_LEASE_SECNDS", "8"),
    ],
)
def test_a_wrong_setting_stops_every_role_by_its_name(
    role: str,
    variable: str,
    value: str,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WAYMARK_PORT", str(free_port))
    monkeypatch.setenv(variable, value)
    assert cli.main([role]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"waymark {role}: {variable}")
    assert "Traceback" not in error


@pytest.mark.parametrize("role", ["query", "ingest"])
def test_a_role_of_its_own_is_refused_a_redis_in_memory(
    role: str, roles: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([role]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "memory://" in error
    assert "waymark serve" in error
    assert roles == []


@pytest.mark.parametrize(
    ("role", "has_api", "has_worker"), [("serve", True, True), ("query", True, False), ("ingest", False, True)]
)
def test_each_role_runs_its_parts(
    role: str, has_api: bool, has_worker: bool, roles: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([role, "--redis-url", "redis://somewhere:6379/0"]) == cli.EXIT_OK
    (ran,) = roles
    assert (ran["has_api"], ran["has_worker"]) == (has_api, has_worker)
    assert ran["settings"].redis_url == "redis://somewhere:6379/0"
    assert capsys.readouterr().err == ""


def test_flags_win_over_the_environment(roles: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYMARK_PORT", "1000")
    monkeypatch.setenv("WAYMARK_HOST", "::1")
    monkeypatch.setenv("WAYMARK_REDIS_URL", "redis://wrong:1")
    cli.main(["query", "--redis-url", "redis://right:1", "--port", "2000"])
    settings = roles[0]["settings"]
    assert (settings.redis_url, settings.host, settings.port) == ("redis://right:1", "::1", 2000)


def test_a_trial_says_that_it_is_one(roles: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "4444"]) == cli.EXIT_OK
    said = capsys.readouterr().err
    assert "embedded" in said
    assert "lost when the process ends" in said
    assert "Listening on 127.0.0.1, port 4444" in said
    assert len(roles) == 1


@pytest.mark.parametrize(
    ("words", "variables", "host"),
    [
        ((), {}, "127.0.0.1"),
        (("--host", "0.0.0.0"), {}, "0.0.0.0"),
        ((), {"WAYMARK_HOST": "0.0.0.0"}, "0.0.0.0"),
        (("--redis-url", "redis://somewhere:6379/0"), {}, "0.0.0.0"),
    ],
)
def test_only_a_trial_that_names_no_address_is_closed_to_the_network(
    words: tuple[str, ...],
    variables: dict[str, str],
    host: str,
    roles: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", *words]) == cli.EXIT_OK
    assert roles[0]["settings"].host == host


@pytest.mark.outside
def test_a_trial_whose_port_is_taken_prints_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == cli.EXIT_NO_PORT
    assert capsys.readouterr().err == (
        f"waymark serve: port {port} of 127.0.0.1 cannot be opened, another process listens on it; give another one "
        "with --port or WAYMARK_PORT, or another address with --host or WAYMARK_HOST\n"
    )


# ---- simulate --------------------------------------------------------------------------------------


def test_simulate_without_flags_has_the_defaults(
    simulated: list[SimulateOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate"]) == cli.EXIT_OK
    assert simulated == [SimulateOptions()]
    assert capsys.readouterr().out == "engine-0: started\nsummary\n"


def test_simulate_prints_lines_of_json_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--prompts", "3", "--base-port", "0", "--prompts-per-second", "0", "--json"]) == 0
    engine, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert engine["instance_id"] == summary["engines"][0]["instance_id"] == "engine-0"
    assert engine["endpoint"].startswith("tcp://127.0.0.1:")
    assert summary["engines"][0]["prompts"] == 3


def test_flags_of_simulate_become_options_of_their_kind(simulated: list[SimulateOptions], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    flags = (
        "--engines 2 --ranks 3 --dialect sglang-map --base-port 0 --no-replay --replay-framing seq --cpu-blocks 7 "
        "--repeat-rate 0.5 --prompts 9 --prompts-per-second 2.5 --lora-names x,y --cache-salts z --stay "
        "--register http://127.0.0.1:1 --api-token secret --fault-drop-every 4 --fault-replay-silent"
    )
    assert cli.main(["simulate", *flags.split(), "--trace", str(trace)]) == cli.EXIT_OK
    assert simulated == [
        SimulateOptions(
            engines=2,
            ranks=3,
            dialect="sglang-map",
            base_port=0,
            has_replay=False,
            replay_framing="seq",
            cpu_blocks=7,
            repeat_rate=0.5,
            prompts=9,
            prompts_per_second=2.5,
            trace=trace,
            lora_names=("x", "y"),
            cache_salts=("z",),
            stay=True,
            register="http://127.0.0.1:1",
            api_token="secret",
            faults=Faults(drop_every=4, replay_silent=True),
        )
    ]


def test_every_option_and_fault_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = capsys.readouterr().out
    options = SimulateOptions.model_fields.keys() - {"faults", "answer_faults", "has_replay", "register_url"}
    flags = ["--no-replay", "--register ", *(f"--{name} " for name in options - {"stay"})]
    flags += ["--stay ", *(f"--fault-{name}" for name in (*Faults.model_fields, *AnswerFaults.model_fields))]
    assert [flag for flag in flags if flag.replace("_", "-") not in text] == []


def test_every_flag_of_simulate_has_a_sentence() -> None:
    kinds: list[type[BaseModel]] = [SimulateOptions, Faults, AnswerFaults]
    for options in kinds:
        sentences = {name: field.description or "" for name, field in options.model_fields.items()}
        assert {name: said for name, said in sentences.items() if not re.fullmatch(r"(?s)[A-Z_].+[.]", said)} == {}


def test_options_that_do_not_fit_end_it_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--engines", "0"]) == cli.EXIT_USAGE
    assert "engines is 0; it is at least 1" in capsys.readouterr().err


def test_the_page_of_commands_has_each_of_them_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    listed = {
        name for line in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert listed == set(COMMANDS)
    codes = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)}
    assert codes == MEANINGS


@pytest.mark.parametrize(
    ("word", "parsers"), [("--version", 1), ("query", 2), ("qeury", 1 + len(COMMANDS)), ("--help", 1 + len(COMMANDS))]
)
def test_a_right_word_makes_the_parser_of_no_other(word: str, parsers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    usual = parser.Parser.__init__

    def noted(self: parser.Parser, **options: Any) -> None:
        made.append(self)
        usual(self, **options)

    monkeypatch.setattr(parser.Parser, "__init__", noted)
    parser.parser_of(word)
    assert len(made) == parsers
