"""A routing logic for vLLM's production-stack: python production_stack_router.py URL[,URL] [flags of vllm-router]

It asks Waymark which engine has how much of a prompt, and weighs that against the requests that this router has under
way. An endpoint's URL is the address that the engine is registered with. Requests have text, so Waymark needs a
tokenizer for the model.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_router.routers.routing_logic import PrefixAwareRouter

from waymark.client import AsyncClient, Match

#: Tokens that count as much as one request under way.
_TOKENS_A_REQUEST = 512
#: What a token that has to be computed costs more than one that waits.
_TOKEN_WEIGHT = 3


class WaymarkRouter(PrefixAwareRouter):
    """A ``RoutingInterface``; the router waits for those that are prefix-aware, and hands them the body."""

    def __init__(self, waymark: AsyncClient, deadline: float = 0.05) -> None:
        self._waymark = waymark
        self._deadline = deadline

    async def route_request(
        self,
        endpoints: Sequence[Any],
        engine_stats: Mapping[str, Any],
        request_stats: Mapping[str, Any],
        request: Any,
        request_json: Mapping[str, Any],
    ) -> str:
        prompt = {name: request_json[name] for name in ("messages", "prompt", "tools") if request_json.get(name)}
        matches: Mapping[str, Match] = {}
        if "messages" in prompt or isinstance(prompt.get("prompt"), str):
            matches = await self._waymark.query(
                request_json["model"], by="address", deadline=self._deadline, or_empty=True, **prompt
            )

        def cost(url: str) -> int:
            stats, match = request_stats.get(url), matches.get(url)
            requests = 0 if stats is None else stats.in_prefill_requests + stats.in_decoding_requests
            held = 0 if match is None else match.longest_matched
            return _TOKENS_A_REQUEST * requests - _TOKEN_WEIGHT * held

        return min((endpoint.url for endpoint in endpoints), key=cost)


def main() -> None:
    import uvicorn
    from vllm_router import app as production_stack

    urls = sys.argv.pop(1).split(",")
    arguments = production_stack.parse_args()
    production_stack.initialize_all(production_stack.app, arguments)
    router = WaymarkRouter(AsyncClient(urls))
    router.max_instance_failover_reroute_attempts = arguments.max_instance_failover_reroute_attempts
    production_stack.app.state.router = router
    uvicorn.run(production_stack.app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
