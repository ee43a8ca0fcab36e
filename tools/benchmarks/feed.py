"""Engines as an indexer sees them: sockets that publish stores to all subscribers, as vLLM does."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import msgpack
import zmq

from tools.benchmarks import prompts
from tools.benchmarks.processes import Server, wait_until
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, PIECE_BLOCKS, PIECE_TOKENS, Prompt

STORE_BLOCKS = 64
PUBLISHER_ID = bytes(range(16))


def stored(block_hashes: Sequence[int], parent: int | None, token_ids: Sequence[int], rank: int = 0) -> bytes:
    """Return the payload of a batch with one store, in vLLM's form."""
    return _batch(_stored(block_hashes, parent, token_ids), rank=rank)


def decoded(steps: Sequence[tuple[int, int | None, Sequence[int]]], rank: int = 0) -> bytes:
    """Return the payload of one decode step of an engine: a store of one block for each sequence that completed a
    block.

    An element of ``steps`` is ``(engine hash, engine hash of the parent or None, token ids of the block)``.
    """
    return _batch(*(_stored([block_hash], parent, token_ids) for block_hash, parent, token_ids in steps), rank=rank)


def _stored(block_hashes: Sequence[int], parent: int | None, token_ids: Sequence[int]) -> Mapping[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(block_hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": BLOCK_SIZE,
        "medium": "GPU",
        "extra_keys": [None] * len(block_hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(block_hashes: Sequence[int], rank: int = 0) -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": list(block_hashes), "medium": "GPU", "group_idx": 0}
    return _batch(event, rank=rank)


def heartbeat(rank: int = 0) -> bytes:
    """Return the payload of a batch without events, which shows that the engine is alive."""
    return _batch(rank=rank)


def as_new_release(payload: bytes) -> bytes:
    """Return the same batch in the form of newer releases, which add the publishing process and the location of the
    blocks."""
    ts, events, rank = msgpack.unpackb(payload)
    told: bytes = msgpack.packb([ts, [event | {"locality": "LOCAL"} for event in events], rank, PUBLISHER_ID])
    return told


def cleared() -> bytes:
    return _batch({"type": "AllBlocksCleared"})


def _batch(*events: Mapping[str, object], rank: int = 0) -> bytes:
    payload: bytes = msgpack.packb([time.time(), list(events), rank])
    return payload


class Publisher:
    """One engine's socket. It has no bound on waiting batches, so it loses none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int) -> None:
        self.number = number
        self.seq = 0
        self.held: set[int] = set()
        """Numbers of the pieces it has stored."""
        self._socket = context.socket(zmq.XPUB)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.XPUB_VERBOSE, 1)  # report the second subscriber, too
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._subscribers = 0

    def has_subscriber(self) -> bool:
        """Return whether a client has subscribed since this last returned True."""
        while self._socket.poll(0):
            self._subscribers += self._socket.recv()[:1] == b"\x01"
        if self._subscribers:
            self._subscribers -= 1
            return True
        return False

    def register(self, *servers: Server) -> None:
        """Register with each server, and wait until the server has subscribed."""
        for server in servers:
            server.post(
                f"{server.prefix}/register",
                instance_id=self.number,
                model_name=MODEL,
                block_size=BLOCK_SIZE,
                endpoint=self.endpoint,
                dp_rank=0,
            )
            wait_until(self.has_subscriber, f"{server.name} has subscribed to a publisher")

    def send(self, payload: bytes) -> None:
        self._socket.send_multipart((b"", struct.pack(">Q", self.seq), payload))
        self.seq += 1

    def store(self, prompt: Prompt, store_blocks: int = STORE_BLOCKS) -> int:
        """Store the missing blocks of a prompt. Return how many were new."""
        new = [number for number in prompt if number not in self.held]
        self.held.update(new)
        for payload in payloads(prompt, len(prompt) - len(new), store_blocks):
            self.send(payload)
        return len(new) * PIECE_BLOCKS

    def close(self) -> None:
        self._socket.close()


def payloads(prompt: Prompt, held: int = 0, store_blocks: int = STORE_BLOCKS, rank: int = 0) -> Iterator[bytes]:
    """Yield the stores of a prompt's pieces, without the first ``held`` pieces."""
    hashes = list(chain.from_iterable(map(prompts.engine_hashes, prompt)))
    token_ids = prompts.tokens(prompt[held:])
    first = held * PIECE_BLOCKS
    for start in range(first, len(hashes), store_blocks):
        of_event = hashes[start : start + store_blocks]
        at = (start - first) * BLOCK_SIZE
        parent = hashes[start - 1] if start else None
        yield stored(of_event, parent, token_ids[at : at + len(of_event) * BLOCK_SIZE], rank)


@contextmanager
def publishers(count: int, first: int = 1) -> Iterator[list[Publisher]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = [Publisher(context, first + i) for i in range(count)]
    try:
        yield opened
    finally:
        for publisher in opened:
            publisher.close()
        context.term()


def matched(server: Server, prompt: Prompt, instance: int) -> int:
    """Return how many tokens of the prompt an instance has, by the server's answer."""
    answer = server.post(f"{server.prefix}/query", model_name=MODEL, token_ids=prompts.tokens(prompt))
    row = answer["instances"].get(str(instance), {})
    return int(row.get("longest_matched", 0))


def wait_for(servers: Iterable[Server], last: dict[int, Prompt]) -> None:
    """Wait until every server has the last prompt of each publisher, and with it all blocks, because streams are in
    order."""
    for server in servers:
        for instance, prompt in last.items():
            wait_until(
                lambda server=server, prompt=prompt, instance=instance: (  # type: ignore[misc]
                    matched(server, prompt, instance) == len(prompt) * PIECE_TOKENS
                ),
                f"{server.name} has what publisher {instance} stored",
            )
