"""P12: a conversation of 6,115 tokens as messages, next to the same prompt as token ids.

Both forms get the same answer, so the difference in the replica's CPU is the cost of making the tokens. ``whole`` are
conversations that are new to the replica, ``one new turn`` adds an answer and a question to known ones, and ``known``
repeats earlier requests.

``python -m tools.benchmarks.texts FOLDER`` writes the tokenizer and conversations for ``engine_texts``.
"""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from xxhash import xxh3_128_digest

from tools.benchmarks import load
from tools.benchmarks.feed import publishers
from tools.benchmarks.options import Options
from tools.benchmarks.processes import Server, redis_server, waymark
from tools.benchmarks.prompts import MODEL
from tools.benchmarks.report import Row
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.packing import pack_tokens
from waymark.tokenization.segments import SegmentMemo

TOKENS = 6115
MESSAGES = 41
VOCABULARY = 32_000
BARS_MS = {"whole": 25.0, "one new turn": 1.0, "known": 0.3}

_CORPUS_BYTES = 8 * 2**20
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Messages = list[dict[str, str]]


def measure(options: Options) -> list[Row]:
    """Return the rows of P12."""
    rounds, requests = (1, 10) if options.is_quick else (5, 60)
    costs: dict[str, list[float]] = {}
    with _bench() as (replica, talks, folder):
        ask = _Asker(replica, folder)
        for number in range(rounds + 1):
            fresh = [talks.conversation() for _ in range(requests)]
            # Measure the ids right before the same prompts as text. The text is still new to the replica, because ids
            # do not make a conversation known.
            found = {"ids": ask(talks.as_ids(fresh)), "whole": ask(map(_as_messages, fresh))}
            found["known"] = ask(map(_as_messages, fresh))
            longer = [talks.longer(messages) for messages in fresh]
            found["ids of one new turn"] = ask(talks.as_ids(longer))
            found["one new turn"] = ask(map(_as_messages, longer))
            found["/tokenize"] = ask(map(_as_messages, fresh), "/tokenize")
            if number or options.is_quick:  # the first round warms up
                for name, ms in found.items():
                    costs.setdefault(name, []).append(ms)
    return [*_rows(costs), _hashing(), *_memory()]


def _rows(costs: dict[str, list[float]]) -> Iterator[Row]:
    for name, bar in BARS_MS.items():
        base = costs["ids of one new turn" if name == "one new turn" else "ids"]
        more = median(text - ids for text, ids in zip(costs[name], base, strict=True))
        yield Row("P12", f"/query with messages, {TOKENS:,} tokens, {name}: CPU beyond token ids", more, "ms", bar=bar)
        yield Row("P12", f"the same, {name}: CPU per request", median(costs[name]), "ms", median(base), "token ids")
        yield Row("P12", f"the same, {name}: requests a second and core", 1e3 / median(costs[name]), "requests/s")
    known = 1e3 / median(costs["/tokenize"])
    yield Row("P12", f"/tokenize, {TOKENS:,} tokens, known: requests a second and core", known, "requests/s")


def _hashing() -> Row:
    """Return the cost of hashing the earlier tokens of a conversation again in each turn. It is too low to be worth a
    cache."""
    tokens, times = pack_tokens(list(range(TOKENS))), 200
    before = process_time()
    for _ in range(times):
        block_keys(None, tokens, 16, namespace=namespace(None, []))
    milliseconds = (process_time() - before) / times * 1e3
    return Row("P12", f"hashing {TOKENS:,} tokens into blocks of 16: CPU", milliseconds, "ms")


def _memory() -> list[Row]:
    """Return the size of a full memo, as the allocator counts it."""
    bound = 16 * 2**20
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    memo = SegmentMemo(bound)
    for number in range(2 * bound // 1000):
        memo.keep(xxh3_128_digest(number.to_bytes(4, "little")), number.to_bytes(600, "little"))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    what = "memory of the known pieces at their bound, over the bound"
    return [Row("P12", what, taken / bound, "times", bar=1.0)]


class _Asker:
    """A client of a replica that sends one body after the other."""

    def __init__(self, replica: Server, folder: Path) -> None:
        self._replica = replica
        self._folder = folder

    def __call__(self, bodies: Iterator[bytes] | Sequence[bytes], path: str = "/query") -> float:
        """Return the replica's CPU per request, in ms."""
        listed = load.write_bodies(self._folder / "bodies", bodies)
        found = load.run(self._replica.port, path, listed, of=(self._replica,))
        return sum(found.cpu) / found.requests * 1e3


@contextmanager
def _bench() -> Iterator[tuple[Server, _Talks, Path]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        texts = list(_corpus())
        tokenizer = _trained(folder / MODEL, texts)
        redis = stack.enter_context(redis_server(folder))
        stack.enter_context(waymark(folder, "ingest", redis.url))
        environ = {"WAYMARK_TOKENIZERS": json.dumps({MODEL: (folder / MODEL).as_uri()})}
        replica = stack.enter_context(waymark(folder, "query", redis.url, environ))
        (engine,) = stack.enter_context(publishers(1))
        engine.register(replica)
        yield replica, _Talks(tokenizer, texts), folder


def _corpus() -> Iterator[str]:
    """Yield text and code that people have written: the project's pages, and Python's library."""
    left = _CORPUS_BYTES
    root = Path(__file__).parents[2]
    for path in [*sorted(root.glob("**/docs/**/*.md")), *sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))]:
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        yield text
        if left < 0:
            return


def _trained(path: Path, texts: Sequence[str]) -> Tokenizer:
    """Train a tokenizer with a vocabulary as large as those of real models, and write the files of a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return tokenizer


class _Talks:
    """Conversations of ``TOKENS`` tokens, no two of which have a message in common."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._words = re.findall(r"[A-Za-z][a-z]+[,.;:]?", " ".join(texts[:40]))
        self._chance = random.Random(12)
        self._number = count()
        self._words_each = 100
        self._words_each = round(self._words_each * TOKENS / len(self._ids(self.conversation())))

    def conversation(self) -> Messages:
        roles = ["system", *(["user", "assistant"] * MESSAGES)][:MESSAGES]
        return [self._message(role) for role in (*roles[:-1], "user")]

    def longer(self, messages: Messages) -> Messages:
        """Return the same conversation, one turn later."""
        return [*messages, self._message("assistant"), self._message("user")]

    def as_ids(self, conversations: Sequence[Messages]) -> list[bytes]:
        return [
            json.dumps({"model": MODEL, "block_size": 16, "token_ids": self._ids(messages)}).encode()
            for messages in conversations
        ]

    def _message(self, role: str) -> dict[str, str]:
        words = [f"{next(self._number)}", *self._chance.choices(self._words, k=self._words_each)]
        return {"role": role, "content": " ".join(words)}

    def _ids(self, messages: Messages) -> list[int]:
        told = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        (found,) = self._tokenizer.encode_batch_fast([told + "<|im_start|>assistant\n"], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids


def _as_messages(messages: Messages) -> bytes:
    return json.dumps({"model": MODEL, "block_size": 16, "messages": messages}).encode()


def _write(folder: Path, conversations: int = 60) -> None:
    texts = list(_corpus())
    talks = _Talks(_trained(folder / "model", texts), texts)
    whole = [talks.conversation() for _ in range(conversations)]
    for name, listed in (("whole", whole), ("turn", [talks.longer(messages) for messages in whole])):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(map(_as_messages, listed)))


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
