"""The simulated prefix cache: its events are the whole truth about what it holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import examples
from waymark.base.errors import InvalidValue
from waymark.domain.hashing import extend, extra_digest, token_bytes
from waymark.simulator import cache as cache_module
from waymark.simulator.cache import Prefix, PrefixCache
from waymark.simulator.encode import CPU, DISK, GPU, AllBlocksCleared, BlockRemoved, BlockStored, WireEvent
from waymark.simulator.workload import SimulatedPrompt

BLOCK = 4
IMAGE = (("ab" * 8, 0),)


class Listener:
    """What a listener can know from events alone: copies by hash, and each hash's prefix."""

    def __init__(self) -> None:
        self.copies: dict[str, Counter[int]] = defaultdict(Counter)
        self.prefixes: dict[int, Prefix] = {}
        self.parents: dict[int, int] = {}
        self.early: list[int] = []
        """Hashes that went from a medium before a child of theirs did."""

    def hear(self, events: Iterable[WireEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(self.copies[event.medium or GPU], event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.copies.clear()

    def _stored(self, event: BlockStored) -> None:
        self.copies[event.medium].update(event.block_hashes)
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        parent = event.parent_block_hash
        for i, each in enumerate(event.block_hashes if event.token_ids else ()):
            above = ((), event.lora_name, event.cache_salt, ()) if parent is None else self.prefixes[parent]
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            extra = event.extra_keys[i] if event.extra_keys else None
            self.prefixes[each] = Prefix(above[0] + tokens, above[1], above[2], (*above[3], extra))
            if parent is not None:
                self.parents[each] = parent
            parent = each

    def _removed(self, here: Counter[int], hashes: Sequence[int]) -> None:
        for each in hashes:
            assert here[each] > 0, "removed more often than stored"
            here[each] -= 1
            if not here[each]:
                del here[each]
        still_parents = {self.parents.get(each) for each in here}
        self.early += [each for each in hashes if each not in here and each in still_parents]

    def contents(self) -> dict[str, frozenset[Prefix]]:
        return {
            medium: frozenset(self.prefixes[each] for each in counts)
            for medium, counts in self.copies.items()
            if counts
        }


def prompts() -> st.SearchStrategy[SimulatedPrompt]:
    """Prompts over a tiny alphabet of blocks, so that prefixes meet; some not a multiple of a block."""
    blocks = st.lists(st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)]), max_size=7)
    tails = st.integers(min_value=0, max_value=BLOCK - 1)
    return st.builds(
        lambda blocks, tail, lora, salt, images: SimulatedPrompt(
            tuple(token for block in blocks for token in block) + (9,) * tail, lora, salt, images
        ),
        blocks,
        tails,
        st.sampled_from([None, None, "sql"]),
        st.sampled_from([None, None, "tenant-a"]),
        st.sampled_from([None, None, (None, IMAGE)]),
    )


def run(cache: PrefixCache, prompt: SimulatedPrompt) -> list[WireEvent]:
    return cache.prefill(prompt.tokens, prompt.lora_name, prompt.cache_salt, prompt.extras)


def held(cache: PrefixCache, prompt: SimulatedPrompt) -> list[frozenset[str]]:
    return cache.held(prompt.tokens, prompt.lora_name, prompt.cache_salt, prompt.extras)


def held_by_hand(contents: dict[str, frozenset[Prefix]], prompt: SimulatedPrompt) -> list[frozenset[str]]:
    media: list[frozenset[str]] = []
    for end in range(1, len(prompt.tokens) // BLOCK + 1):
        extras = tuple((prompt.extras or ())[i] if i < len(prompt.extras or ()) else None for i in range(end))
        prefix = Prefix(prompt.tokens[: end * BLOCK], prompt.lora_name, prompt.cache_salt, extras)
        media.append(frozenset(medium for medium, prefixes in contents.items() if prefix in prefixes))
    return media


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    said=st.lists(prompts(), max_size=40),
    sizes=st.sampled_from([(7, 0, 0), (8, 5, 0), (9, 6, 4), (20, 30, 40)]),
    repeat_rate=st.sampled_from([0.0, 0.3, 1.0]),
    is_dense=st.booleans(),
    is_together=st.booleans(),
    seed=st.integers(0, 5),
)
def test_events_with_copies_counted_give_exactly_what_is_held(
    said: list[SimulatedPrompt],
    sizes: tuple[int, int, int],
    repeat_rate: float,
    is_dense: bool,
    is_together: bool,
    seed: int,
) -> None:
    cache = PrefixCache(
        BLOCK, *sizes, seed=seed, repeat_rate=repeat_rate, dense_offload=is_dense, removals_together=is_together
    )
    listener = Listener()
    for prompt in said:
        listener.hear(run(cache, prompt))
        assert {m: c for m, c in listener.copies.items() if c} == {m: c for m, c in cache.copies().items() if c}
        assert sum(cache.copies()[GPU].values()) <= sizes[0]
        assert all(GPU in media for media in held(cache, prompt))
    contents = listener.contents()
    assert contents == {medium: prefixes for medium, prefixes in cache.contents().items() if prefixes}
    for prompt in said:
        assert held(cache, prompt) == held_by_hand(contents, prompt)
    assert not listener.early


def test_a_leaf_goes_before_its_parents_and_the_least_recently_used_one_first() -> None:
    cache = PrefixCache(BLOCK, 4, repeat_rate=0.0)
    old, young = (1,) * 9, (2,) * 9
    names_old = _only_store(cache.prefill(old)).block_hashes
    cache.prefill(young)
    events = cache.prefill((3,) * 5)
    assert events[:-1] == [BlockRemoved((names_old[1],))]
    assert [GPU in media for media in cache.held(old)] == [True, False]
    assert [GPU in media for media in cache.held(young)] == [True, True]


def test_what_was_used_again_stays_longer() -> None:
    cache = PrefixCache(BLOCK, 4, repeat_rate=0.0)
    cache.prefill((1,) * 9)
    cache.prefill((2,) * 9)
    cache.prefill((1,) * 9)
    cache.prefill((2,) * 9)
    cache.prefill((1,) * 9)
    cache.prefill((3,) * 9)
    assert cache.held((1,) * 8) == [frozenset({GPU})] * 2
    assert cache.held((2,) * 8) == [frozenset()] * 2


def test_a_prompt_that_grew_is_kept_whole_while_it_is_read_again() -> None:
    cache = PrefixCache(BLOCK, 7, repeat_rate=0.0)
    grown = (2,) * 4 + (1,) * 12
    for tokens in ((1,) * 4, grown[:12], grown, (1,) * 20):
        cache.prefill(tokens)
    assert cache.held((1,) * 20) == [frozenset({GPU})] * 5
    assert cache.held(grown) == [frozenset({GPU})] * 2 + [frozenset()] * 2


def test_a_block_stays_off_the_cpu_while_it_has_another_copy_on_the_gpu() -> None:
    cache = PrefixCache(BLOCK, 2, 2, repeat_rate=1e-9)
    cache.prefill((1,) * 4)
    cache.prefill((1,) * 4)
    assert [type(event) for event in cache.prefill((2,) * 4)] == [BlockRemoved, BlockStored]
    assert cache.held((1,) * 4) == [frozenset({GPU})]


def test_a_block_that_came_back_to_the_gpu_is_not_stored_on_the_cpu_again() -> None:
    cache = PrefixCache(BLOCK, 1, 2, repeat_rate=0.0)
    for token in (1, 2, 1):
        cache.prefill((token,) * 4)
    assert cache.held((1,) * 4) == [frozenset({GPU, CPU})]
    off_gpu, stored = cache.prefill((2,) * 4)
    assert isinstance(off_gpu, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert cache.copies()[CPU].most_common(1)[0][1] == 1


def test_a_prompt_found_whole_has_its_last_block_stored_twice_and_removed_twice() -> None:
    cache = PrefixCache(BLOCK, 6, repeat_rate=1e-9)
    first = _only_store(cache.prefill((1,) * 12))
    again = _only_store(cache.prefill((1,) * 12))
    assert again.block_hashes == first.block_hashes[2:]
    assert again.parent_block_hash == first.block_hashes[1]
    removals = [e.block_hashes[0] for e in cache.prefill((2,) * 24) if isinstance(e, BlockRemoved)]
    assert Counter(removals) == {first.block_hashes[0]: 1, first.block_hashes[1]: 1, first.block_hashes[2]: 2}


def test_without_repeats_no_block_has_two_copies() -> None:
    cache = PrefixCache(BLOCK, 6, repeat_rate=0.0)
    cache.prefill((1,) * 12)
    assert cache.prefill((1,) * 12) == []


def test_blocks_move_from_gpu_to_cpu_to_disk_as_placeholders() -> None:
    cache = PrefixCache(BLOCK, 1, 1, 1, repeat_rate=0.0)
    a = _only_store(cache.prefill((1,) * 4)).block_hashes
    to_cpu, off_gpu, stored = cache.prefill((2,) * 4)
    assert to_cpu == BlockStored(a, None, (), 0, CPU, kv_cache_spec_kind=None)
    assert off_gpu == BlockRemoved(a, GPU)
    assert isinstance(stored, BlockStored)
    events = cache.prefill((3,) * 4)
    assert [(type(e), e.medium) for e in events if not isinstance(e, AllBlocksCleared) and hasattr(e, "medium")] == [
        (BlockStored, DISK),
        (BlockRemoved, CPU),
        (BlockStored, CPU),
        (BlockRemoved, GPU),
        (BlockStored, GPU),
    ]
    assert [cache.held((n,) * 4)[0] for n in (1, 2, 3)] == [{DISK}, {CPU}, {GPU}]


def test_a_dense_store_off_the_gpu_tells_parent_and_tokens() -> None:
    cache = PrefixCache(BLOCK, 2, 2, repeat_rate=0.0, dense_offload=True)
    names = _only_store(cache.prefill((1,) * 8)).block_hashes
    to_cpu = cache.prefill((2,) * 4)[0]
    assert isinstance(to_cpu, BlockStored)
    assert (to_cpu.block_hashes, to_cpu.parent_block_hash) == (names[1:], names[0])
    assert (to_cpu.token_ids, to_cpu.block_size, to_cpu.medium) == ((1,) * 4, BLOCK, CPU)


def test_removals_of_one_prompt_can_be_one_event() -> None:
    cache = PrefixCache(BLOCK, 3, repeat_rate=0.0, removals_together=True)
    names = _only_store(cache.prefill((1,) * 12)).block_hashes
    assert cache.prefill((2,) * 12)[0] == BlockRemoved(names)


def test_many_removals_of_one_prompt_are_joined_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = 0

    class Counted(BlockRemoved):
        def __init__(self, block_hashes: tuple[int, ...], *others: Any, **fields: Any) -> None:
            nonlocal hashes
            hashes += len(block_hashes)
            super().__init__(block_hashes, *others, **fields)

    monkeypatch.setattr(cache_module, "BlockRemoved", Counted)
    cache = PrefixCache(BLOCK, 500, repeat_rate=0.0, removals_together=True)
    names = _only_store(cache.prefill((1,) * 2000)).block_hashes
    removed = cache.prefill((2,) * 2000)[0]
    assert isinstance(removed, Counted)
    assert removed.block_hashes == names
    assert hashes == 2 * 500, "each hash is in its own removal, and in the one for all"


def test_adapter_salt_image_and_seed_all_change_every_hash() -> None:
    tokens = (1,) * 8
    variants: list[Sequence[int]] = [
        _only_store(PrefixCache(BLOCK, 4, seed=0).prefill(tokens)).block_hashes,
        _only_store(PrefixCache(BLOCK, 4, seed=1).prefill(tokens)).block_hashes,
        _only_store(PrefixCache(BLOCK, 4, seed=0).prefill(tokens, "sql")).block_hashes,
        _only_store(PrefixCache(BLOCK, 4, seed=0).prefill(tokens, None, "tenant-a")).block_hashes,
        _only_store(PrefixCache(BLOCK, 4, seed=0).prefill(tokens, extras=[IMAGE])).block_hashes,
    ]
    assert len({each for hashes in variants for each in hashes}) == 10


def test_a_restart_forgets_everything_and_names_blocks_anew() -> None:
    cache = PrefixCache(BLOCK, 4, 4)
    before = _only_store(cache.prefill((1,) * 8)).block_hashes
    cache.restart()
    assert cache.size() == {GPU: 0, CPU: 0}
    after = _only_store(cache.prefill((1,) * 8)).block_hashes
    assert not set(before) & set(after)


def test_a_clear_is_one_event_and_leaves_nothing() -> None:
    cache = PrefixCache(BLOCK, 4, 4)
    cache.prefill((1,) * 8)
    assert cache.clear() == [AllBlocksCleared()]
    assert cache.held((1,) * 8) == [frozenset(), frozenset()]


def test_standard_hashes_are_the_rolling_hashes_of_the_tokens() -> None:
    cache = PrefixCache(BLOCK, 4, repeat_rate=0.0, standard_hashes=True)
    tokens = tuple(range(1, 9))
    assert list(_only_store(cache.prefill(tokens)).block_hashes) == extend(None, token_bytes(tokens), BLOCK)
    other = _only_store(cache.prefill(tokens, "sql"))
    assert list(other.block_hashes) == extend(None, token_bytes(tokens), BLOCK)
    assert other.lora_name == "sql"
    with_image = _only_store(cache.prefill(tokens, extras=(IMAGE,)))
    digests = [extra_digest([list(item) for item in IMAGE]), None]
    assert list(with_image.block_hashes) == extend(None, token_bytes(tokens), BLOCK, extras=digests)


def test_the_same_seed_tells_the_same_events() -> None:
    said = [SimulatedPrompt((n % 3,) * (4 * (n % 5))) for n in range(60)]
    runs = [
        [run(cache, p) for p in said] for cache in (PrefixCache(BLOCK, 6, 4, seed=3, repeat_rate=0.4) for _ in "ab")
    ]
    assert runs[0] == runs[1]
    other = PrefixCache(BLOCK, 6, 4, seed=4, repeat_rate=0.4)
    assert [run(other, p) for p in said] != runs[0]


def test_a_prompt_larger_than_the_gpu_is_cut() -> None:
    cache = PrefixCache(BLOCK, 2)
    assert len(_only_store(cache.prefill((1,) * 40)).block_hashes) == 2


def test_a_disk_without_a_cpu_tier_is_refused() -> None:
    with pytest.raises(InvalidValue, match="disk_blocks") as caught:
        PrefixCache(BLOCK, 2, 0, 2)
    assert caught.value.field == "disk_blocks"


def _only_store(events: list[WireEvent]) -> BlockStored:
    [store] = [event for event in events if isinstance(event, BlockStored) and event.medium == GPU]
    return store


def test_a_prefix_of_another_engine_is_filled_in_without_a_hit() -> None:
    """The two engines have other hashes for the same blocks."""
    source, new = (PrefixCache(BLOCK, 8, seed=seed, repeat_rate=0.0) for seed in (1, 2))
    (event,) = source.prefill(range(1, 13), cache_salt="s")
    assert isinstance(event, BlockStored)
    prefix = source.prefix(event.block_hashes[1])
    assert prefix is not None
    assert prefix.tokens == tuple(range(1, 9))
    (told,) = new.fill(prefix)
    assert isinstance(told, BlockStored)
    assert (told.token_ids, told.cache_salt) == (tuple(range(1, 9)), "s")
    assert set(told.block_hashes).isdisjoint(event.block_hashes)
    assert new.fill(prefix) == []
    assert new.totals.hit == 0
    assert len(new.prefill(range(1, 13), cache_salt="s")) == 1, "only the last block is computed"
    assert new.totals.hit == 2
    assert source.prefix(7) is None
