"""A client of Waymark, synchronous and asynchronous, for routers and controllers: ``pip install waymark``.

    with Client("http://waymark:13333") as waymark:
        waymark.register("engine-0", "tcp://10.0.0.7:5557", model="llama", block_size=16)
        matches = waymark.query("llama", token_ids, block_size=16)
        best = max(matches, key=lambda name: matches[name].longest_matched)
        matches = waymark.query("llama", messages=[{"role": "user", "content": "Hello"}])

Or Waymark decides, by cache and load, and learns how the request ended:

    async with AsyncClient("http://waymark:13333") as waymark:
        async with waymark.select("llama", token_ids) as target:
            ...  # send the request to target.selection.address
            await target.first_token()
            target.used(cached_tokens=480, prompt_tokens=512)  # the usage of the engine's answer, for the books

A router that works by callbacks, and has no block for ``with``, calls ``begin`` and ``end``:

    target = await waymark.select("llama", token_ids).begin()
    await target.end()  # or target.end("failed"); or elsewhere waymark.release(target.selection.reservation)

A client may have several URLs, of any replicas: if one fails, the next is asked at once. A router gives its queries a
budget, and sends the prompt anywhere if the budget is over:

    matches = await waymark.query("llama", token_ids, deadline=0.05, or_empty=True)

Token ids travel packed, 4 bytes each; with ``block_hashes`` and ``query_by_hash`` no token travels at all. ``select``
has a budget, too: ``deadline`` in seconds, and a ``fallback`` that names the target if there is no answer by then.

All numbers are in tokens. A request that Waymark rejects raises ``Refused`` with Waymark's own sentence; a decision for
a model that nobody has registered raises ``ModelNotFound``, whose ``nearest`` is the probable name. A request
that gets no answer within a bounded time raises ``Unavailable``; a router then sends its prompt to any engine.

The package does not need the server's dependencies.
"""

from __future__ import annotations

from waymark.client.answers import (
    Applied,
    ClientError,
    Match,
    Matches,
    ModelNotFound,
    Refused,
    Registered,
    Score,
    Selection,
    Service,
    Unavailable,
    Workers,
)
from waymark.client.asynchronous import AsyncClient
from waymark.client.blocking import Client
from waymark.client.calls import block_hashes, seq_hashes
from waymark.contract.publishers import Publisher
from waymark.domain.status import StreamStatus

__all__ = [
    "Applied",
    "AsyncClient",
    "Client",
    "ClientError",
    "Match",
    "Matches",
    "ModelNotFound",
    "Publisher",
    "Refused",
    "Registered",
    "Score",
    "Selection",
    "Service",
    "StreamStatus",
    "Unavailable",
    "Workers",
    "block_hashes",
    "seq_hashes",
]
