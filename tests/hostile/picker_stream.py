"""A peer of an endpoint picker that is not an Envoy: messages out of order, bodies that are held, too many streams."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from contextlib import suppress
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from tests.epp.proxy import Stream, header_map
from tests.hostile.attacker import Attacker, expect
from tests.patience import within
from waymark.epp import radix_index as radix
from waymark.epp import scores

_MIB = 2**20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
#: What a stream of a peer without manners may end with.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OK,
    # What this client makes of a stream that has ended while it still sends. A defect of the picker is UNKNOWN.
    grpc.StatusCode.INTERNAL,
}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class PickerStream(Attacker):
    async def _prepare(self) -> None:
        self._channel = await self.stack.enter_async_context(self._connection())

    def _connection(self) -> Any:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.target['picker_port']}", options=options)

    async def _converse(self, *messages: Any, channel: Any = None) -> list[Any]:
        """Send all, and read until the picker has no more to say, or nothing for a while; the answers."""
        stream = Stream(channel or self._channel)
        answers: list[Any] = []
        try:
            for message in messages:
                await stream.call.write(message)
            await stream.call.done_writing()
            async with within(8):
                while (answer := await stream.receive()) is not None:
                    answers.append(answer)
            code = await stream.status()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            code = await stream.status()  # it has ended before all was sent
        finally:
            stream.cancel()
        expect(
            code in REFUSALS, f"a stream of {[each.WhichOneof('request') for each in messages][:5]} ends with {code}"
        )
        for answer in answers:
            if answer.WhichOneof("response") == "immediate_response":
                status = int(answer.immediate_response.status.code)
                expect(status != 500, f"answered with 500: {answer.immediate_response.body[:300]!r}")
        return answers

    def _headers(self, path: str = "/v1/completions", **more: str) -> Any:
        fields = header_map(
            {":method": "POST", ":path": path} | {name.replace("_", "-"): text for name, text in more.items()}
        )
        message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=fields))
        message.protocol_config.request_body_mode = 4
        message.protocol_config.response_body_mode = 4
        return message

    @staticmethod
    def _body(data: bytes, is_end: bool = True) -> Any:
        return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=is_end))

    async def messages_out_of_order(self) -> None:
        pick = self.random
        body = json.dumps({"model": "honest", "prompt": "hello"}).encode()
        kinds = [
            lambda: self._headers(),
            lambda: self._headers(
                pick.choice(["", "/", "x", "/v1/chat/completions?" + "a" * 5000, "\u00e9", "//", "/v1/embeddings"])
            ),
            lambda: self._body(body),
            lambda: self._body(body, is_end=False),
            lambda: self._body(b""),
            lambda: pb.ProcessingRequest(),
            lambda: pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
            lambda: pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
            lambda: pb.ProcessingRequest(
                response_headers=pb.HttpHeaders(
                    headers=header_map({":status": pick.choice(["200", "x", "", "-1", "9" * 50])})
                )
            ),
            lambda: pb.ProcessingRequest(
                response_body=pb.HttpBody(body=os.urandom(1000), end_of_stream=pick.random() < 0.5)
            ),
        ]
        for _ in range(self._times(25)):
            first = [kinds[0]()] if pick.random() < 0.7 else []
            await self._converse(*first, *(pick.choice(kinds)() for _ in range(pick.randrange(6))))

    async def fields_of_wrong_types(self) -> None:
        pick = self.random
        values: list[Any] = [None, True, -1, 2**64, 1.5, "", "x" * 10_000, [], {}, [[]], [1, "a"], "\x00"]
        for _ in range(self._times(20)):
            body: dict[str, Any] = {
                "model": "honest",
                "prompt": "hello",
                "messages": [{"role": "user", "content": "x"}],
            }
            body[pick.choice(sorted(body))] = pick.choice(values)
            path = pick.choice(
                ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"]
            )
            await self._converse(self._headers(path), self._body(json.dumps(body).encode()))
        for depth in (63, 64, 127, 128, 253, 254, 255, 256, 1000, 100_000):
            deep = b'{"model": "honest", "prompt": %b%b}' % (b"[" * depth, b"]" * depth)
            await self._converse(self._headers(), self._body(deep))
        for junk in (b"\xff", b"", b"{", b'{"model": "\\ud800"}', b"[" + b"{}," * 300_000 + b"{}]"):
            await self._converse(self._headers(), self._body(junk))

    async def headers_without_end(self) -> None:
        pick = self.random
        many = {f"x-{n}": "a" * 10 for n in range(pick.choice([100, 1000, 10_000]))}
        whole = self._body(b'{"model": "honest", "prompt": "x"}')
        await self._converse(self._headers(**many), whole)
        await self._converse(self._headers(x_a="b" * pick.choice([10_000, _MIB, 4 * _MIB])), whole)
        await self._converse(self._headers(x_session_token="\x00" * 3000, x_request_id="é" * 500), whole)
        hint = self._headers()
        place = hint.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        subset: Any = pick.choice(
            [["10.0.0.7:8000"] * 20_000, [[["x"]]], {"a": {}}, 1.5, None, ["\u00b2:\u00b2"], [""]]
        )
        place.update({"x-gateway-destination-endpoint-subset": subset})
        await self._converse(hint, whole)

    async def bodies_that_are_held(self) -> None:
        """Of many streams, each with all but its end: more than all bodies together may have."""
        piece = b" " * (_MIB // 2)
        async with self._connection() as channel:
            streams = [Stream(channel) for _ in range(12)]
            for stream in streams:
                try:
                    await stream.call.write(self._headers())
                    for _ in range(6):
                        await stream.call.write(self._body(piece, is_end=False))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass  # refused, or cut
            await asyncio.sleep(0.3)
            for stream in streams:
                stream.cancel()

    async def messages_that_are_large(self) -> None:
        for size in (4 * _MIB - 100, 4 * _MIB, 4 * _MIB + 1, 32 * _MIB):
            await self._converse(self._headers(), self._body(b" " * size))

    async def streams_without_number(self) -> None:
        """More streams than the picker has places, and nothing on them."""
        async with self._connection() as channel:
            streams = [Stream(channel) for _ in range(600)]
            for stream in streams[::3]:
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # refused
                    await stream.call.write(self._headers())
            await asyncio.sleep(0.3)
            for stream in streams:
                stream.cancel()

    async def bytes_that_are_no_messages(self) -> None:
        """gRPC as it should be, and in it nothing that is a message."""
        process = self._channel.stream_stream(_METHOD, request_serializer=None, response_deserializer=None)
        for data in (os.urandom(100), b"\x12" + b"\xff" * 9, b"\x0a\x80\x80\x80\x80\x10", b"\x12\x02\x0a\x00" * 10_000):
            call = process()
            try:
                await call.write(data)
                await call.done_writing()
                async with within(8):
                    await call.read()
            except grpc.aio.AioRpcError:
                pass
            call.cancel()

    async def questions_of_other_services(self) -> None:
        """Those that routers of other projects ask: scores of pods, prefixes by hashes, and placements."""
        pick = self.random
        hashes = [pick.getrandbits(64) for _ in range(pick.choice([0, 1, 16_384, 16_385, 400_000]))]
        keyspace = radix.CLASSES["Keyspace"](
            model=pick.choice(["honest", "", "x" * 100_000]),
            symbol_kind=pick.choice([0, 1, 2, 99]),
            block_size=pick.choice([0, 1, 16, 256, 2**32 - 1]),
            hash_scheme=pick.choice([0, 1, 2**31]),
        )
        blocks = [radix.CLASSES["Block"](content_hash=each) for each in hashes[:100_000]]
        stored = radix.CLASSES["Event"](stored=radix.CLASSES["Stored"](blocks=blocks))
        holder = pick.choice(["http://10.0.0.7:8000", "", "x" * 5000, "http://", "\x00"])
        update = radix.CLASSES["Update"](
            keyspace=keyspace, holder=holder, epoch=pick.choice([0, 1, 2**64 - 1]), events=[stored]
        )
        query = radix.CLASSES["Query"](query_id=2**64 - 1, keyspace=keyspace, content_hashes=hashes)
        scores_of = scores.CLASSES["GetPodScoresRequest"](
            prompt=pick.choice(["", "hello", "a" * _MIB]),
            model_name=pick.choice(["honest", "", "x" * 5000, "\x00"]),
            pod_identifiers=[pick.choice(["", "honest", "x" * 100])] * pick.choice([0, 1, 30_000]),
        )
        prefix = scores.PREFIX_CLASSES["MatchExternalKvPrefixRequest"](
            hashes=[each - 2**63 for each in hashes], max_blocks=pick.choice([0, 1, 2**32 - 1])
        )
        asked: list[tuple[str, bytes]] = [
            (f"/{scores.SERVICE}/GetPodScores", scores_of.SerializeToString()),
            (f"/{scores.PREFIX_SERVICE}/MatchExternalKvPrefix", prefix.SerializeToString()),
            (f"/{radix.SERVICE}/Publish", update.SerializeToString()),
            (f"/{radix.SERVICE}/Subscribe", query.SerializeToString()),
            (f"/{radix.SERVICE}/Pull", b""),
        ]
        for path, data in asked:
            for content in (data, os.urandom(200), data[: len(data) // 2]):
                call = self._channel.stream_stream(path, request_serializer=None, response_deserializer=None)()
                try:
                    await call.write(content)
                    await call.done_writing()
                    async with within(8):
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    code = await call.code()
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    code = await call.code()  # it has ended before all was sent
                finally:
                    call.cancel()
                # gRPC itself says INTERNAL of bytes that are no message; a defect of the picker is UNKNOWN.
                expect(code is not grpc.StatusCode.UNKNOWN, f"{path} ends with {code}: {content[:60]!r}")

    async def frames_that_are_no_grpc(self) -> None:
        """HTTP/2 by hand: streams that are reset as soon as they begin, windows, settings and pings without end."""
        port = self.target["picker_port"]
        settings = frame(4, 0, 0, b"")
        # An indexed POST, a path and a scheme, by the table that every peer has.
        fields = b"\x83\x86\x04" + bytes([len(_METHOD)]) + _METHOD.encode()
        resets = b"".join(
            frame(1, 4, number, fields) + frame(3, 0, number, b"\x00\x00\x00\x08") for number in range(1, 6001, 2)
        )
        floods = [
            os.urandom(5000),
            b"GET / HTTP/1.1\r\n\r\n",
            _PREFACE + settings + resets,
            _PREFACE + settings * 20_000,
            _PREFACE + settings + frame(6, 0, 0, bytes(8)) * 20_000,
            _PREFACE + settings + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 1000,
            _PREFACE + settings + frame(1, 0, 1, fields) + frame(9, 0, 1, os.urandom(16_000)) * 200,
            _PREFACE + settings + frame(0, 0, 1, bytes(16_384)) * 500,
            _PREFACE + frame(4, 0, 0, b"\x00\x04\xff\xff\xff\xff\x00\x01\xff\xff\xff\xff"),
        ]
        await asyncio.gather(*(self._said(port, flood, seconds=1.0) for flood in self._some(floods, 4)))
