"""Keys of blocks in an object store: hashes as the engines compute them, in the forms of a registration."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from waymark.domain.hashing import namespace
from waymark.domain.pool_keys import (
    FORMS_MAX,
    KEYS_MAX,
    AskedPrompt,
    KeyForms,
    PromptIds,
    are_forms,
    key_forms,
    page_hashes,
    sglang_forms,
)

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
SIZE = 4


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def forms_of(*texts: str) -> KeyForms:
    found = key_forms(texts)
    assert found is not None, texts
    return found


def recorded(name: str) -> list[str]:
    frames = json.loads((WIRE / name).read_text(encoding="utf-8"))["frames"]
    return [event for frame in frames for event in frame["meaning"]]


def test_pages_are_named_as_sglang_names_them() -> None:
    """The hashes of a captured session of SGLang 0.5.23: the first 64 bits, signed."""
    hashes = page_hashes(packed(*range(100, 112)), SIZE)
    named = [int.from_bytes(bytes.fromhex(each)[:8], "big", signed=True) for each in hashes]
    assert str(named) in recorded("sglang_0.5.23_session.json")[1]


@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_blocks_are_named_as_vllm_names_them(salt: str | None) -> None:
    """The hashes of a captured session of vLLM 0.33, which ran with sha256_cbor: the low 64 bits."""
    said = f"extra_keys=[{None if salt is None else (salt,)}, None, None]"
    (told, *_) = [event for event in recorded("vllm_0.33_session.json") if said in event]
    ids = PromptIds(packed(*range(100, 112)), namespace(None, [] if salt is None else [salt]))
    hashes = forms_of("{sha256_cbor}").hashes(AskedPrompt(ids, SIZE, "m", salt))
    low = [int(each[16 * 3 :], 16) for each in hashes]
    assert f"block_hashes={low}" in told


def test_long_blocks_and_every_width_of_a_token_have_a_hash() -> None:
    """Hashes of the two functions, computed apart from this code with cbor2 and pickle."""
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1] * 40
    prompt = AskedPrompt(PromptIds(packed(*tokens), 0), 320, "m")
    cbor, pickled, seeded = (list(forms_of(text).hashes(prompt)) for text in EXPECTED)
    assert [cbor, pickled, seeded] == [[each] for each in EXPECTED.values()]


EXPECTED = {
    "{sha256_cbor}": "fb0f81fc059761e24c5e70a487d0815ed80f5feac8003a4257ab84403e013d6e",
    "{sha256}": "c4fa5b70cf9104ae33390010cb42514d87e4fe3d8617d9f3324d227712ee2105",
    "{sha256:0}": "9c426128e0f8c61151f7f057dd4e7fbddd7321277f2f4c43835bf5c81622c696",
}


@pytest.mark.parametrize(
    "texts",
    [
        [""],
        ["k"],
        ["{page}{page}"],
        ["{page}_k", "{sha256}"],
        ["{sha256:1},{sha256:2}"],
        ["{page:1}"],
        ["{hash}"],
        ["{page}_k,"],
        ["{page} k"],
        ["{{page}}"],
        ["{page}é"],
        ["{page}" + "x" * 251],
        ["{page}"] * (FORMS_MAX + 1),
        [",".join(f"{n}{{page}}" for n in range(KEYS_MAX + 1))],
        [],
    ],
)
def test_texts_that_are_no_forms(texts: list[str]) -> None:
    assert not are_forms(texts)


def test_a_form_has_all_its_keys() -> None:
    forms = forms_of("a@{sha256:7}@0,b/{sha256:7}", "{sha256:7}")
    assert (forms.scheme, forms.seed, forms.size) == ("sha256", "7", 3)
    assert forms.keys("ff") == [["a@ff@0", "b/ff"], ["ff"]]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"parts": 0}, ["org-m_{page}_0_k", "org-m_{page}__k", "{page}_0_k", "{page}__k"]),
        ({"parts": 1}, ["org-m_{page}__k", "{page}__k"]),
        ({"parts": 2, "tag": "t"}, ["t_org-m_{page}_0_k,t_org-m_{page}_0_v", "t_{page}_0_k,t_{page}_0_v"]),
        ({"parts": 1, "model": "a,b"}, ["{page}__k"]),
        ({"parts": 1, "model": "{x}"}, ["{page}__k"]),
    ],
)
def test_keys_of_sglang(given: dict[str, Any], texts: list[str]) -> None:
    found = sglang_forms(**{"model": "org/m"} | given)
    assert list(found) == texts
    assert key_forms(found) is not None


def test_more_parts_than_a_request_has_keys_are_not_asked_for() -> None:
    assert key_forms(sglang_forms("m", KEYS_MAX // 2)) is not None
    assert key_forms(sglang_forms("m", KEYS_MAX + 2)) is None


def test_a_hash_has_64_digits() -> None:
    prompt = AskedPrompt(PromptIds(packed(*range(9)), 0), SIZE, "m")
    for text in ("{page}", "{sha256}", "{sha256_cbor}"):
        hashes = list(forms_of(text).hashes(prompt))
        assert len(set(hashes)) == prompt.blocks == 2
        assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in hashes)
