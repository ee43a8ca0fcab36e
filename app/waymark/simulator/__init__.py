"""Simulated inference engines: prefix caches that publish KV events the way real engines do.

For tests, demonstrations and load: ``waymark simulate`` runs them, the end-to-end tests drive them directly.
``cache`` (over ``tier``) decides what is held, ``encode`` writes it as each engine does, ``publisher`` has the
sockets, ``engine`` joins them and goes wrong on request (``faults``), ``workload`` makes up or reads the prompts,
``http`` answers requests of clients (with ``openai``, ``messages``, ``generation`` and ``texts``), ``run`` is a whole
run. ``PrefixCache.held`` is the truth an index is compared with.

The package shares no code with the decoders, the index or the workers, so that it can be used against them.
"""

from __future__ import annotations

from waymark.simulator.cache import Prefix, PrefixCache
from waymark.simulator.encode import DIALECTS, Dimensions, Encoder
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.faults import Faults
from waymark.simulator.options import SimulateOptions
from waymark.simulator.publisher import SimulatedPublisher
from waymark.simulator.run import EngineStarted, EngineSummary, Summary, simulate
from waymark.simulator.workload import Prompt, conversations, read_trace

__all__ = [
    "DIALECTS",
    "Dimensions",
    "Encoder",
    "EngineStarted",
    "EngineSummary",
    "Faults",
    "Prefix",
    "PrefixCache",
    "Prompt",
    "SimulateOptions",
    "SimulatedEngine",
    "SimulatedPublisher",
    "Summary",
    "build_engine",
    "conversations",
    "read_trace",
    "simulate",
]
