"""One stream with messages from memory, at moments that a real connection reaches rarely."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from tests.decide.conftest import MakeSelector
from tests.epp.proxy import header_map
from tests.patience import wait_until, within
from waymark.base.metrics import Metrics
from waymark.decide.under_way import RequestsUnderWay
from waymark.epp.answers import BodyBytes
from waymark.epp.process_call import CallContext, ProcessCall, StreamCut, Streams
from waymark.store.store import Store

CHATS = {":method": "POST", ":path": "/v1/chat/completions"}


async def test_no_message_is_written_beside_one_that_the_peer_does_not_read(
    store: Store, make_selector: MakeSelector, metrics: Metrics
) -> None:
    """gRPC raises an error of its own for it."""
    selector = make_selector(store)
    bodies = BodyBytes(2**20, 1000, metrics)
    under_way = RequestsUnderWay(selector.selector, store.begin)
    picker = CallContext(selector, under_way, metrics, bodies, "default", 60.0, 60.0)
    place = Streams(8, metrics).enter("one")
    assert place is not None
    written: list[Any] = []

    async def read() -> Any:
        if written:
            return pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x"))
        modes = pb.ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED)
        return pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=header_map(CHATS)), protocol_config=modes)

    async def write(message: Any) -> None:
        written.append(message)
        await asyncio.Event().wait()

    stream = ProcessCall(picker, place, read, write)
    running = asyncio.create_task(stream.run())
    await wait_until(lambda: bool(written), "the stream writes")
    stream._held.give_up()
    async with within(20.0):
        with pytest.raises(StreamCut, match="too many requests arrive at once"):
            await running
    assert len(written) == 1
