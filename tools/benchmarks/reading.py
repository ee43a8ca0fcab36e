"""Measures the CPU that an ingest worker needs to read a batch of 64 blocks, in the forms that releases of vLLM send.

    python -m tools.benchmarks.reading [--rounds 15]

A figure is the CPU time of this process in the shortest round. A form may cost at most 1.2 times as much as the plain
one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from tools.benchmarks.report import aligned
from waymark.domain.engines import EngineKind
from waymark.engines import decoder

BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
CALLS: Final = 500
BAR: Final = 1.2
PUBLISHER_ID: Final = bytes(range(16))


def event(**more: Any) -> dict[str, Any]:
    """Return a store as vLLM 0.33 sends it, with further fields."""
    return {
        "type": "BlockStored",
        "block_hashes": [i.to_bytes(32, "big") for i in range(1, BLOCKS + 1)],
        "parent_block_hash": None,
        "token_ids": list(range(BLOCKS * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * BLOCKS,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


FORMS: Final[dict[str, list[Any]]] = {
    "plain": [1.0, [event()], 0],
    "publisher_id": [1.0, [event()], 0, PUBLISHER_ID],
    "locality": [1.0, [event(locality="LOCAL")], 0],
    "publisher_id and locality": [1.0, [event(locality="LOCAL")], 0, PUBLISHER_ID],
    "origin, ownership and session_id": [1.0, [event(origin="NEW", ownership="o", session_id="s")], 0, PUBLISHER_ID],
}


def microseconds(payload: bytes, rounds: int) -> float:
    decode = decoder(EngineKind.VLLM, seed=1337)
    shortest = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(CALLS):
            decode(payload)
        shortest = min(shortest, time.process_time() - began)
    return shortest / CALLS * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    taken = {name: microseconds(msgpack.packb(batch), rounds) for name, batch in FORMS.items()}
    lines = [("form of a batch of 64 blocks", "CPU, us", "times", f"at most {BAR}")]
    for name, figure in taken.items():
        ratio = figure / taken["plain"]
        lines.append((name, f"{figure:.1f}", f"{ratio:.2f}", "yes" if ratio <= BAR else "no"))
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
