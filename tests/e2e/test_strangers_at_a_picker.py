"""A running picker between a client and an engine that say where prompts are copied from: neither is believed."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.epp.proxy import Stream, destinations, refused
from tests.grpc_loops import events_of_this_loop as events_of_this_loop
from tests.hostile.doors import HONEST, picker_stream

pytestmark = pytest.mark.outside

BODY = {"model": HONEST, "prompt": "hello"}
PATH = "/v1/completions"
ELSEWHERE = "10.6.6.6:1"
NAMES = ("x-kv-cache-source-host-port", "x-prefiller-host-port", "mif-prefill-endpoint", "x-prefiller-url")


async def test_neither_side_names_a_place_and_no_body_is_too_deep(redis_url: str, tmp_path: Path) -> None:
    async with (
        picker_stream(redis_url, tmp_path) as opened,
        grpc.aio.insecure_channel(f"127.0.0.1:{opened.target['picker_port']}") as channel,
    ):
        stream = Stream(channel)
        answer = await stream.ask(BODY, PATH, **{name.replace("-", "_"): ELSEWHERE for name in NAMES})
        (place,) = destinations(answer)
        assert place != ELSEWHERE
        assert set(answer.request_headers.response.header_mutation.remove_headers) == {*NAMES}
        await stream.request_back()
        ours = ["x-waymark-other", "x-cache", *NAMES]
        forged = dict.fromkeys(["x-decoder-host-port", "x-session-token", "x-kept", *ours], ELSEWHERE)
        said = await stream.answered(forged=forged, removed=ours)
        assert ELSEWHERE not in said.values()
        assert said["x-decoder-host-port"] == place
        stream.cancel()
        for depth in (254, 1000, 50_000):
            deep = b'{"model": "m", "input": ' + b"[" * depth + b"]" * depth + b"}"
            assert refused(await Stream(channel).ask(deep, "/v1/responses"))[0] == 400, depth
        for body in (BODY | {"kv_transfer_params": {"remote_host": ELSEWHERE}}, BODY | {"bootstrap_host": ELSEWHERE}):
            assert refused(await Stream(channel).ask(body, PATH))[0] == 400, body
        for check in opened.checks.values():
            await check()
