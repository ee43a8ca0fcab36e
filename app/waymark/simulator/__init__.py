"""Simulated inference engines: prefix caches that publish KV events the way real engines do.

For tests, demonstrations and load: ``waymark simulate`` runs them, the end-to-end tests drive them directly. ``cache``
decides which blocks are held, ``encode`` writes them as each engine does, ``publisher`` has the sockets, ``engine``
joins them and fails on request (``options``), ``workload`` makes up or reads the prompts, ``http`` answers requests of
clients (with ``openai``, ``messages``, ``generation`` and ``texts``), ``run`` is a whole run. ``PrefixCache.held`` is
the truth an index is compared with.

The package shares no code with the decoders, the index or the workers, so that it can be used against them.
"""
