"""The prompt of ``waymark inspect prompt``, from words."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TextIO

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.domain.names import U32_MAX, U64_MASK
from waymark.tokenization.prompt import ChatPrompt, Prompt, TextPrompt

#: Token ids of one range: as many as a prompt may have by default.
_RANGE_MAX = 1 << 21
_IDS_MAX = 1 << 22
#: More digits than a token id has would take long to convert.
_TOKEN = re.compile(r"[0-9]{1,20}", re.ASCII)
_HEX = re.compile(r"(0x)?[0-9a-fA-F]{16}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def read_tokens(text: str, *, option: str, stdin: TextIO | None = None) -> list[int]:
    """Token ids and ranges between blanks, commas or brackets; ``-`` reads them from standard input."""
    words = _words((stdin or sys.stdin).read() if text == "-" else text)
    token_ids: list[int] = []
    for place, word in enumerate(words):
        first, dash, last = word.partition("-")
        ends = (first, last if dash else first)
        if not all(_TOKEN.fullmatch(end) and int(end) <= U32_MAX for end in ends):
            raise InvalidValue(
                f"{option}: {shown(word)} at {place} is no token id; they are integers of 0..{U32_MAX}, "
                "or ranges such as 100-163"
            )
        least, most = map(int, ends)
        if not 0 <= most - least < _RANGE_MAX:
            raise InvalidValue(f"{option}: the range {shown(word)} at {place} must have 1 to {_RANGE_MAX} token ids")
        if len(token_ids) + most - least >= _IDS_MAX:
            raise InvalidValue(f"{option}: at {place} there are more than {_IDS_MAX} token ids")
        token_ids += range(least, most + 1)
    if not token_ids:
        raise InvalidValue(f"{option}: there are none; give token ids such as 1,2,3 or 100-163")
    return token_ids


def read_file(path: Path, *, option: str) -> str:
    """Return the contents of a file, or of standard input for ``-``."""
    if str(path) == "-":
        return "-"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"{option}: {path} cannot be read ({exc}); give a text file of token ids") from None


def read_prompt(text: str | None, messages: str | None, *, stdin: TextIO = sys.stdin) -> Prompt:
    """Read a text, or the messages of a chat request as JSON: a list, or an object with ``messages``; ``-`` reads them
    from standard input.
    """
    if messages is None:
        content = text or ""
        return TextPrompt(stdin.read() if content == "-" else content)
    try:
        value = json.loads(stdin.read() if messages == "-" else messages)
    except ValueError as error:
        raise InvalidValue(f"--messages is not JSON: {error}; give a list of messages", field="--messages") from None
    chat = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(chat.get("messages"), list):
        raise InvalidValue(
            "--messages is neither a list of messages nor a chat request; give one of them", field="--messages"
        )
    return ChatPrompt(
        chat["messages"],
        tools=chat.get("tools"),
        template_kwargs=chat.get("chat_template_kwargs") or {},
        system=chat.get("system"),
    )


def read_hashes(text: str, *, option: str, stdin: TextIO = sys.stdin) -> tuple[int, ...]:
    """Read the seq_hashes of a prompt, each as ``read_hash`` takes it; ``-`` reads them from standard input."""
    return tuple(read_hash(word, option=option) for word in _words(stdin.read() if text == "-" else text))


def read_hash(word: str, *, option: str) -> int:
    """16 hex digits as in a key, or a decimal number as in ``/query_by_hash``; 16 digits are taken for hex."""
    if _HEX.fullmatch(word):
        return int(word, 16)
    number = int(word) if _DECIMAL.fullmatch(word) else U64_MASK + 1
    if not -(2**63) <= number <= U64_MASK:
        raise InvalidValue(f"{option}: {shown(word)} is no hash; give 16 hex digits, or a decimal number of 64 bits")
    return number & U64_MASK


def _words(text: str) -> list[str]:
    return text.translate(str.maketrans(",[]\"'", "     ")).split()
