"""Our token ids are those that real engines made of the same bodies; ``record`` and ``record_sglang`` say how."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from functools import cache
from typing import Any, Self

import pytest
from tokenizers import Tokenizer

from tests.tokenization import record_eagle, record_sglang, record_tools, record_truncation, small
from tests.tokenization.record import CALL, PARTS, RECORDED, bodies, templates
from waymark.api.query_schemas import TokenizeRequest
from waymark.api.texts import prompt_of
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.domain.events import Stored
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES, unpack_tokens
from waymark.engines import decoder
from waymark.tokenization.local import LocalTokenizer
from waymark.tokenization.prompt import ChatPrompt, Prompt
from waymark.tokenization.segments import SegmentMemo
from waymark.tokenization.templates import ChatTemplate

pytestmark = pytest.mark.slow

SESSION = json.loads(RECORDED.read_text(encoding="utf-8"))
SGLANG = json.loads(record_sglang.RECORDED.read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=f"{case['template']}-{number}") for number, case in enumerate(SESSION["cases"])]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates write the date, which was another one when the engines were asked."""
    assert SESSION["date"] == SGLANG["date"], "record both on one day"

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromisoformat(SESSION["date"])

    monkeypatch.setattr("waymark.tokenization.templates.datetime", Then)


Open = Callable[..., LocalTokenizer]


@pytest.fixture(scope="module")
async def opened(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Open]:
    """Opens the tokenizer that was recorded with, which a newer release of the library may train otherwise."""
    made = []
    with ThreadPoolExecutor(1) as pool:

        @cache
        def opened(template: str | None, *, is_for_sglang: bool = False) -> LocalTokenizer:
            path = tmp_path_factory.mktemp("model")
            directory = small.directory(path, template=templates()[template or "chatml"])
            (directory / "tokenizer.json").write_text(json.dumps(SESSION["tokenizer"]))
            made.append(
                LocalTokenizer(
                    "file:///m",
                    directory,
                    SegmentMemo(2**20),
                    pool,
                    Metrics(),
                    prompts=SegmentMemo(2**20),
                    bytes_max=2**20,
                    is_for_sglang=is_for_sglang,
                )
            )
            return made[-1]

        yield opened
        for local in made:
            await local.close()


def prompt(body: dict[str, Any]) -> Prompt:
    request = TokenizeRequest.of(body | {"model": "m"})
    found = prompt_of(GroupName("default", "m"), request, missing="prompt")
    assert found is not None
    return found.prompt


def test_what_was_recorded_is_what_would_be_asked() -> None:
    assert [(case["template"], case["body"]) for case in SESSION["cases"]] == bodies()


@pytest.mark.parametrize("case", CASES)
async def test_the_ids_are_those_of_the_engine(case: dict[str, Any], opened: Open) -> None:
    local = opened(case["template"])
    if case["status"] != 200:
        with pytest.raises(InvalidValue):
            await local.tokens(prompt(case["body"]))
        return
    expected = case["tokenize"]["tokens"]
    for _ in range(2):  # encoded, and remembered
        assert unpack_tokens((await local.tokens(prompt(case["body"]))).ids) == expected
    if case["render"]["status"] == 200:
        assert case["render"]["token_ids"] == expected


# ---- SGLang ----------------------------------------------------------------------------------------


def difference(case: dict[str, Any]) -> str | None:
    """Why SGLang has other ids than vLLM, and so than Waymark; None where it has the same."""
    body, template = case["body"], case["template"]
    if "message" in case["tokenize"]:
        return "it refuses the body"
    if "messages" in body and body.get("add_special_tokens"):
        return "it adds no special tokens to messages"
    if PARTS in body.get("messages", ()) and template != "gemma3":
        return "it joins the parts of a content by a blank"
    if "tools" in body and template in ("llama3", "qwen3"):
        return "it writes defer_loading into each tool"
    if CALL in body.get("messages", ()) and template == "mistral":
        return "it writes the name of a call before its arguments"
    return None


SGLANG_CASES = [pytest.param(case, id=f"{case['template']}-{number}") for number, case in enumerate(SGLANG["cases"])]


@pytest.mark.parametrize("case", SGLANG_CASES)
async def test_the_ids_are_those_of_sglang_where_it_serves_the_model(case: dict[str, Any], opened: Open) -> None:
    if "message" in case["tokenize"]:
        return  # its handler refuses the body
    local = opened(case["template"], is_for_sglang=True)
    for _ in range(2):  # encoded, and remembered
        assert unpack_tokens((await local.tokens(prompt(case["body"]))).ids) == case["tokenize"]["tokens"]


@pytest.mark.parametrize("case", SGLANG_CASES[: len(bodies())])
async def test_the_ids_are_those_of_sglang_or_it_is_known_why_not(case: dict[str, Any], opened: Open) -> None:
    local = opened(case["template"])
    why, expected = difference(case), case["tokenize"].get("tokens")
    if expected is None:
        assert why == "it refuses the body"
        return
    ids = unpack_tokens((await local.tokens(prompt(case["body"]))).ids)
    assert (ids == expected) == (why is None), why


def test_what_was_recorded_of_sglang_is_what_would_be_asked() -> None:
    assert [(case["template"], case["body"]) for case in SGLANG["cases"]] == record_sglang.all_bodies()
    both = SGLANG["cases"][: len(bodies())]
    assert sum(difference(case) is None for case in both) > len(both) / 2


# ---- truncation ------------------------------------------------------------------------------------

TRUNCATION = json.loads(record_truncation.RECORDED.read_text(encoding="utf-8"))["cases"]


def truncating(case: dict[str, Any]) -> list[Prompt]:
    """The bodies of a case: its text and, where it is what a template makes, the messages."""
    fields = {name: case[name] for name in ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")}
    bodies = [{"prompt": case["text"]}]
    if case["text"] == record_truncation.CHAT:
        bodies.append({"messages": [{"role": "user", "content": record_truncation.TEXT}]})
    return [prompt(body | fields) for body in bodies]


@pytest.mark.parametrize("case", TRUNCATION)
async def test_a_prompt_is_cut_as_the_engine_cuts_it(case: dict[str, Any], opened: Open) -> None:
    local = opened(None)
    for each in truncating(case):
        for _ in range(2):  # encoded, and remembered
            assert unpack_tokens((await local.tokens(each)).ids) == case["ids"]


async def test_sglang_cuts_nothing(opened: Open) -> None:
    local = opened(None, is_for_sglang=True)
    for text, adds in ((record_truncation.TEXT, True), (record_truncation.CHAT, False)):
        cases = [case for case in TRUNCATION if (case["text"], case["add_special_tokens"]) == (text, adds)]
        whole = max((case["ids"] for case in cases), key=len)
        for case in cases:
            for each in truncating(case):
                assert unpack_tokens((await local.tokens(each)).ids) == whole


def test_the_truncations_that_were_recorded_are_those_that_would_be() -> None:
    assert [{name: case[name] for name in case if name != "ids"} for case in TRUNCATION] == record_truncation.CASES


# ---- EAGLE -----------------------------------------------------------------------------------------

EAGLE = json.loads(record_eagle.RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", EAGLE["cases"], ids=lambda case: f"prompt-{case['number']}")
async def test_blocks_of_pairs_are_those_of_the_text(case: dict[str, Any], opened: Open) -> None:
    """SGLang with EAGLE publishes pairs of tokens; a text finds each block of them, and no other."""
    asked, page = SGLANG["cases"][case["number"]], EAGLE["page"]
    (stored,) = decoder(EngineKind.SGLANG, seed=0)(base64.b64decode(case["payload"])).events
    assert isinstance(stored, Stored)
    ids = (await opened(asked["template"], is_for_sglang=True).tokens(prompt(asked["body"]))).ids
    held, wanted = (block_keys(None, each, page, namespace=namespace(None, [])) for each in (stored.tokens, ids))
    assert wanted.startswith(held)
    # The last token has no pair yet.
    assert len(held) // KEY_BYTES == len(stored.engine_hashes) == (len(ids) // 4 - 1) // page


def test_what_was_recorded_with_eagle_is_what_would_be_stored() -> None:
    assert tuple(case["number"] for case in EAGLE["cases"]) == record_eagle.CASES
    lengths = [len(SGLANG["cases"][number]["tokenize"]["tokens"]) for number in record_eagle.CASES]
    assert {length % EAGLE["page"] for length in lengths} >= {0, 1}


# ---- tools -----------------------------------------------------------------------------------------


TOOLS_OF_VLLM, TOOLS_OF_SGLANG = (
    json.loads(path.read_text(encoding="utf-8"))["cases"]
    for path in (record_tools.RECORDED, record_tools.RECORDED_OF_SGLANG)
)


@pytest.mark.parametrize(
    ("case", "is_for_sglang"),
    [*((case, False) for case in TOOLS_OF_VLLM), *((case, True) for case in TOOLS_OF_SGLANG)],
)
def test_a_template_gets_tools_as_the_engine_writes_them(case: dict[str, Any], is_for_sglang: bool) -> None:
    source = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    template = ChatTemplate(source, {}, bytes_max=2**16, is_for_sglang=is_for_sglang)
    text = template.render(ChatPrompt([{"role": "user", "content": "Hi"}], tools=[case["tool"]]))
    assert text == json.dumps(case["shown"]), "each null and each place is in the prompt"


def test_the_tools_that_were_recorded_are_those_that_would_be() -> None:
    for cases in (TOOLS_OF_VLLM, TOOLS_OF_SGLANG):
        assert [case["tool"] for case in cases] == record_tools.TOOLS


@pytest.mark.parametrize("tool", ["now", {"name": "now", "input_schema": {}}, {"type": "function"}, None])
def test_a_tool_of_another_form_stays_as_it_is(tool: Any) -> None:
    template = ChatTemplate("{{ tools[0] | tojson }}", {}, bytes_max=2**16)
    assert template.render(ChatPrompt([], tools=[tool])) == json.dumps(tool)


async def test_a_tokenizer_that_adds_no_bos_differs_and_is_seen(opened: Open) -> None:
    """What differs where the directory is not that of the engine: one of them adds a BOS and the other does not."""
    local = opened(None)
    other = json.dumps(SESSION["tokenizer"] | {"post_processor": None})
    case = next(case for case in SESSION["cases"] if case["body"] == {"prompt": "Hello, world!"})
    whole = Tokenizer.from_str(other).encode("Hello, world!").ids
    assert case["tokenize"]["tokens"] == [small.tokenizer().token_to_id(small.BOS), *whole]
    assert unpack_tokens((await local.tokens(prompt(case["body"]))).ids) != whole
