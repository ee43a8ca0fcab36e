"""Pure code: no clock, no network, no Redis, no environment.

Other packages import only the modules in ``__all__``.
"""

__all__ = [
    *("alike_frames", "answer_times", "books", "chunks", "engines", "events", "generations", "hashing", "held"),
    *("known", "life_facts", "match", "media", "moves", "multimodal", "names", "packing", "parts", "pool_keys"),
    *("prefixes", "resolver", "row_runs", "rows", "slices", "status", "table", "targets", "waiting", "worth"),
]
