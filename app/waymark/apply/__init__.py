"""The write pipeline: plan, look up, resolve, apply, count. Streams and ``POST /events`` both go through it.

``applier`` carries a fold of decoded batches from its events to Redis, ``counts`` counts what came of it, and
``options`` is what both go by. The rules that an event is resolved by are in ``domain``; how Redis is asked is in
``store``.
"""
