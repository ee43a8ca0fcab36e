"""The protocol of endpoint pickers, against the messages that Envoy sends."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from tests.conftest import wait_until
from tests.epp.conftest import PLACES, StartEpp, loads, register
from tests.epp.proxy import Stream, destinations, header_map, mutation, refused
from tests.store.factories import answered_before
from waymark.base.bounded_json import DEPTH_MAX, PARTS_MAX
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.domain.targets import Role
from waymark.epp.server import MORE_BYTES_MAX, EppOptions
from waymark.store.store import Store

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "stream": True}
#: A channel would share the connection of another one to the same place.
#: Connections with different arguments are different ones.
ONE = ("waymark.one", 1)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
TOKENS = {"model": "llama", "prompt": list(range(256))}


async def nothing_under_way(store: Store) -> None:
    found: Any = None

    async def is_so() -> bool:
        nonlocal found
        found = await loads(store)
        return not found

    await wait_until(is_so, lambda: f"nothing is under way: {found}")


async def test_a_request_is_held_picked_for_and_sent_on_as_it_came(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    stream = (await start_epp(store)).stream()
    answer = await stream.ask(CHAT)
    places = destinations(answer)
    assert sorted(places) == sorted(pods.values()), "the best, and two to try if it does not answer"
    assert await stream.request_back() == json.dumps(CHAT).encode()
    assert (await loads(store))[places[0]].requests == 1
    await stream.answered()
    assert await stream.content(b"data: a\n\n") == b"data: a\n\n"
    assert await stream.content(b"x" * 150_000, is_end=True) == b"x" * 150_000
    await nothing_under_way(store)
    await stream.close()
    exported = metrics.render()[0].decode()
    assert 'waymark_epp_requests_total{outcome="picked"} 1.0' in exported
    assert "waymark_epp_streams 0.0" in exported


async def test_the_headers_are_answered_only_when_the_body_is_whole(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    stream = (await start_epp(store)).stream()
    await stream.headers("/v1/completions")
    await stream.body(b'{"model": "llama", ', is_end=False)
    assert await loads(store) == {}
    await stream.body(b'"prompt": [1, 2, 3]}')
    assert destinations(await stream.receive())
    assert await stream.request_back() == b'{"model": "llama", "prompt": [1, 2, 3]}'


async def test_a_large_body_comes_back_in_few_pieces_and_trailers_stay_behind_it(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    stream = (await start_epp(store)).stream()
    body = b'{"model": "llama", "prompt": "%s"}' % (b"long " * 60_000)
    await stream.headers("/v1/completions")
    for at in range(0, len(body), 65_536):
        await stream.body(body[at : at + 65_536], is_end=False)
    await stream.send(request_trailers=pb.HttpTrailers())
    assert destinations(await stream.receive())
    found = []
    while (answer := await stream.receive()).WhichOneof("response") == "request_body":
        streamed = answer.request_body.response.body_mutation.streamed_response
        assert not streamed.end_of_stream
        found.append(streamed.body)
    assert b"".join(found) == body
    assert [len(piece) for piece in found] == [62_000] * 4 + [len(body) - 4 * 62_000], "no message is without need"
    assert answer.request_trailers == pb.TrailersResponse()


async def test_the_first_content_ends_the_prefill(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    stream = (await start_epp(store)).stream()
    place = destinations(await stream.ask(TOKENS, "/v1/completions"))[0]
    await stream.request_back()
    assert (await loads(store))[place].tokens == 256
    await stream.answered()
    assert (await loads(store))[place].tokens == 256, "headers alone are no content"
    await stream.content(b"a")

    async def is_computed() -> bool:
        return (await loads(store))[place][:2] == (0, 1)

    await wait_until(is_computed, "its prompt is computed")
    (timed,) = (await store.answer_times.read(1, [1, 2, 3])).values()
    assert (timed.first_token.requests, timed.first_token.work) == (1, 256)
    await stream.send(response_trailers=pb.HttpTrailers())
    assert (await stream.receive()).response_trailers == pb.TrailersResponse()
    await nothing_under_way(store)
    assert b"waymark_ttft_seconds_count 1.0" in metrics.render()[0]


async def test_a_prefix_goes_where_it_was_before(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    epp = await start_epp(store)
    places = []
    for _ in range(4):
        stream = epp.stream()
        places.append(destinations(await stream.ask(TOKENS, "/v1/completions"))[0])
        await stream.request_back()
        await stream.answered(is_end=True)
        await stream.close()
        await nothing_under_way(store)
    assert len(set(places)) == 1


async def test_the_load_of_an_answer_is_given_back_before_its_end(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    epp = await start_epp(store, loads_ms=10_000)
    first = None
    for end in ("body", "event", "trailers", "headers"):
        stream = epp.stream()
        place = destinations(await stream.ask(TOKENS, "/v1/completions"))[0]
        await stream.request_back()
        assert set(await loads(store)) == {place}
        await stream.answered(is_end=end == "headers")
        if end == "body":
            await stream.content(b"x", is_end=True)
        elif end == "event":
            await stream.content(b"data: [DONE]\n\n")
        elif end == "trailers":
            await stream.content(b"x")
            await stream.send(response_trailers=pb.HttpTrailers())
            await stream.receive()
        assert await loads(store) == {}
        first = first or place
        assert place == first, "the next turn finds it idle, without another reading of the loads"


async def test_an_answer_names_who_gave_it(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    epp = await start_epp(store)
    names = {place: name for name, place in pods.items()}
    for served in (None, 1):
        stream = epp.stream()
        places = destinations(await stream.ask(CHAT))
        await stream.request_back()
        place = places[served or 0]
        said = await stream.answered(served=place)
        assert said["x-decoder-host-port"] == place
        assert base64.b64decode(said["x-session-token"]).decode() == names[place]
        assert said["x-waymark-decision"]
        assert "x-prefiller-host-port" not in said
        again = epp.stream()
        assert destinations(await again.ask(CHAT, x_session_token=said["x-session-token"]))[0] == place


async def test_an_engine_says_nothing_in_our_name(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    stream = (await start_epp(store)).stream()
    place = destinations(await stream.ask(CHAT))[0]
    await stream.request_back()
    ours = ["x-session-token", "x-decoder-host-port", "x-waymark-decision"]
    removed = [
        "x-waymark-engine", "X-Waymark-Other", "x-cache", "x-cache-key", "x-prefiller-host-port",
        "mif-prefill-endpoint", "x-kv-cache-source-host-port", "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
    ]  # fmt: skip
    forged = [*ours, *removed, "x-cached", "content-type"]
    said = await stream.answered(forged=dict.fromkeys(forged, "forged"), removed=[name.lower() for name in removed])
    assert said.keys() == set(ours), "an engine's are replaced"
    assert said["x-decoder-host-port"] == place
    assert "forged" not in said.values()


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:8000"], ["10.0.0.2:8000", "10.0.0.3:8000"], ["10.6.6.6:1", ""]])
@pytest.mark.parametrize("body", ["text", "tokens", "none"])
async def test_only_the_subset_is_picked_from(
    store: Store, pods: dict[str, str], start_epp: StartEpp, subset: list[str], body: str
) -> None:
    stream = (await start_epp(store)).stream()
    token = base64.b64encode(b"pod-1").decode()
    if body == "none":
        await stream.headers("/v1/models", is_end=True, subset=subset)
        answer = await stream.receive()
    elif body == "text":
        answer = await stream.ask(CHAT, subset=subset, x_session_token=token)
    else:
        answer = await stream.ask(TOKENS, "/v1/completions", subset=subset)
    if set(subset) & set(pods.values()):
        assert sorted(destinations(answer)) == subset
    else:
        assert refused(answer)[0] == 503


@pytest.mark.parametrize("said_by", ["served", "upstream"])
async def test_the_reservation_moves_to_the_fallback_that_served(
    store: Store, pods: dict[str, str], start_epp: StartEpp, said_by: str
) -> None:
    stream = (await start_epp(store)).stream()
    first, second, third = destinations(await stream.ask(CHAT))
    await stream.request_back()
    assert set(await loads(store)) == {first}
    forged = {"x-gateway-destination-endpoint-served": third}
    says: dict[str, Any] = {said_by: second}
    await stream.answered(forged=forged, removed=list(forged), **says)

    async def has_moved() -> bool:
        return set(await loads(store)) == {second}

    await wait_until(has_moved, "the fallback has it")
    await stream.content(b"x", is_end=True)
    await nothing_under_way(store)


async def test_an_engine_does_not_say_that_another_one_served(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    """Its own load and its failures would count as the other's."""
    stream = (await start_epp(store)).stream()
    first, second, _ = destinations(await stream.ask(CHAT))
    await stream.request_back()
    forged = {"x-gateway-destination-endpoint-served": second}
    said = await stream.answered(forged=forged, removed=list(forged))
    assert said["x-decoder-host-port"] == first
    assert set(await loads(store)) == {first}


@pytest.mark.parametrize("when", ["body", "picked", "answered"])
async def test_a_client_that_goes_away_leaves_nothing(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics, when: str
) -> None:
    stream = (await start_epp(store)).stream()
    if when == "body":
        await stream.headers()
        await stream.body(b'{"model"', is_end=False)
    else:
        await stream.ask(CHAT)
        await stream.request_back()
        assert len(await loads(store)) == 1
        if when == "answered":
            await stream.answered()
            await stream.content(b"data: a\n\n")
    stream.cancel()
    await nothing_under_way(store)
    await wait_until(lambda: metrics.epp_streams.value == 0, "its stream has ended")
    assert metrics.epp_bodies_bytes.value == 0
    outcomes = [(load.ok, load.failed) for load in (await store.reservations.loads(1)).values()]
    assert outcomes == {"body": [], "picked": [(0, 0)], "answered": [(1, 0)]}[when], "only an answer says something"


async def health(store: Store, place: str) -> float:
    group_loads = await store.reservations.loads(1)
    table = await store.reader.table(GroupName("default", "llama"))
    assert table is not None
    return group_loads[next(n for n, t in table.targets.items() if t.address == f"http://{place}")].health


@pytest.mark.parametrize(("status", "expected"), [(200, 1.0), (429, 1.0), (404, 1.0), (500, 0.5), (503, 0.5)])
async def test_a_status_of_an_engine_counts_for_its_health(
    store: Store, pods: dict[str, str], start_epp: StartEpp, status: int, expected: float
) -> None:
    stream = (await start_epp(store)).stream()
    place = destinations(await stream.ask(CHAT))[0]
    await stream.request_back()
    await stream.answered(status)
    await stream.content(b"x", is_end=True)
    await nothing_under_way(store)
    assert await health(store, place) == expected


# ---- refusals ----------------------------------------------------------------------------------------


async def test_without_targets_it_is_503_and_saturated_429(store: Store, start_epp: StartEpp, metrics: Metrics) -> None:
    epp = await start_epp(store, target_requests_max=1)
    status, said = refused(await epp.stream().ask(CHAT))
    assert (status, said["error"]["code"]) == (503, "no_target")
    await register(store, "pod-1")
    busy = epp.stream()
    destinations(await busy.ask(CHAT))
    answer = await epp.stream().ask(CHAT)
    status, said = refused(answer)
    assert (status, said["error"]["code"]) == (429, "saturated")
    assert answer.immediate_response.details == "waymark_saturated"
    counted = {name: metrics.epp_requests.labels(outcome=name).value for name in ("picked", "saturated", "no_target")}
    assert counted == {"picked": 1, "saturated": 1, "no_target": 1}


async def test_before_enough_engines_it_is_503(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    epp = await start_epp(store, min_initial_workers=4)
    status, said = refused(await epp.stream().ask(CHAT))
    assert (status, said["error"]["code"]) == (503, "starting")


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/chat/completions", b"no json", "no JSON"),
        ("/v1/chat/completions", b"", "no JSON"),
        ("/v1/chat/completions", b"{}", "names no model"),
        ("/v1/chat/completions", b"[1]", "no JSON object"),
        ("/v1/messages", b'{"model": 7}', "must be a text"),
    ],
)
async def test_a_body_that_names_no_model_is_400_in_the_shape_of_its_path(
    store: Store, pods: dict[str, str], start_epp: StartEpp, path: str, body: bytes, word: str
) -> None:
    stream = (await start_epp(store)).stream()
    await stream.headers(path)
    await stream.body(body)
    status, said = refused(await stream.receive())
    assert status == 400
    assert word in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"
    assert (said.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tts"])
@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (b"[" * DEPTH_MAX + b"]" * DEPTH_MAX, "lists or objects within each other"),
        (b"[" + b"[]," * PARTS_MAX + b"[]]", "lists, objects or members of objects"),
    ],
)
async def test_a_body_of_too_many_or_too_deep_lists_is_400(
    store: Store, pods: dict[str, str], start_epp: StartEpp, path: str, value: bytes, bound: str
) -> None:
    running = await start_epp(store)
    answer = await running.stream().ask(b'{"model": "llama", "input": %b}' % value, path)
    status, error = refused(answer)
    assert status == 400
    assert bound in error["error"]["message"]
    assert await loads(store) == {}


async def test_a_body_above_the_bound_is_413_and_too_many_bytes_at_once_503(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store, bodies=(1000, 1500))
    large, waiting, other = epp.stream(), epp.stream(), epp.stream()
    assert refused(await large.ask(b"x" * 2000))[0] == 413
    await waiting.headers()
    await waiting.body(b"x" * 900, is_end=False)
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 900, "its bytes are held")
    assert refused(await other.ask(b"x" * 1000))[0] == 503, "it would be the largest"
    waiting.cancel()
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 0, "nothing is held")
    assert destinations(await epp.stream().ask(CHAT))


async def test_at_the_bound_of_all_bodies_the_largest_gives_way(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store, bodies=(7500, 60 * 7000))
    greedy = [epp.stream() for _ in range(60)]
    for stream in greedy:
        await stream.headers()
        await stream.body(b"x" * 7000, is_end=False)
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 60 * 7000, "the bound is reached")
    slow = epp.stream()
    await slow.headers()
    await slow.body(b'{"model": "llama", ', is_end=False)
    for _ in range(100):
        assert destinations(await epp.stream().ask(CHAT))
    assert metrics.epp_bodies_bytes.value > 50 * 7000, "few have given way"
    await slow.body(b'"prompt": [1, 2, 3], "messages": []}')
    assert destinations(await slow.receive())
    answers = [asyncio.ensure_future(stream.receive()) for stream in greedy]
    done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert {refused(answer.result())[0] for answer in done} == {503}
    for stream in greedy:
        stream.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 0, "nothing is held")


async def whole_answer(stream: Stream, start: bytes) -> None:
    """The headers and the beginning of an answer that is one JSON object."""
    destinations(await stream.ask(CHAT))
    await stream.request_back()
    headers = header_map({":status": "200", "content-type": "application/json; charset=utf-8"})
    await stream.send(response_headers=pb.HttpHeaders(headers=headers))
    await stream.send(response_body=pb.HttpBody(body=start))


async def test_a_whole_answer_is_sent_on_when_all_of_it_is_there(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store)
    stream, left = epp.stream(), epp.stream()
    await whole_answer(left, b"123")
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 3, "it is held")
    left.cancel()
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 0, "its client is gone, nothing is held")
    await whole_answer(stream, b'{"a":')
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 5, "it is held")
    await stream.send(response_body=pb.HttpBody(body=b"1}", end_of_stream=True))
    assert (await stream.receive()).WhichOneof("response") == "response_headers"
    sent = [(await stream.receive()).response_body.response.body_mutation.streamed_response for _ in range(2)]
    assert [(each.body, each.end_of_stream) for each in sent] == [(b'{"a":', False), (b"1}", True)]
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 0, "nothing is held any more")
    await stream.close()
    await nothing_under_way(store)


async def test_a_whole_answer_above_the_bound_goes_on_as_it_comes(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    stream = (await start_epp(store, bodies=(1000, 1500))).stream()
    await whole_answer(stream, b"x" * 900)
    await stream.send(response_body=pb.HttpBody(body=b"y" * 200))
    assert (await stream.receive()).WhichOneof("response") == "response_headers"
    sent = [(await stream.receive()).response_body.response.body_mutation.streamed_response.body for _ in range(2)]
    assert sent == [b"x" * 900, b"y" * 200]
    await wait_until(lambda: metrics.epp_bodies_bytes.value == 0, "nothing is held")
    assert await stream.content(b"z") == b"z", "the rest is not held either"
    assert await stream.content(b"", is_end=True) == b""
    await stream.close()


# ---- other requests and other modes ------------------------------------------------------------------


async def test_a_request_without_a_body_goes_to_any_target(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    epp = await start_epp(store)
    found: Counter[str] = Counter()
    for _ in range(3):
        stream = epp.stream()
        await stream.headers("/v1/models", is_end=True)
        found[destinations(await stream.receive())[0]] += 1
    assert found == dict.fromkeys(pods.values(), 1)
    stream = epp.stream()
    assert destinations(await stream.ask(b"--boundary, no json", "/v1/audio/transcriptions"))


async def test_a_form_with_a_file_goes_to_an_engine_of_its_model(store: Store, start_epp: StartEpp) -> None:
    await register(store, "pod-1")
    await register(store, "pod-2", model="whisper")
    epp = await start_epp(store)
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n'
    for model, place in (("llama", PLACES["pod-1"]), ("whisper", PLACES["pod-2"])):
        body = file + b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--x--\r\n' % model.encode()
        stream = epp.stream()
        answer = await stream.ask(body, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
        assert destinations(answer) == [place]
        assert await stream.request_back() == body
    without = file + b"--x--\r\n"
    answer = await epp.stream().ask(without, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
    assert destinations(answer), "to any target"


async def test_a_session_token_names_its_instance(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    epp = await start_epp(store)
    token = base64.b64encode(b"pod-2").decode()
    for _ in range(3):
        stream = epp.stream()
        assert destinations(await stream.ask(CHAT, x_session_token=token))[0] == pods["pod-2"]


async def test_a_buffered_body_is_picked_for_in_its_own_answer(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    stream = (await start_epp(store)).stream()
    await stream.headers("/v1/completions", modes=("BUFFERED", "NONE"))
    assert (await stream.receive()).request_headers == pb.HeadersResponse()
    await stream.body(b'{"model": "llama", "prompt": [1, 2]}')
    answer = await stream.receive()
    assert answer.WhichOneof("response") == "request_body"
    assert destinations(answer)
    await stream.answered()
    await stream.close()
    await nothing_under_way(store)


async def test_a_mode_that_cannot_hold_a_body_is_named(store: Store, pods: dict[str, str], start_epp: StartEpp) -> None:
    stream = (await start_epp(store)).stream()
    await stream.headers(modes=("STREAMED", "NONE"))
    status, said = refused(await stream.receive())
    assert (status, "FULL_DUPLEX_STREAMED" in said["error"]["message"]) == (500, True)


async def test_targets_of_two_stages_are_named_in_headers(store: Store, start_epp: StartEpp, tmp_path: Any) -> None:
    for name, role in (("pod-1", "prefill"), ("pod-2", "decode")):
        await register(store, name, role=Role(role))
    (tmp_path / "picker.yaml").write_text(
        """
plugins:
- type: disagg-headers-handler
- type: prefill-filter
- type: decode-filter
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 16}
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}]
- name: decode
  plugins: [{pluginRef: decode-filter}]
"""
    )
    epp = await start_epp(store, policy=str(tmp_path / "picker.yaml"))
    answer = await epp.stream().ask(TOKENS, "/v1/completions")
    assert destinations(answer) == ["10.0.0.2:8000"]
    assert mutation(answer.request_headers.response)["x-prefiller-host-port"] == "10.0.0.1:8000"
    assert set(await loads(store)) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    stream = epp.streams[-1]
    await stream.request_back()
    said = await stream.answered()
    assert (said["x-decoder-host-port"], said["x-prefiller-host-port"]) == ("10.0.0.2:8000", "10.0.0.1:8000")


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_what_a_client_says_of_engines_does_not_reach_them(
    store: Store, pods: dict[str, str], start_epp: StartEpp, mode: str
) -> None:
    stream = (await start_epp(store)).stream()
    place = "10.6.6.6:1"
    forged: dict[str, Any] = {
        "X_KV_Cache_Source_Host_Port": place,
        "x_prefiller_host_port": place,
        "mif_prefill_endpoint": place,
    }
    forged |= {"x_gateway_destination_endpoint": place}
    await stream.headers("/v1/completions", modes=(mode, "NONE"), traceparent="00-1", **forged)
    await stream.body(json.dumps(TOKENS).encode())
    answer = await stream.receive()
    if mode == "BUFFERED":
        assert answer.request_headers == pb.HeadersResponse()
        answer = await stream.receive()
    assert place not in destinations(answer), "it is set in place of the client's"
    common = (answer.request_body if mode == "BUFFERED" else answer.request_headers).response
    removed = {"x-kv-cache-source-host-port", "x-prefiller-host-port", "mif-prefill-endpoint"}
    assert set(common.header_mutation.remove_headers) == removed


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_body_that_names_an_engine_to_copy_from_is_refused(
    store: Store, pods: dict[str, str], start_epp: StartEpp, path: str
) -> None:
    epp = await start_epp(store)
    for body in ({**TOKENS, "kv_transfer_params": {"remote_host": "10.0.0.1"}}, {"bootstrap_host": "10.0.0.1"}):
        answer = await epp.stream().ask(body, path)
        assert answer.immediate_response.status.code == 400
        assert b"where to copy blocks from" in answer.immediate_response.body


# ---- peers that do not behave ------------------------------------------------------------------------


async def test_a_request_that_never_ends_is_cut(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store, request_seconds=0.2)
    stream = epp.stream()
    await stream.headers()
    await stream.body(b"{", is_end=False)
    assert await stream.status() == grpc.StatusCode.DEADLINE_EXCEEDED
    exported = metrics.render()[0].decode()
    assert 'waymark_epp_streams_cut_total{reason="late"} 1.0' in exported
    assert "waymark_epp_bodies_bytes 0.0" in exported
    silent = epp.stream()
    assert await silent.status() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_answer_that_never_ends_is_cut(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store, idle_seconds=0.3)
    stream = epp.stream()
    destinations(await stream.ask(CHAT))
    await stream.request_back()
    assert await stream.status() == grpc.StatusCode.DEADLINE_EXCEEDED
    await nothing_under_way(store)
    assert metrics.epp_streams_cut.labels(reason="idle").value == 1


@pytest.mark.parametrize(
    "message",
    [
        {"request_body": pb.HttpBody(body=b"x")},
        {"response_headers": pb.HttpHeaders()},
        {},
    ],
)
async def test_a_stream_that_begins_with_anything_else_is_cut(
    store: Store, start_epp: StartEpp, metrics: Metrics, message: dict[str, Any]
) -> None:
    stream = (await start_epp(store)).stream()
    await stream.send(**message)
    assert await stream.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert metrics.epp_streams_cut.labels(reason="unexpected").value == 1


async def test_a_message_that_is_too_large_is_refused_and_others_go_on(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    epp = await start_epp(store)

    async def sent(size: int) -> Stream:
        """A stream that has sent a message of so many bytes."""
        stream = epp.stream()
        await stream.headers()
        body = json.dumps(CHAT).encode()
        message = pb.ProcessingRequest(request_body=pb.HttpBody(body=body.ljust(size), end_of_stream=True))
        message.request_body.body = body.ljust(2 * size - message.ByteSize())
        assert message.ByteSize() == size
        await stream.call.write(message)
        return stream

    # It is read, and its body is above another bound.
    most = 2**20 + MORE_BYTES_MAX
    assert (await (await sent(most)).receive()).immediate_response.details == "waymark_too_large"
    assert await (await sent(most + 1)).status() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert destinations(await epp.stream().ask(CHAT))


async def test_the_largest_body_may_come_in_one_message(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    most = 16 * 2**20
    epp = await start_epp(store, bodies=(most, 2 * most))
    stream = epp.stream()
    await stream.headers()
    await stream.body(json.dumps(CHAT).encode().ljust(most))
    assert destinations(await stream.receive())
    stream.cancel()


async def test_streams_that_send_nothing_give_way_to_those_of_other_connections(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    options = EppOptions("127.0.0.1", 0, None, has_tls=False, streams_max=8, drain_seconds=0.0, finish_seconds=0.0)
    epp = await start_epp(store, options=options)
    under_way = epp.stream()
    assert destinations(await under_way.ask(CHAT))
    held: list[Stream] = []
    for _ in range(7):
        held.append(epp.stream())
        await held[-1].headers()
        await wait_until(lambda: metrics.epp_streams.value == len(held) + 1, "the stream is open")
    further = [epp.stream() for _ in range(20)]
    for stream in further:  # of the same connection
        assert await stream.status() == grpc.StatusCode.RESOURCE_EXHAUSTED
    async with grpc.aio.insecure_channel(f"127.0.0.1:{epp.server.port}", options=OWN_CONNECTION) as other:
        many = [Stream(other) for _ in range(20)]
        await wait_until(lambda: sum(each.call.done() for each in many) == 17, "it has three places, and no more")
        for stream in held[:3]:
            assert await stream.status() == grpc.StatusCode.RESOURCE_EXHAUSTED, "the oldest have given way"
        assert metrics.epp_streams_cut.labels(reason="crowded").value == 3
        async with grpc.aio.insecure_channel(f"127.0.0.1:{epp.server.port}", options=[*OWN_CONNECTION, ONE]) as third:
            for _ in range(3):
                stream = Stream(third)
                assert destinations(await stream.ask(CHAT)), "a request finds its place"
                stream.cancel()
    for stream in held[-3:]:
        await stream.body(b'{"model": "llama", "prompt": [1]}')
        assert destinations(await stream.receive())
    assert await under_way.request_back(), "what is under way stays so"


BY_LATENCY = (
    "kind: EndpointPickerConfig\nplugins: [{type: predicted-latency-scorer}]\n"
    "schedulingProfiles: [{name: default, plugins: [{pluginRef: predicted-latency-scorer}]}]\n"
)


async def test_the_times_of_answers_decide_where_a_client_asks_for_some(
    store: Store, pods: dict[str, str], start_epp: StartEpp, tmp_path: Path
) -> None:
    (tmp_path / "picker.yaml").write_text(BY_LATENCY)
    epp = await start_epp(store, policy=str(tmp_path / "picker.yaml"))
    table = await store.reader.table(GroupName("default", "llama"))
    assert table is not None
    publishers = {row.instance_id: number for number, row in table.publishers.items()}
    # pod-1 begins soon and goes on slowly; pod-2 begins late and is fast.
    for name, ttft_ms, tpot_ms in (("pod-1", 50.0, 40.0), ("pod-2", 250.0, 10.0), ("pod-3", 900.0, 90.0)):
        await answered_before(store, publishers[name], ttft_ms, tpot_ms)

    async def named(**headers: str) -> str:
        stream = epp.stream()
        place = destinations(await stream.ask(TOKENS, "/v1/completions", **headers))[0]
        await stream.request_back()
        await stream.answered(is_end=True)
        await nothing_under_way(store)
        return place

    assert await named() == pods["pod-1"], "the first token counts four times as much"
    assert await named(x_slo_ttft_ms="300", x_slo_tpot_ms="20") == pods["pod-2"], "the only one in time"
    assert await named(x_slo_ttft_ms="100") == pods["pod-1"]
    assert await named(x_slo_ttft_ms="soon", x_slo_tpot_ms="-20") == pods["pod-1"], "this asks for nothing"


async def test_each_further_token_of_a_stream_is_timed(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    stream = (await start_epp(store)).stream()
    await stream.ask({**TOKENS, "stream": True}, "/v1/completions")
    await stream.request_back()
    await stream.answered()
    began = monotonic()
    await stream.content(b'data: {"choices": [{"text": "a"}]}\n\n')
    await stream.content(b'data: {"usage": {"prompt_tokens": 256, "completion_tokens": 2}}\n\n')
    await stream.content(b"data: [DONE]\n\n")
    took = monotonic() - began
    await stream.content(b"", is_end=True)
    await nothing_under_way(store)

    (timed,) = (await store.answer_times.read(1, [1, 2, 3])).values()
    assert (timed.further_tokens.requests, timed.further_tokens.work) == (1, 1)
    assert 0 < timed.further_tokens.ms <= 1000 * took
