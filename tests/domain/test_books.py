"""What an answer says of its tokens, in any form, and cut at any place."""

from __future__ import annotations

import json

import pytest

from waymark.domain.books import Usage, UsageReader

_OPENAI = {
    "prompt_tokens": 1200,
    "total_tokens": 1216,
    "completion_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 1184},
}
_ANTHROPIC = {"input_tokens": 16, "cache_read_input_tokens": 1184, "cache_creation_input_tokens": 5, "output_tokens": 1}
_RESPONSES = {"input_tokens": 1200, "input_tokens_details": {"cached_tokens": 1184}, "output_tokens": 16}


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (json.dumps({"choices": [], "usage": _OPENAI}).encode(), Usage(1184, 1200, 16)),
        (event({"choices": [{"delta": {"content": "a"}}]}) + event({"usage": _OPENAI}), Usage(1184, 1200, 16)),
        (
            event({"type": "message_start", "message": {"usage": _ANTHROPIC}})
            + event({"type": "message_delta", "usage": {"output_tokens": 16}}),
            Usage(1184, 1205, 16),
        ),
        (event({"type": "response.completed", "response": {"usage": _RESPONSES}}), Usage(1184, 1200, 16)),
        (json.dumps({"usage": _OPENAI | {"prompt_tokens_details": None}}).encode(), Usage(None, 1200, 16)),
        (event({"choices": [{"delta": {"content": "a"}}]}), Usage()),
        # An engine may claim anything.
        (b'{"usage": {"prompt_tokens": 12, "cached_tokens": 13}}', Usage(None, 12)),
        (b'{"usage": {"prompt_tokens": 1099511627777, "completion_tokens": 1099511627776}}', Usage(None, None, 2**40)),
        (b'{"usage": {"prompt_tokens": -1, "cached_tokens": "1", "completion_tokens": 1.5}}', Usage()),
        # What a model or a user writes is no usage.
        (event({"choices": [{"delta": {"content": '"cached_tokens": 7, '}}]}), Usage()),
    ],
)
def test_a_usage_is_found_however_the_answer_is_cut(answer: bytes, wanted: Usage) -> None:
    for size in (1, 2, 3, 7, 50, len(answer)):
        reader = UsageReader()
        for start in range(0, len(answer), size):
            reader.take(answer[start : start + size])
        assert reader.usage == wanted, size


def test_a_number_counts_when_all_its_digits_are_there() -> None:
    reader = UsageReader()
    reader.take(b'{"cached_tokens": 12')
    assert reader.usage == Usage()
    reader.take(b"34}")
    assert reader.usage == Usage(1234)
