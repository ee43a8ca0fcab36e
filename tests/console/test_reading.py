"""The prompts of ``waymark inspect prompt``, from words, files and standard input."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest

from waymark.base.errors import InvalidValue
from waymark.console.prompts import read_file, read_hashes, read_tokens


@pytest.mark.parametrize("given", ["1 2 3", "1,2,3", "[1, 2, 3]", " 1\n2\t3 ", '["1", "2", "3"]'])
def test_tokens_are_what_stands_between_blanks_commas_and_brackets(given: str) -> None:
    assert read_tokens(given, option="--tokens") == [1, 2, 3]


def test_a_dash_reads_standard_input() -> None:
    assert read_tokens("-", option="--tokens", stdin=StringIO("[7, 8]\n")) == [7, 8]
    assert read_hashes("-", option="--hashes", stdin=StringIO("10")) == (10,)


@pytest.mark.parametrize(
    ("given", "word", "at"), [("1 -2", "-2", 1), ("4294967296", "4294967296", 0), ("1 2 x", "x", 2), ("1.5", "1.5", 0)]
)
def test_what_is_no_token_is_named_with_its_place(given: str, word: str, at: int) -> None:
    sentence = (
        f'--tokens: "{word}" at {at} is no token id; they are integers of 0..4294967295, or ranges such as 100-163'
    )
    with pytest.raises(InvalidValue, match=re.escape(sentence)):
        read_tokens(given, option="--tokens")


def test_a_range_is_its_token_ids() -> None:
    assert read_tokens("1 100-103,7", option="--tokens") == [1, 100, 101, 102, 103, 7]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("9-1", 'the range "9-1" at 0 must have 1 to 2097152 token ids'),
        ("1 0-2097152", 'the range "0-2097152" at 1 must have 1 to 2097152 token ids'),
        ("0-2097151 0-2097151 1", "at 2 there are more than 4194304 token ids"),
        (" , ", "there are none; give token ids such as 1,2,3 or 100-163"),
    ],
)
def test_a_range_has_a_bound_and_a_prompt_has_token_ids(given: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(f"--tokens: {words}")):
        read_tokens(given, option="--tokens")


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("cb38e4d7fb2dca5c", 0xCB38E4D7FB2DCA5C),
        ("0xCB38E4D7FB2DCA5C", 0xCB38E4D7FB2DCA5C),
        ("14643705804678351452", 14643705804678351452),
        ("-1", 2**64 - 1),
        ("1234567890123456", 0x1234567890123456),
        ("123456789012345", 123456789012345),
    ],
)
def test_a_hash_is_sixteen_hex_digits_or_decimal(word: str, number: int) -> None:
    assert read_hashes(word, option="--hashes") == (number,)


@pytest.mark.parametrize("word", ["18446744073709551616", "-9223372036854775809", "cb38", "0x12", "١٢"])
def test_what_is_no_hash_is_refused(word: str) -> None:
    with pytest.raises(InvalidValue, match=f'--hashes: "{word}" is no hash'):
        read_hashes(word, option="--hashes")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("1 2", encoding="utf-8")
    assert read_file(tmp_path / "tokens", option="--tokens-file") == "1 2"
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("bytes", "nothing"):
        with pytest.raises(InvalidValue, match=f"--tokens-file: .*{name} cannot be read"):
            read_file(tmp_path / name, option="--tokens-file")
