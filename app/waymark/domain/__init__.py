"""Pure code: no clock, no network, no Redis, no environment.

Other packages import only the modules in ``__all__``.
"""

__all__ = [
    *("answer_times", "books", "chunks", "engines", "events", "generations", "hashing", "held", "known", "life_facts"),
    *("match", "media", "moves", "multimodal", "names", "packing", "parts", "plain_runs", "pool_keys", "prefixes"),
    *("resolver", "row_runs", "rows", "slices", "status", "table", "targets", "waiting", "worth"),
]
