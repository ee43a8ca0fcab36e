"""Picker files with two of something, with nothing of something, and with a value of another kind."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.decide.policies.conftest import busy, prompt, target
from waymark.base.errors import InvalidValue
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Candidate, Constant, Values, read_constants
from waymark.decide.policies.profile import PickerConfig


def file(*plugins: str, profiles: str = "{name: a}") -> str:
    return f"plugins: [{', '.join(plugins)}]\nschedulingProfiles: [{profiles}]\n"


def refusal(text: str) -> InvalidValue:
    with pytest.raises(InvalidValue) as refused:
        read_picker_config(text)
    return refused.value


def values_of(config: PickerConfig, *some: Candidate, tokens: int = 64) -> dict[str, float]:
    return {each.candidate.instance_id: each.value for each in config.run(prompt(tokens), some, Random(1)).decode}


# ---- two of something ---------------------------------------------------------------------------------


def precise(name: str, parameters: str) -> str:
    return f"{{name: {name}, type: precise-prefix-cache-scorer, parameters: {{{parameters}}}}}"


OFF = precise("plain", "speculativeIndexing: false, speculativeTTL: 9s")


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ([OFF, precise("one", "speculativeIndexing: true, speculativeTTL: 3s")], (True, 3_000)),
        ([precise("one", "speculativeIndexing: true, speculativeTTL: 3s"), OFF], (True, 3_000)),
        (
            [
                precise("one", "speculativeIndexing: true, speculativeTTL: 3s"),
                precise("two", "speculativeIndexing: true, speculativeTTL: 5s"),
            ],
            (True, 3_000),
        ),
        ([OFF, precise("none", "")], (False, 2_000)),
        ([precise("none", "speculativeTTL: 5s")], None),
    ],
)
def test_the_first_scorer_that_speculates_says_for_how_long(
    plugins: list[str], expected: tuple[bool, int] | None
) -> None:
    assert read_picker_config(file(*plugins)).speculation == expected


def test_a_note_about_two_plugins_of_a_type_is_said_once() -> None:
    config = read_picker_config(file("{type: tokenizer}", "{type: tokenizer, name: another}"))
    assert [note.partition(":")[0] for note in config.notes] == ["tokenizer"]


def test_two_plugins_of_one_name_are_refused_with_the_second() -> None:
    refused = refusal(file("{type: queue-scorer, name: q}", "{type: running-requests-size-scorer, name: q}"))
    assert refused.sentence == 'plugins[1].name "q" is used twice; give each plugin another name'
    refused = refusal(file(profiles="{name: a}, {name: b}, {name: a}"))
    assert refused.sentence == 'schedulingProfiles[2].name "a" is used twice; give each profile another name'


def test_two_scorers_of_a_type_count_each_with_its_own_name_parameters_and_weight() -> None:
    config = read_picker_config(
        file(
            "{name: short, type: load-aware-scorer, parameters: {threshold: 2}}",
            "{name: long, type: load-aware-scorer, parameters: {threshold: 10}}",
            profiles="{name: a, plugins: [{pluginRef: short, weight: 2}, {pluginRef: long, weight: 4}]}",
        )
    )
    (found,) = config.run(prompt(64), [target("t", gauges=busy(1))], Random(1)).decode
    # A queue of one is half of 2, and a tenth of 10; an empty one would score a half.
    assert found.parts == pytest.approx({"short": 2 * 0.25, "long": 4 * 0.45})
    assert found.value == pytest.approx(2.3)


def test_a_scorer_that_a_profile_names_twice_counts_with_both_weights() -> None:
    config = read_picker_config(
        file(
            "{type: precise-prefix-cache-scorer}",
            "{type: active-request-scorer}",
            profiles="{name: a, plugins: [{pluginRef: precise-prefix-cache-scorer, weight: 2}, "
            "{pluginRef: active-request-scorer}, {pluginRef: precise-prefix-cache-scorer, weight: 0.5}]}",
        )
    )
    (found,) = config.run(prompt(64), [target("t", device=64)], Random(1)).decode
    assert found.parts == {"precise-prefix-cache-scorer": 2.5, "active-request-scorer": 1.0}
    assert found.value == 3.5


def test_several_profiles_without_a_handler_of_stages_are_named() -> None:
    for plugins in ([], ["{type: single-profile-handler}"]):
        refused = refusal(file(*plugins, profiles="{name: one}, {name: two}"))
        assert refused.sentence.startswith("schedulingProfiles has 2 profiles (one, two), and a single profile runs")


@pytest.mark.parametrize("plugins", [[], ["{type: single-profile-handler}"]])
def test_the_only_profile_decides_whatever_its_name(plugins: list[str]) -> None:
    config = read_picker_config(file(*plugins, profiles="{name: prefill}"))
    assert (config.decode, config.prefill, config.encode) == ("prefill", None, None)
    assert values_of(config, target("t")) == {"t": 0.0}


def test_several_filters_leave_what_passes_all_of_them() -> None:
    config = read_picker_config(
        file(
            "{name: zone, type: by-label, parameters: {label: zone, validValues: [x]}}",
            "{name: disk, type: by-label, parameters: {label: disk, validValues: [fast], allowsNoLabel: true}}",
            profiles="{name: a, plugins: [{pluginRef: zone}, {pluginRef: disk}]}",
        )
    )
    some = [
        target("a", labels={"zone": "x", "disk": "fast"}),
        target("b", labels={"zone": "x", "disk": "slow"}),
        target("c", labels={"zone": "x"}),
        target("d", labels={"disk": "fast"}),
    ]
    assert set(values_of(config, *some)) == {"a", "c"}


# ---- nothing of something -----------------------------------------------------------------------------


def test_a_filter_without_values_keeps_those_without_the_label() -> None:
    config = read_picker_config(
        file(
            "{type: by-label, parameters: {label: zone, allowsNoLabel: true}}",
            profiles="{name: a, plugins: [{pluginRef: by-label}]}",
        )
    )
    assert set(values_of(config, target("a", labels={"zone": "x"}), target("b", labels={"rack": "1"}))) == {"b"}


@pytest.mark.parametrize(
    ("parameters", "sentence", "field"),
    [
        ("", "plugins[0].parameters.label is missing, or is no text", "plugins[0].parameters.label"),
        ("validValues: [x]", "plugins[0].parameters.label is missing, or is no text", "plugins[0].parameters.label"),
        ("label: ''", "plugins[0].parameters.label is missing, or is no text", "plugins[0].parameters.label"),
        (
            "label: zone",
            "plugins[0].parameters.validValues is missing; name the values, or set allowsNoLabel",
            None,
        ),
    ],
)
def test_a_filter_by_a_label_names_what_it_lacks(parameters: str, sentence: str, field: str | None) -> None:
    refused = refusal(
        file(
            f"{{type: by-label, parameters: {{{parameters}}}}}",
            profiles="{name: a, plugins: [{pluginRef: by-label}]}",
        )
    )
    assert refused.sentence == sentence
    assert field is None or (refused.field, refused.reason) == (field, "missing")


@pytest.mark.parametrize("text", ["", "# a comment", "---", "null"])
def test_an_empty_file_is_no_mapping(text: str) -> None:
    refused = refusal(text)
    assert (refused.sentence, refused.field, refused.reason) == (
        "the file must be a mapping by name",
        "the file",
        "invalid_type",
    )


@pytest.mark.parametrize("top", ["", "kind: EndpointPickerConfig", "apiVersion: v9", "featureGates: [a, b]"])
def test_a_file_needs_no_more_than_a_profile(top: str) -> None:
    config = read_picker_config(f"{top}\nschedulingProfiles: [{{name: a}}]")
    assert (list(config.profiles), config.notes) == (["a"], ())
    assert (config.speculation, config.history, config.needs_gauges, config.needs_answer_times) == (
        None,
        None,
        False,
        False,
    )


def test_a_scorer_of_weight_nothing_is_shown_and_does_not_count() -> None:
    config = read_picker_config(
        file(
            "{type: active-request-scorer}",
            "{type: precise-prefix-cache-scorer}",
            profiles="{name: a, plugins: [{pluginRef: active-request-scorer, weight: 0}, "
            "{pluginRef: precise-prefix-cache-scorer}]}",
        )
    )
    found = config.run(prompt(64), [target("busy", active=9, device=64), target("idle")], Random(1)).decode
    assert [(each.candidate.instance_id, each.value) for each in found] == [("busy", 1.0), ("idle", 0.0)]
    assert {each.parts["active-request-scorer"] for each in found} == {0.0}


# ---- a value of another kind --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["[]", "false", "0", "''", "[a]", "7", "text"])
def test_parameters_of_another_kind_are_refused_also_if_they_are_empty(value: str) -> None:
    refused = refusal(file(f"{{type: queue-scorer, parameters: {value}}}"))
    assert refused.sentence == "plugins[0].parameters must be a mapping by name"
    assert (refused.field, refused.reason) == ("plugins[0].parameters", "invalid_type")


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (file("{type: queue-scorer, parameters: {a: 1}}"), "plugins[0].parameters.a", "invalid_value"),
        (file("{type: queue-scorer}", profiles="a"), "schedulingProfiles[0]", "invalid_type"),
        (file(profiles="{name: 7}"), "schedulingProfiles[0].name", "missing"),
        (file(profiles="{name: a, plugins: b}"), "schedulingProfiles[0].plugins", "invalid_type"),
        (file(profiles="{name: a, plugins: [b]}"), "schedulingProfiles[0].plugins[0]", "invalid_type"),
        (
            file(profiles="{name: a, plugins: [{pluginRef: 1}]}"),
            "schedulingProfiles[0].plugins[0].pluginRef",
            "missing",
        ),
        (file(profiles="{name: a, plugins: [{name: b}]}"), "name", "invalid_value"),
        (
            file("{type: tokenizer}", profiles="{name: a, plugins: [{pluginRef: tokenizer}]}"),
            "schedulingProfiles[0].plugins[0].pluginRef",
            "invalid_value",
        ),
        ("schedulingProfiles: []", "schedulingProfiles", "invalid_value"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(text: str, field: str, reason: str) -> None:
    refused = refusal(text)
    assert (refused.field, refused.reason) == (field, reason)


@pytest.mark.parametrize("labels", [("context-length-range", "64"), ("mif.moreh.io/context-length-range", "a-b")])
def test_a_target_with_a_range_that_cannot_be_read_takes_no_prompt(labels: tuple[str, str]) -> None:
    """A label of another name counts for nothing."""
    config = read_picker_config(
        file(
            "{type: context-length-aware, parameters: {enableFiltering: true}}",
            "{type: decode-filter}",
            profiles="{name: a, plugins: [{pluginRef: decode-filter}, {pluginRef: context-length-aware, weight: 0}]}",
        )
    )
    name, text = labels
    found = values_of(config, target("a", labels={name: text}), target("b"))
    assert set(found) == ({"b"} if name.startswith("mif") else {"a", "b"})


# ---- constants ----------------------------------------------------------------------------------------


def test_an_unknown_constant_is_a_wrong_value() -> None:
    with pytest.raises(InvalidValue) as refused:
        read_constants([Constant("number", 1.0, "A number.")], {"numbers": 1}, "overrides")
    assert (refused.value.field, refused.value.reason) == ("overrides.numbers", "invalid_value")


CREDITS: dict[str, Any] = {
    "overlap_score_credit": 1,
    "host_credit": 0.75,
    "disk_credit": 0.25,
    "shared_cache_multiplier": 0.5,
}


def test_credits_are_those_of_device_memory_disk_and_pool_in_this_order() -> None:
    assert Values(CREDITS).credits == (1.0, 0.75, 0.25, 0.5)
    assert Values(CREDITS | {"more": True, "word": "w"}).credits == (1.0, 0.75, 0.25, 0.5)


@pytest.mark.parametrize("name", CREDITS)
def test_without_one_of_them_there_are_no_credits(name: str) -> None:
    values = Values({other: value for other, value in CREDITS.items() if other != name})
    assert values.credits is None
