"""The least recently used goes first; bounds, times and sizes hold."""

from __future__ import annotations

from waymark.base.bounded_cache import BoundedCache, CacheSize


def test_the_least_recently_used_goes_first() -> None:
    gone: list[int] = []
    cache: BoundedCache[str, int] = BoundedCache(entries_max=2, evicted=lambda: gone.append(1))
    for number, name in enumerate("ab"):
        assert cache.keep(name, number)
    assert cache.find("a") == 0
    cache.keep("c", 2)
    assert [cache.find(name) for name in "abc"] == [0, None, 2]
    assert (len(cache), gone) == (2, [1])
    cache.keep("a", 7)
    assert (cache.find("a"), len(cache), gone) == (7, 2, [1]), "a new value in the place of the old one"


def test_bytes_are_those_of_the_values_and_their_entries() -> None:
    cache: BoundedCache[str, bytes] = BoundedCache(bytes_max=30, size=len, entry_bytes=5)
    assert not cache.keep("a", b"x" * 26)
    assert cache.keep("a", b"x" * 10)
    assert cache.keep("b", b"x" * 10)
    assert cache.held == CacheSize(2, 30)
    assert cache.keep("c", b"")
    assert [cache.find(name) for name in "abc"] == [None, b"x" * 10, b""]
    assert cache.bytes == 20
    assert not cache.keep("b", b"x" * 26), "what does not fit is not kept, nor is the old value"
    assert (cache.find("b"), cache.bytes) == (None, 5)
    assert (cache.pop("c"), cache.pop("c"), cache.held) == (b"", None, CacheSize(0, 0))
    cache.keep("a", b"")
    assert (cache.clear(), cache.held) == (1, CacheSize(0, 0))


def test_a_value_does_not_outlive_its_time() -> None:
    now = 10.0
    cache: BoundedCache[str, int] = BoundedCache(ttl_seconds=5.0, clock=lambda: now)
    cache.keep("a", 1)
    now = 14.9
    assert cache.find("a") == 1
    now = 15.0
    assert (cache.find("a"), len(cache)) == (None, 0)


def test_without_room_nothing_is_kept() -> None:
    assert not BoundedCache[str, int](entries_max=0).keep("a", 1)
