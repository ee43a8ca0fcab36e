"""Prompts to engines: python router_example.py URL engine-0=tcp://host:5557,tcp://host:5558 ... <prompts"""

import sys

from waymark.client import Client

MODEL, BLOCK_SIZE = "demo", 16
url, *arguments = sys.argv[1:]
endpoints = dict(argument.split("=", 1) for argument in arguments)
load = dict.fromkeys(endpoints, 0)  # tokens each engine was given to compute

with Client(url) as waymark:
    for engine, sockets in endpoints.items():
        endpoint, _, replay = sockets.partition(",")
        waymark.register(engine, endpoint, replay_endpoint=replay or None, model=MODEL, block_size=BLOCK_SIZE)
    for line in sys.stdin:  # a prompt, as token ids
        tokens = [int(token) for token in line.split()]
        matches = waymark.query(MODEL, tokens, BLOCK_SIZE)
        # The tokens to compute, in addition to those that already wait at the engine.
        best = min(endpoints, key=lambda engine: load[engine] + len(tokens) - matches[engine].longest_matched)
        load[best] += len(tokens) - matches[best].longest_matched
        print(best, matches[best].longest_matched, "of", len(tokens), "tokens are there")
