"""Standard events: hashes that are the identity, hashes that are the publisher's own, and their event_id."""

from __future__ import annotations

from typing import Any

import pytest

from tests.domain.index import Index
from tests.factories import envelope, keys, registration, removed, stored
from waymark.domain.engines import EngineKind
from waymark.domain.events import RemovalEvent, StoreEvent
from waymark.domain.hashing import namespace
from waymark.domain.rows import Place


@pytest.fixture
def index() -> Index:
    return Index(registration(EngineKind.STANDARD))


def identity(
    event_id: int, *seq_hashes: int, parent: int | None = None, medium: str = "GPU", **names: Any
) -> StoreEvent:
    """Blocks by their seq_hashes; ``names`` are those of the envelope."""
    return stored(seq_hashes, parent=parent, medium=medium, envelope=envelope(event_id, **names))


def gone(event_id: int, *hashes: int, **names: Any) -> RemovalEvent:
    return removed(*hashes, envelope=envelope(event_id, **names))


def test_hashes_without_tokens_are_the_blocks_themselves(index: Index) -> None:
    index.events(identity(1, *keys("AB")))
    assert index.has(*keys("AB"))
    assert index.parts[0].is_identity
    index.events(gone(2, keys("AB")[0]))
    assert index.has(keys("AB")[1])


def test_in_a_namespace_they_are_found_by_its_key(index: Index) -> None:
    ns = namespace("x", ["s"])
    index.events(identity(1, *keys("AB"), adapter="x", salts=("s",)))
    assert index.has(*keys("AB", ns=ns))
    index.events(gone(2, keys("AB")[0], adapter="x", salts=("s",)))
    assert index.has(keys("AB", ns=ns)[1])


def test_the_envelopes_salt_wins_over_the_registrations() -> None:
    index = Index(registration(EngineKind.STANDARD, additional_salt="r"))
    index.events(identity(1, *keys("A")), identity(1, *keys("B"), salts=("s",)), stored([3], "C", envelope=envelope(2)))
    r, s = namespace(None, ["r"]), namespace(None, ["s"])
    assert index.has(*keys("A", ns=r), *keys("B", ns=s), *keys("C", ns=r))


def test_an_identity_never_waits_for_its_parent(index: Index) -> None:
    index.events(identity(1, keys("AB")[1], parent=keys("A")[0]))
    assert index.has(keys("AB")[1])


def test_with_tokens_the_hashes_are_the_publishers_own(index: Index) -> None:
    index.events(
        stored([1, 2], "AB", envelope=envelope(1)),
        stored([3], "C", parent=2, envelope=envelope(2)),
        stored([9], "Z", parent=8, envelope=envelope(3)),
    )
    assert index.has(*keys("ABC"))
    assert index.resolver.waiting.blocks == 1


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_block_goes_to_the_row_of_its_own_namespace_whoever_has_its_parent(
    index: Index, medium: str, is_gone: bool
) -> None:
    """A seq_hash is the same in all namespaces, and a row is not."""
    a, b, c = keys("ABC")
    ns = namespace("x", [])
    index.events(identity(1, a, b))
    if is_gone:
        index.events(gone(2, a, b))
    index.events(identity(1, c, parent=b, adapter="x", medium=medium))
    (part,) = index.parts
    assert (part.place, part.keys, part.depths, part.parent) == (Place(a ^ ns), [c ^ ns], [2], b ^ ns)


def test_an_own_hash_that_is_the_seq_hash_of_another_block_is_not_its_place(index: Index) -> None:
    a, b = keys("AB")
    index.events(stored([a], "Z", envelope=envelope(1)))
    index.events(identity(2, b, parent=a))
    (part,) = index.parts
    assert part.place == Place(b, is_single=True)


@pytest.mark.parametrize("take_over", [False, True])
def test_own_hashes_are_removed_by_what_they_stand_for(index: Index, take_over: bool) -> None:
    index.events(stored([1, 2], "AB", envelope=envelope(1)))
    if take_over:
        index.take_over()
    index.events(gone(2, 1))
    assert index.has(keys("AB")[1])


def test_beside_own_hashes_a_seq_hash_can_still_be_removed(index: Index) -> None:
    index.events(identity(1, *keys("A")), stored([1], "B", envelope=envelope(2)))
    index.events(gone(3, 1, *keys("A")))
    assert index.has()


def test_a_removal_of_own_hashes_has_the_positions_of_its_hashes(index: Index) -> None:
    index.events(stored([1, 2], "AB", envelope=envelope(1)))
    index.events(gone(2, 7, 2), gone(3, 1))
    assert index.positions == [("-", 2, [2, 1])]
    assert index.has()


def test_streams_of_the_envelope_are_apart(index: Index) -> None:
    index.events(identity(1, *keys("A")), identity(1, *keys("A"), adapter="x"), identity(1, *keys("A"), medium="CPU"))
    index.events(stored(keys("A"), envelope=envelope(1, backend_id="b", dp_rank=2)))
    assert len(index.resolver.holders) == 4
    assert index.has(*keys("A"), *keys("A", ns=namespace("x", [])))
    assert index.has(*keys("A"), on="2 GPU")
    assert index.plan.begun[next(name for name in index.resolver.holders if name.dp_rank == 2)].backend_id == "b"


def test_an_event_that_came_before_is_dropped(index: Index) -> None:
    index.events(identity(5, *keys("A")), identity(5, *keys("B")), gone(4, *keys("A")))
    assert index.has(*keys("A"))
    assert index.ignored == {"seen": 2}
    index.take_over()
    index.events(gone(5, *keys("A")), identity(6, *keys("C")))
    assert index.has(*keys("A"), *keys("C"))


def test_event_ids_are_counted_per_stream_and_life(index: Index) -> None:
    index.events(identity(5, *keys("A")), identity(3, *keys("A"), medium="CPU"))
    index.end("*")
    index.events(identity(0, *keys("B")))
    assert index.has(*keys("B"))
    assert index.ignored == {}


@pytest.mark.parametrize(
    ("strange", "reason"),
    [
        ({"tenant_id": "t"}, "other_tenant"),
        ({"model_name": "n"}, "other_model"),
        ({"block_size": 8}, "block_size_mismatch"),
    ],
)
def test_another_tenant_model_or_block_size_is_counted(index: Index, strange: dict[str, Any], reason: str) -> None:
    index.events(stored(keys("A"), envelope=envelope(1, **strange)))
    assert index.resolver.holders == {}
    assert index.ignored == {reason: 1}
    index.events(stored(keys("A"), envelope=envelope(1, model_name="m", block_size=4)))
    assert index.has(*keys("A"))


def test_copies_are_not_counted_unless_the_registration_says_so() -> None:
    for copies, left in (("set", 0), ("count", 1)):
        index = Index(registration(EngineKind.STANDARD, copies=copies))
        index.events(identity(1, *keys("A")), identity(2, *keys("A")), gone(3, *keys("A")))
        assert sum(index.held().values()) == left


def test_a_child_with_tokens_finds_a_parent_that_was_told_as_an_identity() -> None:
    index = Index(registration(EngineKind.STANDARD))
    parent = keys("A")[0]
    index.events(stored([parent], envelope=envelope(1)))
    index.events(stored([50], "B", parent=parent, envelope=envelope(2)))
    assert index.has(*keys("AB"))
