"""The differences between kinds of publishers, and between media, are in two tables, which the rest of the code
uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trees import tree_of
from waymark.domain import engines
from waymark.domain.engines import OVER_HTTP, TRAITS, EngineKind, kinds_where
from waymark.domain.media import DEVICE, HOST, IN_EVERY_ANSWER, MEDIA, normal_medium, order_of
from waymark.engines import decoder

ROOT = Path(__file__).parents[1] / "app" / "waymark"
TABLES = {"domain/engines.py", "domain/media.py"}
#: It plays the engines, so it has to use their names.
PLAYER = "simulator"
KINDS = {str(kind) for kind in EngineKind}
#: Kinds that are also ordinary words count only in comparisons.
WORDS = {str(EngineKind.STANDARD), str(EngineKind.NONE)}
NAMES = (KINDS - WORDS) | {medium.name for medium in MEDIA}


def named(tree: ast.AST) -> Iterator[str]:
    """Yield every mention of a kind or a medium, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES:
                yield f"{node.lineno}: {text}"
            case ast.Attribute(value=ast.Name(id="EngineKind"), attr=member) if member in EngineKind.__members__:
                yield f"{node.lineno}: EngineKind.{member}"
            case ast.Compare(left=ast.Attribute(attr="kind" | "type"), comparators=[ast.Constant(value=str(text))]):
                if text in KINDS:
                    yield f"{node.lineno}: {text}"


MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != PLAYER]


@pytest.mark.slow
def test_no_module_but_the_tables_names_a_kind_or_a_medium() -> None:
    others = {path.relative_to(ROOT).as_posix(): path for path in MODULES}
    found = {
        name: list(named(tree_of(path.read_text(encoding="utf-8"))))
        for name, path in others.items()
        if name not in TABLES
    }
    assert {name: lines for name, lines in found.items() if lines} == {}, (
        "ask a trait of the kind, or a field of the medium; add one where there is none"
    )


@pytest.mark.parametrize(
    "line",
    ["of.kind is EngineKind.NONE", "of.type == 'none'", "medium != 'GPU'", "{'CPU': 1}", "kind in ('vLLM', 'SGLang')"],
)
def test_a_name_is_found(line: str) -> None:
    assert list(named(ast.parse(line)))


@pytest.mark.parametrize("line", ["verify == 'none'", "list(EngineKind)", "EngineKind(text)", "'the GPU of a rank'"])
def test_other_words_are_free(line: str) -> None:
    assert not list(named(ast.parse(line)))


@pytest.mark.parametrize("kind", EngineKind)
def test_every_kind_has_a_row_and_a_decoder(kind: EngineKind) -> None:
    assert kind.traits is TRAITS[kind]
    assert decoder(kind, seed=0)(b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x90\x00").events == ()


def test_a_sentence_lists_the_kinds_that_the_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    opaque = TRAITS[EngineKind.CONTINUUM]
    monkeypatch.setattr(engines, "TRAITS", {EngineKind.VLLM: opaque, EngineKind.NONE: TRAITS[EngineKind.NONE]})
    assert kinds_where("is_opaque", True) == "vLLM"
    monkeypatch.setattr(engines, "TRAITS", {EngineKind.VLLM: opaque, EngineKind.SGLANG: opaque})
    assert kinds_where("is_opaque", True) == "vLLM and SGLang"
    monkeypatch.setattr(
        engines, "TRAITS", dict.fromkeys((EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOONCAKE), opaque)
    )
    assert kinds_where("is_opaque", True) == "vLLM, SGLang and Mooncake"


def test_these_kinds_have_what_only_they_are_known_for() -> None:
    assert TRAITS[EngineKind.MOONCAKE].scope == "shared"
    assert TRAITS[EngineKind.VLLM].copies == TRAITS[EngineKind.SGLANG].copies == "count"
    assert TRAITS[EngineKind.CONTINUUM].is_opaque
    assert not TRAITS[EngineKind.NONE].tells_events
    assert OVER_HTTP is EngineKind.STANDARD


def test_a_spelling_stands_for_one_medium_and_a_medium_for_itself() -> None:
    spellings = [spelling for medium in MEDIA for spelling in medium.spellings]
    assert len(spellings) == len(set(spellings))
    assert all(spelling == spelling.upper() for spelling in spellings)
    assert [normal_medium(medium.name) for medium in MEDIA] == [medium.name for medium in MEDIA]


def test_a_further_tier_leaves_the_answers_as_clients_know_them() -> None:
    assert IN_EVERY_ANSWER == ("GPU", "CPU", "DISK")


def test_media_are_in_order_and_others_come_last() -> None:
    assert [order_of(medium.name) for medium in MEDIA] == [*range(len(MEDIA))]
    assert order_of("CXL_2") == len(MEDIA)
    assert DEVICE.isdisjoint(HOST)
