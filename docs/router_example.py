"""Prompts to engines: python router_example.py http://127.0.0.1:13333 engine-0=tcp://127.0.0.1:5557 ... <prompts"""

import sys

from app.client import Client

MODEL, BLOCK_SIZE = "my-model", 16
url, *arguments = sys.argv[1:]
endpoints = dict(argument.split("=", 1) for argument in arguments)
load = dict.fromkeys(endpoints, 0)  # tokens each engine was given to compute

with Client(url) as waymark:
    for engine, endpoint in endpoints.items():
        waymark.register(engine, endpoint, model=MODEL, block_size=BLOCK_SIZE)
    for line in sys.stdin:  # a prompt, as token ids
        tokens = [int(token) for token in line.split()]
        matches = waymark.query(MODEL, tokens, BLOCK_SIZE)
        # What is to be computed anew, behind what is already waiting there.
        best = min(endpoints, key=lambda engine: load[engine] + len(tokens) - matches[engine].longest_matched)
        load[best] += len(tokens) - matches[best].longest_matched
        print(best, matches[best].longest_matched, "of", len(tokens), "tokens are there")
