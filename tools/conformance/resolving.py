"""Compares decoders and resolvers with those of another tree, over recorded and random frames, by digests.

    python -m tools.conformance.resolving [--events 1000000] [--seed 1] [--beside TREE]

A session is one publisher with a random registration, and with frames as its kind sends them: valid, unusual and broken
ones. Every part, count, flag and plan goes into the digest of its session. ``TREE`` is another checkout, with its C
module built. The program ends with code 1 if a session differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgpack

from waymark.base import native
from waymark.base.errors import Undecodable
from waymark.domain.engines import EngineKind
from waymark.domain.generations import BlockBounds
from waymark.domain.held import HeldBlocks
from waymark.domain.names import Registration
from waymark.domain.resolver import UNTRUSTED, Resolver
from waymark.domain.slices import finish
from waymark.engines import Ceilings, decoder

SEED: Final = 1337
BLOCK_SIZE: Final = 4
FRAMES: Final = 120
"""The number of frames of one random session."""
FIXTURES: Final = Path(__file__).resolve().parents[2] / "tests/fixtures"
MEDIA: Final = [None, "GPU", "GPU", "GPU", "CPU", "CPU", "DISK", "cpu_pinned", "NVME", "nfs"]
KINDS: Final = [EngineKind.VLLM] * 4 + [EngineKind.SGLANG] * 3 + [EngineKind.MOONCAKE] * 2 + [EngineKind.STANDARD]


# ---- frames ----------------------------------------------------------------------------------------


class Frames:
    """The random frames of one publisher."""

    def __init__(self, dice: random.Random, of: Registration) -> None:
        self._dice = dice
        self._kind, self._is_shared = of.kind, of.scope == "shared"
        self._hybrid = dice.random() < 0.4
        self._salted = dice.random() < 0.5
        self._origins = dice.random() < 0.4
        self._counts = dice.random() < 0.2
        self._tidy = dice.random() < 0.5
        self._prompts = [[dice.randrange(40) for _ in range(dice.randint(4, 40))] for _ in range(8)]
        for prompt in self._prompts[1:]:
            common = dice.randrange(len(prompt))
            prompt[:common] = self._prompts[0][:common]
        self._event_ids: Counter[tuple[Any, ...]] = Counter()
        self._release = dice.randint(5, 12)

    def frame(self) -> bytes:
        dice = self._dice
        if dice.random() < 0.01:
            return dice.choice([b"", b"\xc1", msgpack.packb([1.0, None]), msgpack.packb({}), dice.randbytes(20)])
        count = 1 if dice.random() < 0.3 else dice.randint(1, 12)
        events = [self._event() for _ in range(count)]
        head: list[Any] = [dice.choice([1.5, None, 10**12]), events]
        head += dice.choice([[], [0], [0], [0], [1], ["x"], [0, bytes(range(16))]])
        payload: bytes = msgpack.packb(head)
        if dice.random() < 0.02:
            at = dice.randrange(len(payload))
            payload = payload[:at] + bytes([dice.randrange(256)]) + payload[at + 1 :]
        return payload

    def _event(self) -> Any:
        dice = self._dice
        is_standard = self._kind is EngineKind.STANDARD or (self._kind is EngineKind.MOONCAKE and dice.random() < 0.7)
        event = self._standard() if is_standard else self._of_engine()
        if dice.random() < 0.01 and isinstance(event, dict):
            event[dice.choice(list(event))] = dice.choice([None, "x", -1, [], 2**70 % 2**64, [1, "a"], {}])
        return event

    def _run(self) -> tuple[list[int], int | None, list[int]]:
        """Return consecutive blocks of a prompt: their hashes, the hash of the block before them, and their tokens."""
        dice = self._dice
        prompt = dice.choice(self._prompts)
        start = 0 if dice.random() < 0.4 else dice.randrange(len(prompt))
        end = dice.randint(start + 1, min(len(prompt), start + dice.choice([1, 1, 4, 40])))
        named = [self._hash(prompt[: i + 1]) for i in range(start, end)]
        parent = self._hash(prompt[:start]) if start else None
        if not self._tidy and dice.random() < 0.05:
            parent = dice.choice([0, 77, None, named[-1]])
        return named, parent, [letter for letter in prompt[start:end] for _ in range(BLOCK_SIZE)]

    def _hash(self, blocks: list[int]) -> int:
        found = int.from_bytes(blake2b(bytes(blocks), digest_size=8).digest(), "big")
        # An untidy publisher has so few hashes that some stand for two blocks.
        return found if self._tidy else found % 250 + 1

    def _of_engine(self) -> Any:
        dice = self._dice
        kind = dice.choices(
            ["store", "remove", "place", "chunk", "window", "clear", "unknown"], [50, 30, 10, 4, 8, 1, 1]
        )[0]
        if kind == "clear":
            return dice.choice([["AllBlocksCleared"], {"type": "AllBlocksCleared"}])
        if kind == "unknown":
            return dice.choice([["Other"], {"type": "Other"}, 7, [], None])
        hashes, parent, tokens = self._run()
        medium = dice.choice(MEDIA) if dice.random() < 0.4 else "GPU"
        if kind == "remove":
            return self._removal(hashes, medium)
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": None,
            "group_idx": 0 if self._hybrid else None,
            "kv_cache_spec_kind": "full_attention" if self._hybrid else None,
            "kv_cache_spec_sliding_window": None,
        }
        if kind == "place":
            event |= {"token_ids": [], "block_size": dice.choice([0, 0, BLOCK_SIZE, 8]), "parent_block_hash": None}
        if kind == "chunk":
            size = dice.choice([2, 3, 2, 200])
            event |= {"block_hashes": hashes[size - 1 :: size] or hashes[:1], "block_size": BLOCK_SIZE * size}
            event["medium"] = dice.choice(["CPU", "CPU", "GPU", "DISK"])
            event["token_ids"] = tokens[: len(event["block_hashes"]) * size * BLOCK_SIZE]
            if dice.random() < 0.2:
                event["block_size"] = 2
        if kind == "window" and self._hybrid:
            event |= {
                "group_idx": dice.choice([1, 1, 2, 0]),
                "kv_cache_spec_kind": dice.choice(["sliding_window", "mamba", "sliding_window", "chunked_local"]),
                "kv_cache_spec_sliding_window": dice.choice([8, 8, 16, None]),
            }
            if dice.random() < 0.3 and not self._is_shared:
                event |= {"token_ids": [], "block_size": dice.choice([0, BLOCK_SIZE])}
        self._add_names(event)
        if dice.random() < 0.1:
            event["token_ids"] = event["token_ids"][: dice.randrange(len(tokens) + 1)]
        if dice.random() < 0.02:
            event["token_ids"] = event["token_ids"] + [1]
        if dice.random() < 0.2:
            return self._as_list(event)
        if self._origins:
            event["origin"] = dice.choice(["NEW", "REUSED", "NEW", None])
        if self._kind is EngineKind.SGLANG and dice.random() < 0.3:
            event["component_types"] = dice.choice([["FULL"], ["FULL", "MAMBA"], ["MAMBA"], ["SWA"]])
        return event

    def _add_names(self, event: dict[str, Any]) -> None:
        dice, count = self._dice, len(event["block_hashes"])
        if self._salted and dice.random() < 0.15:
            event["cache_salt"] = dice.choice(["s", "t", ""])
        if self._salted and dice.random() < 0.1:
            event["extra_keys"] = dice.choice([[["s"]] + [None] * (count - 1), [None] * count, [["img", 3]] * count])
        if dice.random() < 0.1:
            event |= dice.choice([{"lora_name": "a"}, {"lora_id": 3}, {"lora_name": "b"}])

    def _as_list(self, event: dict[str, Any]) -> list[Any]:
        fields = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
        fields += ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
        return [event["type"], *(event[field] for field in fields[: self._release - 1])]

    def _removal(self, hashes: list[int], medium: str | None) -> Any:
        dice = self._dice
        hashes = dice.sample(hashes, dice.randint(1, len(hashes)))
        if dice.random() < 0.3:
            return ["BlockRemoved", hashes, medium][: dice.choice([2, 3, 3])]
        event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        if self._hybrid and dice.random() < 0.6:
            event["group_idx"] = dice.choice([0, 0, 1, 2])
        if self._counts:
            event["remaining_copy_counts"] = [dice.choice([0, 0, 1, 2]) for _ in hashes]
        return event

    def _standard(self) -> Any:
        dice = self._dice
        hashes, parent, tokens = self._run()
        stream: dict[str, Any] = {"backend_id": "pod-1", "medium": dice.choice(["DISK", "NVME", "CPU", "GPU"])}
        nothing: dict[str, Any] = {}
        stream |= dice.choice([nothing, nothing, {"lora_name": "a"}, {"additional_salt": "s"}, {"dp_rank": 1}])
        stream |= dice.choice([nothing] * 9 + [{"tenant_id": "other"}, {"model_name": "other"}, {"block_size": 8}])
        name = tuple(sorted((key, str(value)) for key, value in stream.items()))
        self._event_ids[name] += dice.choice([1] * 20 + [0, 2])
        event: dict[str, Any] = {"event_id": self._event_ids[name], **stream}
        kind = dice.choices(["stored", "removed", "cleared"], [60, 38, 1])[0]
        event["event_type"] = kind
        if kind == "cleared":
            return event
        event["seq_hashes"] = hashes
        if kind == "stored":
            event |= dice.choice([{"parent_hash": parent}, {"base_block_idx": 0 if parent is None else 5}])
        if dice.random() < 0.3:
            event["token_ids"] = tokens
            event["parent_hash"] = parent
        if self._kind is EngineKind.MOONCAKE and dice.random() < 0.6:
            hexed = f"{hashes[0]:016x}"
            keys = [f"m@tp_rank:{dice.randrange(2)}@{hexed}", f"m@tp_rank:0@group:1@{hexed}", "m@odd", hexed * 4]
            event |= {"seq_hashes": [], "object_key": dice.choices(keys, [12, 1, 1, 2])[0]}
        return event


def registration(dice: random.Random, kind: EngineKind) -> Registration:
    traits = kind.traits
    return Registration(
        kind=kind,
        instance_id="pod-1",
        tenant_id="default",
        dp_rank=0,
        model_name="m",
        block_size=BLOCK_SIZE,
        endpoint="tcp://10.0.0.1:5557",
        replay_endpoint=None,
        lora_name=dice.choice([None, None, None, "r"]),
        additional_salt=dice.choice([None, None, None, "salt"]),
        scope=dice.choice([traits.scope] * 4 + ["instance", "shared"]),
        copies=dice.choice([traits.copies] * 4 + ["count", "set"]),
        sequence="publisher",
        object_shards=dice.choice([0, 0, 1, 2]),
    )


# ---- a session -------------------------------------------------------------------------------------


class Session:
    """A stream that is resolved as in a worker, without Redis; ``digest`` covers the whole output."""

    def __init__(self, of: Registration, ceilings: Ceilings, **options: Any) -> None:
        self.digest = blake2b(digest_size=8)
        self.events = 0
        self._of, self._options = of, options
        self._decode = decoder(of.kind, seed=SEED, ceilings=ceilings)
        self.resolver = self._resolver()
        # The engines in front of a pool, whose blocks the pool names by hash alone.
        engine = Registration(
            **{f: getattr(of, f) for f in of.__slots__} | {"kind": EngineKind.VLLM, "scope": "instance"}
        )
        self._engine = Resolver(engine, 2, seed=SEED, blocks_max=10_000, waiting_blocks=50)
        self._newest = self._seq = 0

    def _resolver(self) -> Resolver:
        return Resolver(self._of, 1, seed=SEED, memory=HeldBlocks(), **self._options)

    def decode(self, payload: bytes) -> Any:
        try:
            batch = self._decode(payload)
        except Undecodable as bad:
            self._note("undecodable", str(bad))
            return None
        kinds = Counter(_kind(event) for event in batch.events)
        self.events += len(batch.events)
        about = batch.ts, batch.dp_rank, batch.publisher_id, batch.clears_device
        self._note(about, sorted(kinds.items()), sorted(batch.rejected.items()), sorted(batch.ignored.items()))
        return batch

    def fold(self, batches: Sequence[Any], payloads: Sequence[bytes]) -> None:
        resolver = self.resolver
        if resolver.registration.scope == "shared":
            self._fold_of(self._engine, batches, [], is_noted=False)
            hashes = finish(resolver.hashes_to_find(batches))
            resolver.reported = self._engine.spots_of(0, [each for each in hashes if each % 2])
        self._fold_of(resolver, batches, payloads, is_noted=True)
        if resolver.registration.scope == "shared" and self._seq % 7 == 0:
            resolver.reported = self._engine.spots_of(0, finish(resolver.hashes_to_find([])))
            resolver.placer.begin_fold()
            self._note_parts(finish(resolver.resolve_waiting(self._seq + 1)))

    def _joined(self, batches: Sequence[Any], payloads: Sequence[bytes]) -> list[tuple[int, Any]]:
        """Return the batches with their seqs. In a tree that supports it, one batch stands for as many frames as
        possible."""
        joined: list[tuple[int, Any]] = []
        at = 0
        while at < len(batches):
            batch, seq = batches[at], self._seq + 1 + at
            if payloads and getattr(self.resolver, "takes_frames", False):
                batch = self._decode.go_on(batch, payloads[at + 1 :], 10**6)
            joined.append((seq, batch))
            at += getattr(batch, "frames", 1)
        return joined

    def _fold_of(
        self, resolver: Resolver, batches: Sequence[Any], payloads: Sequence[bytes], *, is_noted: bool
    ) -> None:
        fold = self._joined(batches, payloads)
        plan = finish(resolver.plan([batch for _, batch in fold]))
        if is_noted:
            self._note(list(map(str, plan.ended)), list(map(str, plan.begun)), plan.facts_changed, plan.gaps)
            self._note([sorted((str(name), at) for name, at in each.items()) for each in plan.epochs])
        for unit in plan.ended:
            self._note(resolver.end(unit))
        if plan.begun:
            ids = range(self._newest + 1, self._newest + 1 + len(plan.begun))
            self._newest += len(ids)
            resolver.begin(list(plan.begun), ids)
        if is_noted:
            self._note([str(resolver.name_of(batch, event)) for batch in batches for event in batch.events[:3]])
        parts = _resolved(resolver, plan, fold)
        if is_noted:
            self._seq += len(batches)
            self._note_parts(parts)
            self._note_state(resolver)
        else:
            resolver.doubts.clear()

    def _note_parts(self, parts: Iterable[Any]) -> None:
        for part in parts:
            place = part.place, part.namespace, part.slots, part.packed_hashes, part.copies, part.waits
            self._note(part.kind, part.holder, part.seq, part.last, part.is_known, part.is_identity, part.parent, place)

    def _note_state(self, resolver: Resolver) -> None:
        counts = resolver.unresolved, resolver.missing, resolver.unknown, resolver.below_zero, resolver.contradictions
        more = resolver.unsalted, resolver.waiting.blocks, resolver.waiting.dropped, len(resolver.objects)
        self._note(counts, more, sorted(resolver.ignored.items()), sorted(resolver.flags), resolver.main_group)
        self._note(
            sorted(resolver.doubts), sorted(resolver.take_event_ids().items()), sorted(resolver.event_ids.items())
        )
        mode: Any = resolver.mode
        # In an older tree ``mode`` takes the holder.
        mode = mode(0) if signature(mode).parameters else mode()
        self._note(sorted((str(name), holder, mode) for name, holder in resolver.holders.items()))
        resolver.flags.update(resolver.doubts)
        resolver.doubts.clear()
        self._note([resolver.memory.blocks_of(holder) for holder in resolver.holders.values()])

    def disturb(self, dice: random.Random) -> None:
        """Disturb the stream with something other than a frame."""
        resolver = self.resolver
        event = dice.choice(["life", "untrusted", "over", "takeover", "missing"])
        if event == "life":
            self._note(resolver.end("*"))
        elif event == "untrusted":
            resolver.flags.add(UNTRUSTED)
        elif event == "missing":
            resolver.missing += 5
        elif event == "over":
            resolver.generations.now += 40_000
            for name, _ in resolver.over():
                if name in resolver.holders:
                    self._note(str(name), resolver.end(name))
        else:
            self.resolver = self._resolver()
            self.resolver.resume(resolver.holders, frozenset(resolver.flags), resolver.main_group, resolver.event_ids)

    def _note(self, *what: Any) -> None:
        self.digest.update(repr(what).encode())


def _resolved(resolver: Any, plan: Any, fold: Sequence[tuple[int, Any]]) -> Sequence[Any]:
    """Resolve a fold. The resolver of an older tree takes one batch at a time."""
    if "fold" in signature(resolver.resolve).parameters:
        return finish(resolver.resolve(plan, fold))
    return [part for i, (seq, batch) in enumerate(fold) for part in finish(resolver.resolve(plan, i, seq, batch))]


def _kind(event: object) -> str:
    """Return the kind of an event; the names of the classes differ between trees."""
    return next(kind for kind in ("Stored", "Removed", "Cleared") if type(event).__name__.startswith(kind))


def random_session(seed: int) -> tuple[str, int]:
    dice = random.Random(seed)
    kind = dice.choice(KINDS)
    native.select(dice.random() < 0.7)
    ceilings = dice.choice([Ceilings(), Ceilings(), Ceilings(event_hashes=30), Ceilings(rejected_events=2)])
    of = registration(dice, kind)
    session = Session(
        of,
        ceilings,
        blocks_max=dice.choice([10_000, 10_000, 200]),
        waiting_blocks=dice.choice([50, 8]),
        shards=dice.choice([1, 4]),
        registered_ranks=frozenset(dice.choice([[], [], [0, 1]])),
        bounds=dice.choice([BlockBounds(), BlockBounds(), BlockBounds(100, 60, {"DISK": 30})]),
        reads_windows=dice.random() < 0.7,
    )
    frames = Frames(dice, of)
    fold: list[Any] = []
    payloads: list[bytes] = []
    for _ in range(FRAMES):
        payload = frames.frame()
        if (batch := session.decode(payload)) is not None:
            fold.append(batch)
            payloads.append(payload)
        if fold and (len(fold) == 3 or dice.random() < 0.5):
            session.fold(fold, payloads)
            fold, payloads = [], []
        if dice.random() < 0.01:
            session.disturb(dice)
    return session.digest.hexdigest(), session.events


# ---- recorded sessions -----------------------------------------------------------------------------


def recorded() -> Iterator[tuple[str, list[bytes]]]:
    """Yield the name and the payloads of each recorded session."""
    for path in sorted(FIXTURES.glob("wire/*.json")):
        told = json.loads(path.read_bytes())
        payloads = [bytes.fromhex(each["payload_hex"]) for each in (told.get("frames") or told["payloads"])]
        yield path.name, payloads
    for path in sorted(FIXTURES.glob("engines/*hybrid.msgpack.gz")):
        yield path.name, list(_payloads(msgpack.unpackb(gzip.decompress(path.read_bytes()), strict_map_key=False)))


def _payloads(value: Any) -> Iterator[bytes]:
    """Yield every binary value in a recording, in order. These are its frames."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _payloads(each)


def recorded_sessions() -> Iterator[tuple[str, str, int]]:
    for name, payloads in recorded():
        for kind in (EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOONCAKE):
            for block_size in (4, 16):
                for is_native in (True, False):
                    native.select(is_native)
                    of = registration(random.Random(0), kind)
                    fields = {f: getattr(of, f) for f in of.__slots__} | {"block_size": block_size}
                    session = Session(
                        Registration(**fields),
                        Ceilings(),
                        blocks_max=10_000,
                        waiting_blocks=50,
                        reads_windows=is_native,
                    )
                    for payload in payloads:
                        if (batch := session.decode(payload)) is not None:
                            session.fold([batch], [payload])
                    label = f"{name} {kind} {block_size} {'C' if is_native else 'Python'}"
                    yield label, session.digest.hexdigest(), session.events


def sessions(seed: int, events: int) -> Iterator[tuple[str, str, int]]:
    """Yield the name, the digest and the number of events of each session, until there have been ``events`` events."""
    done = 0
    for found in recorded_sessions():
        done += found[2]
        yield found
    while done < events:
        digest, count = random_session(seed)
        done += count
        yield f"seed {seed}", digest, count
        seed += 1


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="another checkout")
    options = parser.parse_args(words)
    if options.beside is not None:
        return compare(options.seed, options.events, options.beside)
    for name, digest, events in sessions(options.seed, options.events):
        print(digest, events, name, flush=True)
    return 0


def compare(seed: int, events: int, beside: Path) -> int:
    """Print the sessions whose results differ in the other tree. Return 1 if there are any."""
    here, there = (_lines_of(tree, seed, events) for tree in (FIXTURES.parents[1], beside))
    count = done = differing = 0
    for one, other in zip_longest(here, there, fillvalue=""):
        count += 1
        done += int((one or other).split()[1])
        if one != other:
            differing += 1
            print(f"here: {one}; beside: {other}")
    print(f"{done} events in {count} sessions, {differing} differing")
    return int(differing > 0)


def _lines_of(tree: Path, seed: int, events: int) -> Iterator[str]:
    """Yield the output of this program with the modules of a tree. The hash seed is fixed, so that sets have the same
    order.
    """
    path = os.pathsep.join([str(tree / "app"), str(tree)])
    call = [sys.executable, __file__, f"--events={events}", f"--seed={seed}"]
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    running = subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, text=True)
    with running:
        assert running.stdout is not None
        yield from (line.rstrip("\n") for line in running.stdout)
    if running.returncode:
        raise SystemExit(f"it fails in {tree}")


if __name__ == "__main__":
    sys.exit(main())
