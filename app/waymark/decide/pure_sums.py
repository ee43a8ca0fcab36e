"""What ``native/sums.c`` and ``native/offers.c`` do, in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from waymark.domain.books import PROMISE_TEXT
from waymark.domain.match import TargetRow
from waymark.store.reservations import Offer, packed_behind, words_of

_NO_ROW = TargetRow()


def rank_sums(
    members: Sequence[Any],
    rows: Callable[[Any], Any],
    loads: Callable[[Any], Any],
    expected: Callable[[Any], Any] | None,
    draw: Callable[[], float],
    tokens: int,
    least: int,
    size: int,
    device_credit: float,
    host_credit: float,
    disk_credit: float,
    shared_credit: float,
    weight_new: float,
    weight_active: float,
) -> list[Any]:
    """Return the sums of all members, least first.

    ``rows``, ``loads`` and ``expected`` return what is known of a name, or of a publisher.
    """
    new_of_nothing = max(tokens - 0.0, least)
    sums = []
    for member in members:
        publisher, name, target = member[:3]
        row, load, soon, new = rows(name), loads(publisher), 0, new_of_nothing
        if expected is not None:
            soon = expected(publisher) or 0
        if row is not None or soon:
            device, host, shared, disk = row or _NO_ROW
            has = device_credit * device + host_credit * host + disk_credit * disk + shared_credit * shared
            new = max(tokens - size * max(has, soon), least)
        cost = weight_new * new
        if load is not None:
            cost += (load.tokens + weight_active * load.requests) / target.weight
        sums.append((cost, draw(), publisher, member, new, row, load, soon))
    sums.sort()
    return sums


def in_places(
    members: Sequence[Any],
    rows: Callable[[Any], Any],
    loads: Callable[[Any], Any],
    tokens: int,
    least: int,
    size: int,
    credits: tuple[float, float, float, float],
) -> list[Any]:
    """Return members as ``rank_sums`` returns them, in their order; the cost of each is its place."""
    of_device, of_host, of_disk, of_shared = credits
    sums = []
    for place, member in enumerate(members):
        publisher, name, *_ = member
        row, new = rows(name), float(tokens)
        if row is not None:
            device, host, shared, disk = row
            has = of_device * device + of_host * host + of_disk * disk + of_shared * shared
            new = max(tokens - size * has, least)
        sums.append((float(place), 0.0, publisher, member, new, row, loads(publisher), 0))
    return sums


def offer_sums(
    offer: type[Offer],
    sums: list[Any],
    most: int,
    blocks: int,
    size: int,
    weight_new: float,
    available: int,
    reusable: int,
    random: int,
    handicap: float,
    weight: float | None,
) -> tuple[list[Offer], list[str], list[str]]:
    """Return the first ``most`` sums as offers, what is promised of each, and the words of a reservation.

    The ``handicap`` is added to that of each offer. Each offer has this ``weight``, or without one the weight of its
    target.
    """
    offers, promises = [], []
    for _, _, publisher, member, new, row, _, soon in sums[:most]:
        device, host, shared, disk = row or _NO_ROW
        matched = device + host + shared + disk
        # A target with all complete blocks gives nothing back, so its last tokens count in the cost alone.
        is_whole = row is not None and not shared and blocks and matched == blocks and new <= size
        reserved = 0 if is_whole else math.ceil(new)
        of_target = member.target.weight if weight is None else weight
        offers.append(offer(publisher, reserved, handicap + weight_new * (new - reserved), of_target))
        will_have = min(max(matched, soon) * size, reusable)
        promises.append(
            PROMISE_TEXT % (available, size * device, size * host, size * disk, size * shared, will_have, random)
        )
    return offers, promises, words_of(offers, promises)


def pack_sums(head: bytes, words: int, sums: list[Any], *of: Any) -> bytes:
    """Return a packed call of ``reserve``. ``head`` has its first ``words`` words, packed; the publishers and terms
    follow, which ``offer_sums`` makes from the other arguments.
    """
    offers, _, terms = offer_sums(Offer, sums, *of)
    publishers = [publisher for publisher, *_ in offers]
    return packed_behind(head, words, (len(publishers), *publishers, len(terms), *terms))
