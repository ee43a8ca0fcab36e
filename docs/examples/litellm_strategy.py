"""A routing strategy for LiteLLM's Router that asks Waymark which deployment gets a request.

    router = Router(model_list=[...])
    strategy = WaymarkStrategy(router, AsyncClient(["http://waymark-0:13333", "http://waymark-1:13333"]))
    router.set_custom_routing_strategy(strategy)
    litellm.callbacks = [strategy]

A deployment's ``api_base`` without its path is the address that the engine is registered with. Requests have messages,
so Waymark needs a tokenizer for the model.
"""

import random
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

from waymark.client import AsyncClient

_UNDER_WAY = "waymark_under_way"


class WaymarkStrategy(CustomRoutingStrategyBase, CustomLogger):
    """Selects by cache and load, and ends the reservation when LiteLLM says that the request is over."""

    def __init__(self, router: Any, waymark: AsyncClient, deadline: float = 0.05) -> None:
        super().__init__()
        self._router = router
        self._waymark = waymark
        self._deadline = deadline
        self._under_way: dict[str, AsyncExitStack] = {}

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, str]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        deployments = {_address(each): each for each in self._router.model_list if each["model_name"] == model}
        if messages is None or request_kwargs is None:
            return random.choice(list(deployments.values()))
        served = next(iter(deployments.values()))["litellm_params"]["model"].partition("/")[2]
        async with AsyncExitStack() as stack:
            selecting = self._waymark.select(
                served,
                messages=messages,
                only=list(deployments),
                deadline=self._deadline,
                fallback=lambda: random.choice(list(deployments)),
            )
            selection = (await stack.enter_async_context(selecting)).selection
            if selection.reservation is not None:
                self._under_way[selection.reservation] = stack.pop_all()
                request_kwargs.setdefault("metadata", {})[_UNDER_WAY] = selection.reservation
        return deployments[selection.address or ""]

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        await self._over(kwargs, None)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        await self._over(kwargs, RuntimeError("the engine did not answer"))

    async def _over(self, kwargs: Any, error: Exception | None) -> None:
        metadata = (kwargs.get("litellm_params") or {}).get("metadata") or {}
        under_way = self._under_way.pop(metadata.get(_UNDER_WAY, ""), None)
        if under_way is not None:
            await under_way.__aexit__(None if error is None else type(error), error, None)


def _address(deployment: dict[str, Any]) -> str:
    url = urlsplit(deployment["litellm_params"]["api_base"])
    return f"{url.scheme}://{url.netloc}"
