"""The prefix key by its published rule, for every shape of a request."""

from __future__ import annotations

from hashlib import sha256
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.chat.prefix_key import PREFIX_BYTES, prefix_key


def by_rule(model: str, tag: bytes, text: bytes) -> bytes:
    return sha256(model.encode() + b"\x00" + tag + text).digest()


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("messages", "system", "tag", "text"),
    [
        pytest.param([{"role": "system", "content": "be kind"}, USER], None, b"S", b"be kind", id="openai-system"),
        pytest.param([USER, {"role": "system", "content": "be kind"}], None, b"S", b"be kind", id="system-later"),
        pytest.param([USER], "be kind", b"S", b"be kind", id="anthropic-text"),
        pytest.param(
            [USER],
            [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
            b"S",
            b"be kind",
            id="anthropic-blocks",
        ),
        pytest.param([USER], None, b"M", b"hello", id="first-message"),
        pytest.param([{"role": "system", "content": ""}, USER], "", b"M", b"hello", id="empty-system"),
        pytest.param(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what is "},
                        {"type": "image_url", "image_url": {"url": "x"}},
                        {"type": "text", "text": "this"},
                    ],
                }
            ],
            None,
            b"M",
            b"what is this",
            id="parts",
        ),
    ],
)
def test_the_key_is_that_of_the_rule(messages: list[Any], system: Any, tag: bytes, text: bytes) -> None:
    assert prefix_key("llama", messages, system) == by_rule("llama", tag, text)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user"}],
        ["hello"],
        [{"content": "no role"}],
        [{"role": "user", "content": {"text": "a mapping"}}],
        [{"role": "user", "content": [{"text": 3}, "text"]}],
    ],
)
def test_without_a_text_there_is_no_key(messages: list[Any]) -> None:
    assert prefix_key("llama", messages) is None


def test_a_system_prompt_and_a_message_of_one_text_differ_and_so_do_models() -> None:
    as_system = prefix_key("llama", [{"role": "system", "content": "hello"}])

    assert len({as_system, prefix_key("llama", [USER]), prefix_key("llam", [USER]), prefix_key("llamah", [USER])}) == 4


@given(text=st.text(min_size=1), prefix_bytes=st.integers(1, 40))
def test_a_text_is_cut_between_characters(text: str, prefix_bytes: int) -> None:
    encoded = text.encode("utf-8", "replace")[:prefix_bytes]
    whole = encoded.decode("utf-8", "ignore").encode()

    with mock.patch("waymark.chat.prefix_key.PREFIX_BYTES", prefix_bytes):
        key = prefix_key("m", [{"role": "user", "content": text}])

    assert key == by_rule("m", b"M", whole)


@pytest.mark.slow
@given(head=st.text(min_size=PREFIX_BYTES), tails=st.lists(st.text(), min_size=2, max_size=2))
def test_only_the_head_of_a_long_text_counts(head: str, tails: list[str]) -> None:
    keys = {prefix_key("m", [{"role": "user", "content": head + tail}]) for tail in tails}

    assert len(keys) == 1
