"""The part of Envoy's filter that a picker sees: one stream for each request, message by message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from tests.patience import within

DESTINATION = "x-gateway-destination-endpoint"
SECONDS = 10.0


def header_map(headers: Mapping[str, str]) -> Any:
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


class Stream:
    """One request. Every wait has a deadline."""

    def __init__(self, channel: Any) -> None:
        self.call = ExternalProcessorStub(channel).Process()

    async def send(self, **message: Any) -> None:
        async with within(SECONDS):
            await self.call.write(pb.ProcessingRequest(**message))

    async def receive(self) -> Any:
        """The next answer; None where the picker has ended the stream."""
        async with within(SECONDS):
            found = await self.call.read()
        return None if found is grpc.aio.EOF else found

    async def headers(
        self,
        path: str = "/v1/chat/completions",
        *,
        is_end: bool = False,
        subset: Sequence[str] | None = None,
        modes: tuple[str, str] = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
        **headers: str,
    ) -> None:
        said = {":method": "GET" if is_end else "POST", ":path": path}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        message = pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=header_map(said), end_of_stream=is_end),
            protocol_config=pb.ProtocolConfiguration(
                request_body_mode=ProcessingMode.BodySendMode.Value(modes[0]),
                response_body_mode=ProcessingMode.BodySendMode.Value(modes[1]),
            ),
        )
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": list(subset)})
        async with within(SECONDS):
            await self.call.write(message)

    async def body(self, data: bytes, *, is_end: bool = True) -> None:
        await self.send(request_body=pb.HttpBody(body=data, end_of_stream=is_end))

    async def ask(self, body: Any, path: str = "/v1/chat/completions", **headers: Any) -> Any:
        """A whole request in two pieces; the first answer to it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.headers(path, **headers)
        middle = len(data) // 2
        await self.body(data[:middle], is_end=False)
        await self.body(data[middle:])
        return await self.receive()

    async def request_back(self) -> bytes:
        """The body as the picker sends it on."""
        found = b""
        while True:
            answer = await self.receive()
            streamed = answer.request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= 62_000
            found += streamed.body
            if streamed.end_of_stream:
                return found

    async def answered(
        self,
        status: int = 200,
        *,
        is_end: bool = False,
        served: str | None = None,
        upstream: str | None = None,
        forged: Mapping[str, str] = MappingProxyType({}),
        removed: Sequence[str] = (),
    ) -> dict[str, str]:
        """The headers of an engine's answer, ``forged`` among them; those that the picker sets in it.

        Who answered is in the metadata (``served``), or an attribute (``upstream``). It must remove those of
        ``removed``.
        """
        said = {":status": str(status), **forged}
        message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=header_map(said), end_of_stream=is_end))
        if served is not None:
            message.metadata_context.filter_metadata["envoy.lb"].update(
                {"x-gateway-destination-endpoint-served": served}
            )
        if upstream is not None:
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": upstream})
        async with within(SECONDS):
            await self.call.write(message)
        answer = await self.receive()
        assert answer.WhichOneof("response") == "response_headers"
        assert set(answer.response_headers.response.header_mutation.remove_headers) == set(removed)
        return mutation(answer.response_headers.response)

    async def content(self, data: bytes, *, is_end: bool = False) -> bytes:
        """A piece of an engine's answer, and what becomes of it."""
        await self.send(response_body=pb.HttpBody(body=data, end_of_stream=is_end))
        found = b""
        while len(found) < len(data) or not found:
            streamed = (await self.receive()).response_body.response.body_mutation.streamed_response
            found += streamed.body
            if streamed.end_of_stream:
                assert is_end
                break
        return found

    async def close(self) -> None:
        """As after the whole of an answer."""
        await self.call.done_writing()
        assert await self.receive() is None

    def cancel(self) -> None:
        """As when the client goes away."""
        self.call.cancel()

    async def status(self) -> Any:
        async with within(SECONDS):
            return await self.call.code()


def mutation(common: Any) -> dict[str, str]:
    """Headers that an answer sets."""
    return {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}


def destinations(answer: Any) -> list[str]:
    """The targets that an answer names, which the header and the metadata name alike."""
    common = answer.request_headers.response
    if answer.WhichOneof("response") == "request_body":
        common = answer.request_body.response
    assert common.clear_route_cache, answer
    header = mutation(common)[DESTINATION]
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == header
    return header.split(",")


def refused(answer: Any) -> tuple[int, Any]:
    """Status and body of an immediate answer."""
    immediate = answer.immediate_response
    assert mutation_of(immediate)["content-type"] == "application/json"
    return int(immediate.status.code), json.loads(immediate.body)


def mutation_of(immediate: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in immediate.headers.set_headers}
