"""A router in plain asyncio: python asyncio_router.py URL[,URL] MODEL ENGINE... <prompts

It sends each prompt, a line of standard input, to the engine that Waymark selects, and prints the answer as it comes.
An engine is a URL such as http://10.0.0.7:8000, and is registered with Waymark under it as its address.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence

import httpx

from waymark.client import AsyncClient


class Router:
    """Sends chat requests to the best engine; to the next one in turn where no replica answers in time."""

    def __init__(self, waymark: AsyncClient, model: str, engines: Sequence[str], deadline: float = 0.05) -> None:
        self._waymark = waymark
        self._model = model
        self._deadline = deadline
        self._turns = itertools.cycle(engines)
        self._http = httpx.AsyncClient(timeout=None)

    async def chat(self, text: str) -> AsyncIterator[str]:
        messages = [{"role": "user", "content": text}]
        selecting = self._waymark.select(
            self._model, messages=messages, deadline=self._deadline, fallback=lambda: next(self._turns), expect=True
        )
        async with selecting as target:  # reserved until the block ends; an error in it counts as the engine's
            body = {"model": self._model, "messages": messages, "stream": True}
            body |= {"stream_options": {"include_usage": True}}
            url = f"{target.selection.address}/v1/chat/completions"
            async with self._http.stream("POST", url, json=body, headers=dict(target.selection.headers)) as answer:
                answer.raise_for_status()
                is_first = True
                async for line in answer.aiter_lines():
                    if is_first:
                        await target.first_token()  # its prompt is computed: others need not wait for that
                        is_first = False
                    usage = json.loads(line[6:]).get("usage") if line.startswith("data: {") else None
                    if usage:  # how much of the prompt the engine did not compute, for the books
                        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                        target.used(cached, prompt_tokens=usage["prompt_tokens"])
                    yield f"{line}\n"

    async def close(self) -> None:
        await self._http.aclose()


async def main(urls: str, model: str, *engines: str) -> None:
    async with AsyncClient(urls.split(",")) as waymark:
        router = Router(waymark, model, engines)
        for line in sys.stdin:
            async for chunk in router.chat(line.strip()):
                print(chunk, end="", flush=True)
        await router.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
