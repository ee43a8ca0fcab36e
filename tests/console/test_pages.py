"""The pages for operators: what they print can be typed, and names what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from tests.console.conftest import Run, blocks, words
from tests.settings_table import describe
from tests.store.factories import registration, stored, stream_of
from waymark import cli
from waymark.base.instruments import rows
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.ingest import counters, prefix_stream
from waymark.store.store import Store

ROOT = Path(__file__).parents[2]
FIRST_STEPS = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TOKENS = list(range(1, 13))


@pytest.fixture
async def tried(store: Store, redis: Redis) -> None:
    """What the first steps do by hand: pod-1 has two blocks of four tokens."""
    of = registration(model_name="llama", block_size=4, kind=EngineKind.STANDARD, endpoint=None, copies="set")
    stream = await stream_of(store, redis, of, ids_above=28114406051233)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, blocks(TOKENS[:8], block_size=4), hashes=[101, 102]), mode="set")


def printed(page: str, command: str) -> str:
    """What a page shows below a command."""
    (found,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)(?=^\$ |^```)", page, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.usefixtures("tried")
async def test_the_first_steps_show_what_inspect_draws(waymark: Run) -> None:
    flags = ("--model", "llama", "--tokens", words(TOKENS))
    command = f'waymark inspect prompt --model llama --tokens "{words(TOKENS)}"'
    assert printed(FIRST_STEPS, command) == await waymark("inspect", "prompt", *flags)


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    "command",
    [
        "waymark inspect block cb38e4d7fb2dca5c --model llama",
        "waymark inspect namespace --lora sql --salt a --seq-hash cb38e4d7fb2dca5c",
    ],
)
async def test_the_page_shows_what_is_printed(command: str, waymark: Run) -> None:
    assert printed(PAGE, command) == await waymark(*command.split()[1:])


def test_every_command_of_the_page_can_be_typed() -> None:
    commands = re.findall(r"^\$ waymark ([^;\n]+)", PAGE, re.MULTILINE)
    commands += [f"status {flags}".strip() for flags in re.findall(r"`waymark status( [^`]+)?`", PAGE)]
    assert len(commands) > 12
    for command in commands:
        assert cli.parse(shlex.split(command)).command in ("status", "inspect")


def test_every_metric_of_the_page_is_there_with_its_labels() -> None:
    metrics = Metrics()
    families = {
        sample.name.removesuffix("_created")
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
    }
    declared = {row.full_name: row.labels for row in rows(Metrics)}
    named = set(re.findall(r"`(waymark_\w+)", PAGE))
    assert len(named) > 12
    assert named - declared.keys() - families == set()
    for name, label in re.findall(r"`(waymark_\w+)\{(\w+)=", PAGE) + re.findall(r"`(waymark_\w+)` by `(\w+)`", PAGE):
        assert label in declared[name]


def test_every_setting_of_the_page_is_one() -> None:
    known = {setting.variable for setting in describe()}
    named = set(re.findall(r"`(WAYMARK_\w+)`", PAGE))
    assert named
    assert named - known == {"WAYMARK_URL"}, "which the commands read, and no process"


def test_the_reasons_of_degraded_streams_are_all_explained() -> None:
    for reason, sentence in (counters.REASONS | prefix_stream.REASONS).items():
        assert f"`{reason}: {sentence}`" in PAGE


def test_the_reasons_of_ignored_events_are_those_of_the_code() -> None:
    named = set(re.findall(r"ignored\.(\w+)", PAGE))
    assert {"block_size_mismatch", "other_model"} <= named
    code = (ROOT / "app" / "waymark" / "domain" / "plan.py").read_text(encoding="utf-8")
    assert named <= set(re.findall(r'return "(\w+)"', code))


def test_what_the_page_links_to_is_there() -> None:
    for name in re.findall(r"\]\(([\w./]+)\)", PAGE):
        assert (ROOT / "docs" / name).exists(), name
    titles = set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
    assert set(re.findall(r'[Ss]ee "([^"]+)"', PAGE)) <= titles
