"""Prompts for simulated engines: made up from a seed, or read from a trace."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import pytest

from waymark.base.errors import InvalidValue
from waymark.simulator.workload import conversations, read_trace, trace_tokens

TRACE = """\
{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 7]}

{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def test_a_trace_is_read_in_order_with_lengths_and_times(trace: Path) -> None:
    prompts = list(read_trace(trace))
    assert [len(prompt.tokens) for prompt in prompts] == [1024, 1100, 700]
    assert [prompt.at_seconds for prompt in prompts] == [0.0, 1.5, 3.0]


def test_prompts_of_a_trace_share_exactly_what_their_ids_share(trace: Path) -> None:
    first, second, third = read_trace(trace)
    assert second.tokens[:1024] == first.tokens
    assert second.tokens[1024:] == trace_tokens(7)[:76]
    assert third.tokens[:512] == first.tokens[:512]
    assert third.tokens[512:] == trace_tokens(2)[:188] != first.tokens[512:700]


def test_tokens_of_an_id_are_the_same_in_every_process() -> None:
    assert len(trace_tokens(3)) == 512
    assert trace_tokens(3)[:3] == (32522, 49885, 14126)


@pytest.mark.parametrize(
    "line", ['{"timestamp": 0}', "nonsense", "[1]", '{"timestamp": 0, "input_length": "x", "hash_ids": [1]}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE + line + "\n")
    with pytest.raises(InvalidValue, match=r"trace\.jsonl, line 5") as caught:
        list(read_trace(path))
    assert caught.value.field == "trace"


def test_conversations_are_the_same_for_the_same_seed() -> None:
    first, again, other = (list(islice(conversations(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_prompts_of_a_conversation_repeat_the_turns_before() -> None:
    prompts = list(islice(conversations(1, open_at_once=1, turns_max=4), 20))
    grown = [b.tokens[: len(a.tokens)] == a.tokens for a, b in pairwise(prompts)]
    assert any(grown)
    assert not all(grown)


def test_conversations_begin_with_one_of_the_system_prompts() -> None:
    prompts = islice(conversations(1, system_prompts=3, system_tokens=64), 200)
    assert len({prompt.tokens[:64] for prompt in prompts}) == 3


def test_a_conversation_keeps_adapter_and_salt() -> None:
    said = list(islice(conversations(5, lora_names=("sql",), cache_salts=("a", "b")), 300))
    assert {prompt.lora_name for prompt in said} == {None, "sql"}
    assert {prompt.cache_salt for prompt in said} == {None, "a", "b"}
    for i, later in enumerate(said):
        for earlier in said[:i]:
            if len(earlier.tokens) > 256 and later.tokens[: len(earlier.tokens)] == earlier.tokens:
                assert (later.lora_name, later.cache_salt) == (earlier.lora_name, earlier.cache_salt)
