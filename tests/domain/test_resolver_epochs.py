"""Media that report no removals: their blocks go by time, from one epoch's holder to the next."""

from __future__ import annotations

from tests.domain.index import Index
from tests.factories import cleared, envelope, keys, registration, removed, stored
from waymark.domain.engines import EngineKind


def at(index: Index, **epochs: int) -> None:
    """The time of each medium; what is over ends."""
    for name in index.resolver.at(epochs):
        index.end(name)


def on_disk(index: Index, hashes: list[int]) -> None:
    """An offload says so with a placeholder."""
    index.events(stored(hashes, medium="DISK"))


def test_a_block_goes_one_to_two_epochs_after_it_was_stored() -> None:
    index = Index()
    at(index, DISK=7)
    index.events(stored([1, 2], "AB"))
    on_disk(index, [1, 2])
    at(index, DISK=8)
    assert index.has(*keys("AB"), on="0 DISK")
    on_disk(index, [2])
    at(index, DISK=9)
    assert index.has(keys("AB")[1], on="0 DISK"), "what was stored again stays"
    at(index, DISK=11)
    assert index.has(on="0 DISK")
    assert index.has(*keys("AB")), "other media do not go by time"


def test_an_epoch_is_a_holder_of_its_own_that_begins_with_its_first_block() -> None:
    index = Index()
    at(index, DISK=7)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    at(index, DISK=8)
    assert index.begun == ["0 DISK #7"]
    on_disk(index, [1])
    assert index.begun == ["0 DISK #8"]
    assert list(index.holders) == ["0 GPU", "0 DISK #7", "0 DISK #8"]


def test_what_was_stored_before_there_were_epochs_is_over() -> None:
    index = Index()
    index.events(stored([1], "A"))
    on_disk(index, [1])
    at(index, DISK=7)
    assert index.has(on="0 DISK")


def test_a_removal_takes_the_block_from_every_epoch() -> None:
    index = Index()
    at(index, DISK=7)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    at(index, DISK=8)
    on_disk(index, [1])
    index.events(removed(1, medium="DISK"))
    assert index.has(on="0 DISK")


def test_a_clear_ends_every_epoch() -> None:
    index = Index()
    at(index, DISK=7)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    at(index, DISK=8)
    on_disk(index, [1])
    index.events(cleared())
    assert index.resolver.holders == {}


def test_the_order_of_a_standard_stream_outlives_an_epoch_and_a_clear() -> None:
    index = Index(registration(EngineKind.STANDARD))
    at(index, DISK=7)

    def store(event_id: int) -> None:
        index.events(stored(keys("A"), is_identity=True, medium="DISK", envelope=envelope(event_id)))

    store(5)
    at(index, DISK=8)
    store(6)
    store(5)
    assert index.ignored == {"seen": 1}
    index.events(cleared(medium="DISK", envelope=envelope(7)))
    store(6)
    assert index.ignored == {"seen": 2}
    assert index.has(on="0 DISK")


def test_a_child_with_tokens_finds_a_parent_that_was_told_as_an_identity() -> None:
    index = Index(registration(EngineKind.STANDARD))
    parent = keys("A")[0]
    index.events(stored([parent], is_identity=True, envelope=envelope(1)))
    index.events(stored([50], "B", parent=parent, envelope=envelope(2)))
    assert index.has(*keys("AB"))


def test_stores_that_could_not_have_told_a_salt_are_counted() -> None:
    index = Index()
    index.events(stored([1], "A"), stored([2], "B", tells_salts=False))
    assert index.resolver.unsalted == 1
