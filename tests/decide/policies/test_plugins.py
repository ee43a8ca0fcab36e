"""The table of plugins: each parameter takes the values of its kind, and refuses all others by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from waymark.base.errors import InvalidValue
from waymark.decide.policies.picker_config import check_parameters
from waymark.decide.policies.plugins import PLUGINS, Parameters, Plugin, PluginKind
from waymark.decide.policies.profile import PICKERS
from waymark.decide.policies.scorers import SCORERS

FITTING: Mapping[str, tuple[Any, ...]] = {
    "number": (0, 1, 2.5, -3),
    "bool": (True, False),
    "text": ("", "a text"),
    "texts": ([], ["a", "b"]),
    "labels": ({}, {"a": "b"}),
    "expressions": ([], [{"key": "a", "operator": "Exists"}], [{"key": "a", "operator": "In", "values": ["b"]}]),
    "duration": ("2s", "1h30m", "250ms", "0.5m"),
}
UNFIT: Mapping[str, tuple[Any, ...]] = {
    "number": ("1", True, None, [1]),
    "bool": (0, 1, "true", None),
    "text": (1, None, ["a"], True),
    "texts": ("a", [1], None, {"a": "b"}),
    "labels": ([], {"a": 1}, "a", None),
    "expressions": ({}, ["a"], [{"key": "a"}], [{"key": "a", "operator": "Near"}], None),
    "duration": (2, "2", "soon", "", None),
}


def leaves(parameters: Parameters, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each parameter that has a value of its own, with its kind."""
    for name, kind in parameters.items():
        if isinstance(kind, Mapping):
            yield from leaves(kind, *path, name)
        else:
            yield (*path, name), kind


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=list(PLUGINS))
def test_each_parameter_takes_the_values_of_its_kind(plugin: Plugin) -> None:
    for path, kind in leaves(plugin.parameters):
        for value in FITTING[kind]:
            check_parameters(nested(path, value), plugin.parameters, "parameters")
        for value in UNFIT[kind]:
            with pytest.raises(InvalidValue) as refused:
                check_parameters(nested(path, value), plugin.parameters, "parameters")
            assert refused.value.field == ".".join(("parameters", *path))
            assert refused.value.field in refused.value.sentence


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=list(PLUGINS))
def test_an_unknown_parameter_is_named_with_its_path(plugin: Plugin) -> None:
    places = {path[:depth] for path, _ in leaves(plugin.parameters) for depth in range(len(path))} or {()}
    for place in places:
        with pytest.raises(InvalidValue) as refused:
            check_parameters(nested((*place, "not-known"), 1), plugin.parameters, "parameters")
        assert refused.value.field == ".".join(("parameters", *place, "not-known"))
        assert "is not known" in refused.value.sentence
        if place:
            with pytest.raises(InvalidValue, match="must be a mapping by name"):
                check_parameters(nested(place, "a text"), plugin.parameters, "parameters")


def test_a_plugin_is_found_by_its_type() -> None:
    assert [plugin.type for plugin in PLUGINS.values()] == list(PLUGINS)
    assert {kind for plugin in PLUGINS.values() for _, kind in leaves(plugin.parameters)} <= set(FITTING)


def test_scorers_and_pickers_are_those_that_there_are() -> None:
    assert {name for name, plugin in PLUGINS.items() if plugin.kind is PluginKind.SCORER} == set(SCORERS)
    assert {name for name, plugin in PLUGINS.items() if plugin.kind is PluginKind.PICKER} == set(PICKERS)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_has_the_parameters_of_its_constants(name: str) -> None:
    plugin, own = PLUGINS[name], {row.name: row.default for row in SCORERS[name].parameters}
    for parameter, default in own.items():
        assert plugin.parameters[parameter] == ("text" if isinstance(default, str) else "number")
    # What is beside them is for work that is done elsewhere, and a sentence says where.
    assert bool(plugin.parameters.keys() - own.keys()) == bool(plugin.note)


def test_both_names_of_the_filter_by_labels_take_the_same() -> None:
    assert PLUGINS["label-selector-filter"].parameters == PLUGINS["by-label-selector"].parameters
    assert set(PLUGINS["by-label-selector"].parameters) == {"matchLabels", "matchExpressions"}


def test_the_seed_of_another_index_is_a_text() -> None:
    processor = PLUGINS["precise-prefix-cache-scorer"].parameters["tokenProcessorConfig"]
    assert processor == {"blockSize": "number", "hashSeed": "text"}


def test_only_one_plugin_has_parameters_that_are_not_used() -> None:
    assert [name for name, plugin in PLUGINS.items() if plugin.is_open] == ["predicted-latency-scorer"]


def test_what_another_part_does_is_said_in_a_sentence() -> None:
    for plugin in PLUGINS.values():
        if plugin.kind is PluginKind.OTHER:
            assert len(plugin.note.split()) >= 5, plugin.type
        elif plugin.kind is not PluginKind.SCORER:
            assert not plugin.note, plugin.type
