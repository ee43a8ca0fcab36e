"""A client of Waymark in a process of its own: it asks for a target, sends it a chat, and says which it was.

    python -m tests.e2e.selecting http://127.0.0.1:13333

Each line of its input is the number of a prompt; each line of its output is the instance that the decision named.
"""

from __future__ import annotations

import contextlib
import sys

import httpx

from tests.patience import patient
from waymark.client import Client


def main() -> None:
    with Client([sys.argv[1]]) as waymark, httpx.Client(trust_env=False, timeout=patient(30)) as http:
        for line in sys.stdin:
            token_ids = [1000 * int(line) + n for n in range(64)]
            body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            target = waymark.select("demo", token_ids, expect=False)
            with contextlib.suppress(httpx.TransportError), target:
                http.post(f"{target.selection.address}/v1/chat/completions", json=body).raise_for_status()
            print(target.selection.instance_id, flush=True)


if __name__ == "__main__":
    main()
