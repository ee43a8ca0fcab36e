"""Pure code: no clock, no network, no Redis, no environment.

Other packages import only the modules in ``__all__``.
"""

__all__ = [
    "alike_frames",
    "answer_times",
    "books",
    "chunks",
    "engines",
    "events",
    "generations",
    "hashing",
    "held",
    "keys",
    "known",
    "life_facts",
    "match",
    "media",
    "moves",
    "multimodal",
    "names",
    "parts",
    "plan",
    "pool_keys",
    "prefixes",
    "recent",
    "resolver",
    "row_runs",
    "rows",
    "slices",
    "status",
    "table",
    "targets",
    "tokens",
    "waiting",
    "worth",
]
