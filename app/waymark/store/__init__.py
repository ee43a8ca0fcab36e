"""The only package that talks to Redis.

Other packages import the modules in ``__all__``; the rest is reached by the attributes of a ``Store``.
"""

__all__ = [
    *("activity", "alike_calls", "books", "calls", "chain", "claims", "directory", "entries", "exporting", "hashes"),
    *("health", "holder_tables", "hot", "importing", "index_file", "kept_decisions", "keys", "leases", "pacing"),
    *("parsing", "places", "prefixes", "publisher_states", "quick", "reader", "records", "reservations", "responses"),
    *("scripts", "selections", "speculative", "steps", "store", "sweep", "takeover", "workers", "worth"),
]
