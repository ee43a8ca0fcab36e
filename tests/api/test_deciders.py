"""Each decider of an ``EndpointPickerConfig``, asked over HTTP, over an emulated and a real Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.api.test_decisions import PROMPT, Register, post, scores
from tests.conftest import wait_until
from waymark.store.store import Store

Configured = Callable[[str, str], Awaitable[httpx.AsyncClient]]

IMAGE = {"mm_hashes": {"image": ["a" * 64]}, "mm_placeholders": {"image": [{"offset": 4, "length": 8}]}}


@pytest.fixture
def configured(store: Store, make_client: MakeClient, tmp_path: Path) -> Configured:
    """A replica that goes by a file in which one stage has a decider."""

    async def configured(stage: str, decider: str) -> httpx.AsyncClient:
        file = tmp_path / "picker.yaml"
        file.write_text(f"""
kind: EndpointPickerConfig
plugins:
- type: disagg-headers-handler
- {decider}
- type: {stage}-filter
- type: decode-filter
- type: active-request-scorer
- type: disagg-profile-handler
  parameters: {{deciders: {{{stage}: the-decider}}}}
schedulingProfiles:
- name: {stage}
  plugins: [{{pluginRef: {stage}-filter}}, {{pluginRef: active-request-scorer}}]
- name: decode
  plugins: [{{pluginRef: decode-filter}}, {{pluginRef: active-request-scorer}}]
""")
        return await make_client(store, policy=str(file))

    return configured


async def register_stages(register: Register, stage: str) -> None:
    await register(stage, role=stage, address=f"http://{stage}:8000")
    await register("decode", role="decode", address="http://decode:8000")


def _places(answer: dict[str, Any]) -> tuple[str | None, list[str], str]:
    """Who prefills, who encodes and who decodes."""
    prefill = answer["prefill"] and answer["prefill"]["instance_id"]
    return prefill, [each["instance_id"] for each in answer["encode"]], answer["target"]["instance_id"]


async def test_prefill_is_apart_by_what_decode_has_not_cached(
    configured: Configured, register: Register, hold: Hold
) -> None:
    await register_stages(register, "prefill")
    decider = "{name: the-decider, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}"
    client = await configured("prefill", decider)
    apart = await post(client, "/select")
    assert _places(apart) == ("prefill", [], "decode")
    assert apart["headers"]["x-prefiller-host-port"] == "prefill:8000"
    assert len(apart["reservation"].split(",")) == 2
    rows = await scores(client, policy="least-work")
    assert {name: (row["wait_tokens"], row["active_requests"]) for name, row in rows.items()} == {
        "prefill": (40, 1),
        "decode": (0, 1),
    }
    assert await post(client, "/release", reservation=apart["reservation"]) == {"released": 2, "gone": 0}

    await hold("decode", PROMPT[:24])
    assert _places(await post(client, "/select"))[0] == "prefill", "16 tokens are left, as many as the file asks for"
    await hold("decode", PROMPT[:26])

    async def is_one_stage() -> bool:
        answer = await post(client, "/select")
        return _places(answer) == (None, [], "decode") and "x-prefiller-host-port" not in answer["headers"]

    await wait_until(is_one_stage, "14 tokens are left")
    assert _places(await post(client, "/select", profile="single"))[0] is None
    assert _places(await post(client, "/select", policy="least-work"))[0] is None


async def test_prefill_is_never_apart_where_the_file_says_0(configured: Configured, register: Register) -> None:
    await register_stages(register, "prefill")
    client = await configured(
        "prefill", "{name: the-decider, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 0}}"
    )
    assert _places(await post(client, "/select")) == (None, [], "decode")


async def test_prefill_is_always_apart(configured: Configured, register: Register, hold: Hold) -> None:
    await register_stages(register, "prefill")
    client = await configured("prefill", "{name: the-decider, type: always-disagg-pd-decider}")
    await hold("decode", PROMPT)
    assert _places(await post(client, "/select")) == ("prefill", [], "decode")
    assert _places(await post(client, "/select", token_ids=[1])) == ("prefill", [], "decode")


async def test_both_stages_are_expected_to_have_the_prompt_where_the_file_asks_for_it(
    configured: Configured, register: Register
) -> None:
    await register_stages(register, "prefill")
    scorer = "{type: precise-prefix-cache-scorer, parameters: {speculativeIndexing: true, speculativeTTL: 10m}}"
    by_file = await configured("prefill", f"{{name: the-decider, type: always-disagg-pd-decider}}\n- {scorer}")
    assert _places(await post(by_file, "/select")) == ("prefill", [], "decode")
    again = await post(by_file, "/select")
    assert (again["prefill"]["expected_tokens"], again["target"]["expected_tokens"]) == (40, 40)
    rows = (await post(by_file, "/score", policy="least-work"))["scores"]
    assert {row["expected_tokens"] for row in rows} == {0}, "of a policy by name the settings say it"


async def test_requests_with_images_are_encoded_first(configured: Configured, register: Register) -> None:
    await register_stages(register, "encode")
    client = await configured("encode", "{name: the-decider, type: always-disagg-multimodal-decider}")
    assert _places(await post(client, "/select")) == (None, [], "decode")
    with_image = await post(client, "/select", features=IMAGE)
    assert _places(with_image) == (None, ["encode"], "decode")
    assert with_image["headers"]["mif-encode-endpoints"] == "encode:8000"
    assert with_image["headers"]["x-encoder-hosts-ports"] == "encode:8000"
    # Nothing renders the image, so the prompt has no tokens.
    content = [{"type": "image_url", "image_url": {"url": "https://10.0.0.9/cat.png"}}]
    messages = [{"role": "user", "content": content}]
    without_tokens = await post(client, "/select", token_ids=..., messages=messages)
    assert _places(without_tokens) == (None, ["encode"], "decode")
