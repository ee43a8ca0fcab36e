"""The options that the settings become."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grpc_loops import events_of_this_loop
from waymark.api.options import ApiOptions
from waymark.apply.options import ApplyOptions
from waymark.base.settings import Settings
from waymark.decide.options import SelectionOptions
from waymark.decide.served import PromptOptions
from waymark.epp.server import EppOptions
from waymark.gateway.application import GatewayOptions
from waymark.runtime import parts
from waymark.runtime.gateway import gateway_options
from waymark.runtime.picker import epp_options

__all__ = ["events_of_this_loop"]


def test_options_have_the_defaults_of_their_settings() -> None:
    settings = Settings()
    assert parts.prompt_options(settings) == PromptOptions()
    selection = parts.selection_options(settings)
    assert selection == SelectionOptions(policy=selection.policy, decisions_kept=settings.decisions_kept)
    assert parts.apply_options(settings) == ApplyOptions()
    assert parts.api_options(settings) == ApiOptions()
    assert gateway_options(settings) == GatewayOptions()
    assert epp_options(settings) == EppOptions()


@pytest.mark.parametrize(
    ("given", "is_gateway", "is_closed", "is_open"),
    [
        pytest.param({}, False, False, False, id="a trial"),
        pytest.param({}, True, False, True, id="a gateway on a trial"),
        pytest.param({"host": "127.0.0.1"}, True, False, True, id="a gateway on loopback"),
        pytest.param({"host": "::1", "redis_url": "redis://redis"}, False, False, False, id="a replica on loopback"),
        pytest.param({"redis_url": "redis://redis"}, False, False, True, id="a replica"),
        pytest.param({"redis_url": "redis://redis", "api_token": "t"}, False, False, False, id="a token"),
        pytest.param({"gateway_keys": ("a:b",)}, True, True, False, id="a gateway with keys"),
        pytest.param({"redis_url": "redis://r", "gateway_keys": ("a:b",)}, False, False, True, id="keys of others"),
    ],
)
def test_a_port_that_is_open_is_warned_of(
    given: dict[str, Any], is_gateway: bool, is_closed: bool, is_open: bool
) -> None:
    access = parts.api_options(Settings(**given), is_gateway=is_gateway).access
    assert access.is_closed == is_closed
    assert (access.warning is not None) == is_open


def test_secrets_are_in_no_description() -> None:
    given: dict[str, Any] = {"api_token": "sesame", "redis_url": "redis://:sesame@redis", "gateway_keys": ("sesame",)}
    settings = Settings(**given)
    assert "sesame" not in repr((parts.api_options(settings), gateway_options(settings)))
