"""Questions and their terms: which targets they allow, and what a source of copies says."""

from __future__ import annotations

import pytest

from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Linear
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import CopySource, GivenValues, PolicyChoice, SelectParameters

ADDRESS = "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    ("only", "exclude", "address", "expected"),
    [
        (None, (), None, True),
        (None, ("pod-1",), None, False),
        (None, ("pod-2",), ADDRESS, True),
        (None, (ADDRESS,), ADDRESS, False),
        (None, ("10.0.0.1:8000",), ADDRESS, False),
        (("pod-1",), (), None, True),
        (("10.0.0.1:8000",), (), ADDRESS, True),
        ((ADDRESS,), (), ADDRESS, True),
        ((ADDRESS,), (), None, False),
        ((), (), ADDRESS, False),
        (("pod-1",), ("10.0.0.1:8000",), ADDRESS, False),
    ],
)
def test_a_target_is_allowed_by_each_of_its_names(
    only: tuple[str, ...] | None, exclude: tuple[str, ...], address: str | None, expected: bool
) -> None:
    parameters = SelectParameters(None if only is None else frozenset(only), frozenset(exclude))

    assert parameters.allows("pod-1", address) is expected


def test_values_of_a_caller_are_whole_with_both_parts_of_the_load() -> None:
    assert GivenValues(0, 0).is_whole
    assert not GivenValues(tokens=5).is_whole
    assert not GivenValues(requests=5, health=1.0).is_whole


def test_a_policy_has_a_name_and_asks_for_gauges_if_a_part_of_it_does() -> None:
    text = (
        "kind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n"
    )
    least_work, gauged = PolicyChoice.of(PRESETS["least-work"]), PolicyChoice.of(PRESETS["llm-d"])
    file = PolicyChoice.of(read_picker_config(text))

    assert [each.name for each in (least_work, gauged, file)] == ["least-work", "llm-d", "endpoint-picker-config"]
    assert [each.needs_gauges for each in (least_work, gauged, file)] == [False, True, True]
    assert least_work.values is not None
    assert (file.values, file.preset) == (None, None)


def test_a_source_is_told_by_its_place_and_as_a_hint() -> None:
    source = CopySource("pod-1", 0, "tcp://10.0.0.1:7777", {"GPU": 32}, [11, 12])
    assert source.place == "10.0.0.1:7777"
    hints, again = source.hints(), source.hints()

    (action,) = hints["actions"]
    assert hints["protocol_version"] == "0.1"
    assert (action["action_type"], action["action_version"]) == ("kv.fetch", "1.0")
    assert action["payload"] == {"source_control_endpoint": "tcp://10.0.0.1:7777", "block_hashes": [11, 12]}
    ids = {hints["message_id"], again["message_id"], action["action_id"], again["actions"][0]["action_id"]}
    assert len(ids) == 4, "each message and each action has an id of its own"


@pytest.mark.parametrize("name", PRESETS)
def test_a_choice_of_a_preset_has_its_constants_and_its_formula(name: str) -> None:
    preset = PRESETS[name]
    own, bare = PolicyChoice.of(preset), PolicyChoice(preset)
    assert (own.name, own.preset, own.file) == (name, preset, None)
    assert own.needs_gauges is bare.needs_gauges is preset.needs_gauges
    assert own.values is not None
    for constant in preset.constants:
        if not isinstance(constant.default, bool | str):
            assert own.values.number(constant.name) == constant.default
    # Without constants there is no formula of them.
    assert (own.linear is None, bare.linear) == (preset.linear is None, None)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, Linear(3.0, 512.0)),
        ({"new_weight": 1}, Linear(1.0, 512.0)),
        ({"active_weight": 0, "new_weight": 0}, Linear(0.0, 0.0)),
    ],
)
def test_the_formula_of_redis_has_the_constants_of_the_request(overrides: dict[str, float], expected: Linear) -> None:
    preset = PRESETS["least-work"]
    assert PolicyChoice(preset, preset.values(overrides)).linear == expected


def test_a_choice_of_nothing_needs_nothing() -> None:
    nothing = PolicyChoice(None)
    assert (nothing.name, nothing.needs_gauges, nothing.linear) == ("endpoint-picker-config", False, None)


@pytest.mark.parametrize(
    ("name", "is_cost"),
    [("least-work", True), ("lmetric", True), ("sticky", True), ("composite", False), ("llm-d", False), (None, False)],
)
def test_the_values_of_an_answer_are_costs_or_scores(name: str | None, is_cost: bool) -> None:
    policy = PolicyChoice(None) if name is None else PolicyChoice.of(PRESETS[name])
    assert policy.is_cost is is_cost
