"""The write pipeline: plan, look up, resolve, apply, count. Streams and ``POST /events`` both go through it.

``applier`` applies folds of decoded batches to Redis, ``counts`` counts them and ends old generations,
``redis_calls`` repeats calls while Redis is unavailable, ``pool_hashes`` keeps the engine hashes that a pool needs,
``straight`` applies frames that are alike, ``slices`` pauses long computations for the event loop, and ``options`` has
the settings of the pipeline. The rules for resolving an event are in ``domain``; the calls to Redis are in ``store``.
"""
