"""Prompts to engines: router_example.py URL engine-0=tcp://host:5557,tcp://host:5558,http://host:8000 ... <prompts"""

import sys

from waymark.client import Client

MODEL, BLOCK_SIZE = "demo", 16
url, *arguments = sys.argv[1:]

with Client(url) as waymark:
    for engine, sockets in (argument.split("=", 1) for argument in arguments):
        endpoint, replay, address = sockets.split(",")
        waymark.register(engine, endpoint, replay_endpoint=replay, address=address, model=MODEL, block_size=BLOCK_SIZE)
    for line in sys.stdin:  # a prompt, as token ids
        tokens = [int(token) for token in line.split()]
        with waymark.select(MODEL, tokens) as target:  # reserved until the block ends
            best = target.selection  # a router sends the request to best.address here, and streams its answer
            engine = f"{best.instance_id} at {best.address}:"
            print(engine, best.device_tokens, "of", len(tokens), "tokens are there", flush=True)
