"""The prompts of a request: their tokens, their keys, and the load of all of its sequences."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from waymark.base import native
from waymark.base.bounded_json import VALUES_MAX, TooMuchJson, bounded_loads
from waymark.base.errors import InvalidValue
from waymark.chat.requests import Form, InferenceRequest, PackedTokens, Truncation, read_request
from waymark.decide.request_prompts import (
    SEQUENCES_MAX,
    RequestPrompts,
    SequenceLoad,
    estimate_tokens,
    further_sequences,
    no_prompt,
    read_fields,
    unread_prompt,
)
from waymark.decide.served import PromptOptions, ServedModel
from waymark.domain.hashing import DEFAULT_SEED, block_keys, namespace
from waymark.domain.names import GroupName
from waymark.domain.packing import pack_tokens
from waymark.tokenization.prompt import ChatPrompt, SourcedTokens, TextPrompt
from waymark.tokenization.tokenizers import Tokenizers

SERVED = ServedModel(GroupName("default", "m"))
MESSAGES = [{"role": "user", "content": "hello"}]


class Recorded:
    """A tokenizer that makes a token of each character, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str]] = []

    async def tokens(self, model: str, prompt: Any, tenant_id: str) -> SourcedTokens:
        self.asked.append((model, prompt, tenant_id))
        return SourcedTokens(pack_tokens([7]), "local")


def prompts_of(recorded: Recorded | None = None, **options: Any) -> RequestPrompts:
    return RequestPrompts(cast(Tokenizers, recorded or Recorded()), PromptOptions(**options))


# ---- tokens ----------------------------------------------------------------------------------------


async def test_a_conversation_is_asked_for_with_everything_that_its_template_needs() -> None:
    recorded = Recorded()
    request = InferenceRequest(
        "m",
        messages=MESSAGES,
        system="be kind",
        tools=[{"type": "function"}],
        template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        truncation=Truncation(5),
    )
    found = await prompts_of(recorded).tokens(request, ServedModel(GroupName("acme", "base"), "adapter"))

    assert [each.ids for each in found] == [pack_tokens([7])]
    prompt = ChatPrompt(
        MESSAGES, [{"type": "function"}], {"enable_thinking": False}, False, True, True, "be kind", Truncation(5)
    )
    assert recorded.asked == [("base", prompt, "acme")], "an adapter has the tokenizer of its model"


@pytest.mark.parametrize(("said", "adds"), [(None, True), (True, True), (False, False)])
async def test_a_text_gets_special_tokens_unless_it_says_otherwise(said: bool | None, adds: bool) -> None:
    recorded = Recorded()
    await prompts_of(recorded).tokens(InferenceRequest("m", prompts=["a"], add_special_tokens=said), SERVED)

    assert recorded.asked == [("m", TextPrompt("a", adds, None), "default")]


async def test_token_ids_need_no_tokenizer() -> None:
    recorded = Recorded()
    request = InferenceRequest("m", prompts=[[1, 2, 3], "text", [4]])
    found = await prompts_of(recorded).tokens(request, SERVED)

    assert [each.ids for each in found] == [pack_tokens([1, 2, 3]), pack_tokens([7]), pack_tokens([4])]
    assert [each.source for each in found] == ["request", "local", "request"]
    assert len(recorded.asked) == 1


async def test_token_ids_are_cut_as_the_engine_cuts_them() -> None:
    request = InferenceRequest("m", prompts=[[1, 2, 3, 4]], truncation=Truncation(2, "left"))
    (found,) = await prompts_of().tokens(request, SERVED)

    assert found.ids == pack_tokens([3, 4])


@pytest.mark.parametrize("ids", [[1, "2"], [-1], [2**32], [1.5], [None]])
async def test_what_is_no_token_id_is_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidValue, match="prompt has an element that is no token id") as refused:
        await prompts_of().tokens(InferenceRequest("m", prompts=[ids]), SERVED)
    assert refused.value.field == "prompt"


async def test_embeddings_and_requests_without_a_prompt_have_no_tokens() -> None:
    recorded = Recorded()
    for request in (InferenceRequest("m", form=Form.EMBEDDINGS, prompts=["a"]), InferenceRequest("m")):
        assert await prompts_of(recorded).tokens(request, SERVED) == []
    assert recorded.asked == []


async def test_of_many_prompts_the_first_few_have_tokens() -> None:
    request = InferenceRequest("m", prompts=[[n] for n in range(SEQUENCES_MAX + 9)])

    assert len(await prompts_of().tokens(request, SERVED)) == SEQUENCES_MAX


# ---- keys ------------------------------------------------------------------------------------------


def test_a_prompt_has_the_keys_of_its_complete_blocks() -> None:
    ids = pack_tokens(list(range(10)))
    prompt = prompts_of().keyed(SourcedTokens(ids, "local"), InferenceRequest("m"), SERVED)

    for size, blocks in ((4, 2), (5, 2), (16, 0)):
        found = prompt(size)
        assert (found.tokens, found.has_tokens) == (10, True)
        assert found.keys == block_keys(None, ids, size, namespace=namespace(None, []), seed=DEFAULT_SEED)
        assert len(found.keys) == 8 * blocks


def test_salts_adapters_and_seeds_name_other_blocks() -> None:
    ids = SourcedTokens(pack_tokens(list(range(8))), "local")

    def keys_of(seed: int, salt: str | None, adapter: str | None) -> bytes:
        request = InferenceRequest("m", cache_salt=salt)
        return prompts_of(hash_seed=seed).keyed(ids, request, SERVED._replace(adapter=adapter))(4).keys

    keys = {keys_of(seed, salt, adapter) for seed in (1337, 7) for salt in (None, "a", "b") for adapter in (None, "x")}
    assert len(keys) == 12


def test_a_prompt_above_the_bound_is_refused_with_the_setting() -> None:
    ids = SourcedTokens(pack_tokens(list(range(9))), "local")
    assert prompts_of(tokens_max=9).keyed(ids, InferenceRequest("m"), SERVED)(3).tokens == 9
    with pytest.raises(InvalidValue, match="more than 8 tokens; send less, or raise WAYMARK_MAX_TOKENS") as refused:
        prompts_of(tokens_max=8).keyed(ids, InferenceRequest("m"), SERVED)
    assert refused.value.reason == "too_large"


def test_a_prompt_without_tokens_has_a_length_at_most() -> None:
    assert no_prompt(16)[:3] == (0, b"", False)
    assert unread_prompt(70)(16)[:3] == (70, b"", False)


# ---- load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "system", "prompts", "expected"),
    [
        (None, None, ["abcd", "abcde", ""], [1, 2, 0]),
        (None, None, [[1, 2, 3]], [3]),
        ([{"role": "user", "content": "abcdefgh"}, {"role": "assistant", "content": "ab"}], None, (), [3]),
        ([{"role": "user", "content": "abcd"}], "abcd", (), [2]),
        ([{"content": [{"type": "text", "text": "abcd"}, {"type": "image_url"}]}, "x", {}], None, (), [1]),
        ([], None, ["abcd"], [0]),
    ],
)
def test_four_characters_are_a_token(messages: Any, system: Any, prompts: Any, expected: list[int]) -> None:
    assert estimate_tokens(messages, system, prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "copies", "expected"),
    [
        ((), 1, ()),
        ((9,), 1, ()),
        ((9,), 3, (SequenceLoad(0, 9), SequenceLoad(0, 9))),
        ((9, 5), 1, (SequenceLoad(5, 5),)),
        ((9, 5), 2, (SequenceLoad(0, 9), SequenceLoad(5, 5), SequenceLoad(0, 5))),
    ],
)
def test_copies_share_the_prefill_of_their_prompt(
    prompts: tuple[int, ...], copies: int, expected: tuple[SequenceLoad, ...]
) -> None:
    assert further_sequences(prompts, copies) == expected


@pytest.mark.parametrize(("prompts", "copies"), [((1,) * 500, 1), ((1,), 500), ((1,) * 9, 500)])
def test_the_load_of_a_request_has_a_ceiling(prompts: tuple[int, ...], copies: int) -> None:
    assert len(further_sequences(prompts, copies)) == SEQUENCES_MAX - 1


def test_dozens_of_answers_are_load_and_a_thousand_make_one_request_no_hundred() -> None:
    for prompts, copies in (((7,), 32), ((7,) * 32, 1), ((7,) * 4, 8)):
        assert len(further_sequences(prompts, copies)) == 31
    assert len(further_sequences((7,), 1000)) < 100


# ---- a body whose prompt is token ids --------------------------------------------------------------

IDS = ",".join(map(str, range(1000)))
#: Bodies that the parser has to read, and why.
UNUSUAL = {
    "the prompt is in another object": f'{{"model":"m","x":{{"prompt":[{IDS}]}}}}',
    "there is a second list": f'{{"model":"m","prompt":[{IDS}],"prompt":[1,2]}}',
    "there is a second name": f'{{"model":"m","prompt":[],"x":{{"prompt":[{IDS}]}}}}',
    "a text has the name": f'{{"model":"m","prompt":[{IDS}],"user":"the \\"prompt\\":[1]"}}',
    "an element is a boolean": f'{{"model":"m","prompt":[{IDS},true]}}',
    "an element is a number with a point": f'{{"model":"m","prompt":[{IDS},1.0]}}',
    "an element is below zero": f'{{"model":"m","prompt":[{IDS},-1]}}',
    "an element is no token id": f'{{"model":"m","prompt":[{IDS},4294967296]}}',
    "the prompts are several": f'{{"model":"m","prompt":[[{IDS}],[1]]}}',
    "the prompt is a text": f'{{"model":"m","prompt":"{IDS}"}}',
    "the prompt is empty": f'{{"model":"m","prompt":[],"x":[{IDS}]}}',
    "the body is a list": f'[{{"model":"m","prompt":[{IDS}]}}]',
}


@pytest.mark.parametrize(
    "body", [f'{{"model":"m","prompt":[{IDS}],"n":2}}', f'{{ "prompt" : [ {IDS} ] , "model":"m" }}']
)
async def test_a_long_prompt_of_ids_is_read_without_the_parser(body: str) -> None:
    fields = read_fields(body.encode(), Form.COMPLETIONS)
    parsed = read_request("/v1/completions", bounded_loads(body.encode()))
    if native.selected is not None:
        assert fields["prompt"] == PackedTokens(pack_tokens(list(range(1000))))
    request = read_request("/v1/completions", fields)
    assert len(request.prompts[0]) == 1000
    assert estimate_tokens(None, None, request.prompts) == [1000]
    prompts = prompts_of()
    assert await prompts.tokens(request, SERVED) == await prompts.tokens(parsed, SERVED)
    assert (request.copies, request.model) == (parsed.copies, parsed.model)
    assert read_fields(body.encode(), Form.EMBEDDINGS) == bounded_loads(body.encode())


@pytest.mark.parametrize("why", UNUSUAL)
def test_any_other_body_is_read_by_the_parser(why: str) -> None:
    body = UNUSUAL[why].encode()
    assert read_fields(body, Form.COMPLETIONS) == bounded_loads(body)


@pytest.mark.parametrize("body", [f'{{"prompt":[{IDS}],"model":m}}', f'{{"prompt":[{IDS}]', f'{{"prompt":[{IDS},]}}'])
def test_a_mistake_is_named_by_its_place_in_the_whole_body(body: str) -> None:
    with pytest.raises(orjson.JSONDecodeError) as whole:
        bounded_loads(body.encode())
    with pytest.raises(orjson.JSONDecodeError) as found:
        read_fields(body.encode(), Form.COMPLETIONS)
    assert str(found.value) == str(whole.value)


def test_a_prompt_of_too_many_ids_is_refused_unread() -> None:
    body = b'{"prompt":[%b]}' % b",".join([b"1"] * (VALUES_MAX + 2))
    with pytest.raises(TooMuchJson):
        read_fields(body, Form.COMPLETIONS)
