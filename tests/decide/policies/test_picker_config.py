"""``EndpointPickerConfig``: the published samples load and pick; what is not known is refused by name."""

from __future__ import annotations

from random import Random
from textwrap import dedent

import pytest

from tests.decide.policies.conftest import busy, prompt, target
from waymark.base.errors import InvalidValue
from waymark.decide.matches import speculation_of
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.plugins import PLUGINS, PluginKind
from waymark.decide.policies.policy import read_constants
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import PickerConfig
from waymark.decide.policies.scorers import CONTEXT_LABEL, SCORERS
from waymark.decide.question import PolicyChoice, Question, SelectParameters
from waymark.decide.request_prompts import no_prompt
from waymark.domain.answer_times import AnswerTimes, AskedTimes, TimeSums
from waymark.domain.names import GroupName
from waymark.domain.targets import Role

DISAGGREGATED = """
plugins:
- type: disagg-headers-handler
- type: prefix-based-pd-decider
  parameters:
    nonCachedTokens: 16
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
- type: disagg-profile-handler
  parameters:
    deciders:
      prefill: prefix-based-pd-decider
schedulingProfiles:
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: max-score-picker
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: max-score-picker
"""
"""Heimdall's minimal example of disaggregated prefill."""

WEIGHTED = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
featureGates: [prepareDataPlugins]
plugins:
- type: single-profile-handler
- type: tokenizer
  parameters:
    modelName: meta-llama/Llama-3.2-1B-Instruct
    udsTokenizerConfig:
      socketFile: /tmp/tokenizer/tokenizer-uds.socket
- type: precise-prefix-cache-scorer
  parameters:
    tokenProcessorConfig: {blockSize: 16}
    indexerConfig:
      tokenizersPoolConfig: {modelName: meta-llama/Llama-3.2-1B-Instruct}
    kvEventsConfig: {topicFilter: "kv@", discoverPods: true, podDiscoveryConfig: {socketPort: 5557}}
    speculativeIndexing: true
    speculativeTTL: 2s
- type: kv-cache-utilization-scorer
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: precise-prefix-cache-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
  - pluginRef: queue-scorer
    weight: 1.0
  - pluginRef: max-score-picker
"""


def read(text: str) -> PickerConfig:
    return read_picker_config(dedent(text))


def test_the_weighted_profile_gives_the_published_sum() -> None:
    config = read(WEIGHTED)
    cached = target("cached", device=64, gauges=busy(5, kv_usage=0.5))
    idle = target("idle", gauges=busy(0, kv_usage=0.25))

    stages = config.run(prompt(64), [cached, idle], Random(1))

    assert {each.candidate.instance_id: each.value for each in stages.decode} == {"cached": 2.5, "idle": 1.75}
    assert stages.decode[0].parts == {
        "precise-prefix-cache-scorer": 2.0,
        "kv-cache-utilization-scorer": 0.5,
        "queue-scorer": 0.0,
    }
    assert (stages.prefill, stages.encode) == ((), ())
    assert config.needs_gauges
    assert any(note.startswith("tokenizer: ") and "WAYMARK_TOKENIZERS" in note for note in config.notes)
    assert config.speculation == (True, 2_000)


def test_prefill_is_apart_where_enough_is_not_cached() -> None:
    config = read(DISAGGREGATED)
    prefill, decode = target("p", role=Role.PREFILL), target("d", labels={"mif.moreh.io/role": "decode"}, device=48)

    apart = config.run(prompt(64), [prefill, decode], Random(1))
    together = config.run(prompt(63), [prefill, decode], Random(1))

    assert [each.candidate.instance_id for each in apart.decode] == ["d"]
    assert [each.candidate.instance_id for each in apart.prefill] == ["p"]
    assert together.prefill == ()
    assert config.run(prompt(64), [prefill], Random(1)).decode == ()


def test_the_older_flat_form_means_the_same_and_says_so() -> None:
    flat = DISAGGREGATED.replace(
        "    deciders:\n      prefill: prefix-based-pd-decider\n",
        "    decodeProfile: decode\n    prefillProfile: prefill\n    deciderPluginName: prefix-based-pd-decider\n",
    )
    config = read(flat)
    some = [target("p", role=Role.PREFILL), target("d", role=Role.DECODE)]

    assert [each.candidate.instance_id for each in config.run(prompt(64), some, Random(1)).prefill] == ["p"]
    assert any("deciderPluginName" in note and "older names" in note for note in config.notes)


def test_the_handler_before_that_finds_its_decider_by_default() -> None:
    older = DISAGGREGATED.replace("disagg-profile-handler\n", "pd-profile-handler\n").replace(
        "    deciders:\n      prefill: prefix-based-pd-decider\n", "    primaryPort: 8000\n"
    )

    assert read(older).prefill == "prefill"


def test_encoding_is_a_stage_of_its_own_for_requests_with_images() -> None:
    config = read(
        """
        plugins:
        - type: prefill-header-handler
        - type: always-disagg-multimodal-decider
        - type: encode-filter
        - type: decode-filter
        - type: disagg-profile-handler
          parameters: {deciders: {encode: always-disagg-multimodal-decider}}
        schedulingProfiles:
        - name: encode
          plugins: [{pluginRef: encode-filter}]
        - name: decode
          plugins: [{pluginRef: decode-filter}]
        """
    )
    some = [target("e", role=Role.ENCODE), target("d")]

    assert [
        each.candidate.instance_id for each in config.run(prompt(8, is_multimodal=True), some, Random(1)).encode
    ] == ["e"]
    assert config.run(prompt(8), some, Random(1)).encode == ()


def test_labels_lengths_and_several_endpoints() -> None:
    config = read(
        """
        plugins:
        - type: by-label
          name: only-h100
          parameters: {label: gpu, validValues: [h100, h200]}
        - type: by-label-selector
          parameters:
            matchLabels: {zone: a}
            matchExpressions: [{key: drained, operator: DoesNotExist}]
        - type: context-length-aware
          parameters: {enableFiltering: true}
        - type: weighted-random-picker
          parameters: {maxNumOfEndpoints: 3}
        schedulingProfiles:
        - name: any
          plugins:
          - pluginRef: only-h100
          - pluginRef: by-label-selector
          - pluginRef: context-length-aware
            weight: 0.5
          - pluginRef: weighted-random-picker
        """
    )
    fit = {"gpu": "h100", "zone": "a"}
    some = [
        target("yes", labels=fit),
        target("drained", labels=fit | {"drained": "soon"}),
        target("other", labels={"gpu": "a100", "zone": "a"}),
        target("short", labels=fit | {"mif.moreh.io/context-length-range": "0-10"}),
    ]

    stages = config.run(prompt(64), some, Random(1))

    assert [(each.candidate.instance_id, each.value) for each in stages.decode] == [("yes", 0.25)]
    assert config.profiles["any"].endpoints_max == 3


def plugins(*lines: str) -> str:
    return "plugins:\n" + "\n".join(lines) + "\nschedulingProfiles: [{name: a, plugins: []}]\n"


def scored_by(scorer: str, parameters: str) -> str:
    """Return a file with one profile, of one scorer."""
    profile = f"schedulingProfiles: [{{name: default, plugins: [{{pluginRef: {scorer}}}]}}]"
    return f"plugins: [{{type: {scorer}, parameters: {{{parameters}}}}}]\n{profile}\n"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("speculativeIndexing: true, speculativeTTL: 1m30s", (True, 90_000)),
        ("speculativeIndexing: true", (True, 2_000)),
        ("speculativeIndexing: false, speculativeTTL: 9s", (False, 2_000)),
        ("speculativeTTL: 9s", None),
    ],
)
def test_a_file_says_whether_entries_are_speculative(parameters: str, expected: tuple[bool, int] | None) -> None:
    config = read_picker_config(plugins("- type: precise-prefix-cache-scorer", f"  parameters: {{{parameters}}}"))
    assert config.speculation == expected
    by_file = SelectionOptions(is_speculative=True)
    question = Question(GroupName("default", "m"), no_prompt, PolicyChoice.of(config))
    assert speculation_of(question, by_file) == (expected or (True, 2_000))
    by_name = question._replace(policy=PolicyChoice.of(PRESETS["least-work"]))
    assert speculation_of(by_name, by_file) == (True, 2_000), "of a policy by name"
    asked = question._replace(parameters=SelectParameters(expects=False))
    assert speculation_of(asked, by_file).is_on is False, "as the caller asks"


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1ms", 1),
        ("700ms", 700),
        ("0.7s", 700),
        ("1001ms", 1001),
        ("1.5ms", 2),
        ("1100us", 2),
        ("1000us", 1),
        ("1000000ns", 1),
        ("10m", 600_000),
        ("9m59.999s", 599_999),
    ],
)
def test_an_entry_lasts_as_long_as_the_file_says_in_whole_milliseconds(text: str, milliseconds: int) -> None:
    config = read_picker_config(
        scored_by("precise-prefix-cache-scorer", f"speculativeIndexing: true, speculativeTTL: {text}")
    )
    assert config.speculation == (True, milliseconds)


@pytest.mark.parametrize("text", ["0s", "999us", "600001ms", "10m1ms", "1h"])
def test_an_entry_that_lasts_too_short_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"speculativeTTL is .*; it must be 1ms to 10m"):
        read_picker_config(
            scored_by("precise-prefix-cache-scorer", f"speculativeIndexing: true, speculativeTTL: {text}")
        )


@pytest.mark.parametrize(
    ("parameters", "capacity", "blocks"),
    [
        ("", 31_250, 256),
        ("lruCapacityPerServer: 100", 100, 100),
        ("maxPrefixBlocksToMatch: 7", 31_250, 7),
        ("lruCapacityPerServer: 5, maxPrefixBlocksToMatch: 9", 5, 5),
    ],
)
def test_a_history_is_no_longer_for_a_prompt_than_for_a_target(parameters: str, capacity: int, blocks: int) -> None:
    history = read_picker_config(scored_by("prefix-cache-scorer", parameters)).history
    assert history == (capacity, blocks)


def test_the_greatest_of_several_histories_is_kept() -> None:
    several = plugins(
        "- {name: one, type: prefix-cache-scorer, parameters: {lruCapacityPerServer: 50}}",
        "- {name: two, type: prefix-cache-scorer, parameters: {maxPrefixBlocksToMatch: 40, lruCapacityPerServer: 9}}",
    )
    assert read_picker_config(several).history == (50, 50)
    assert read_picker_config(scored_by("queue-scorer", "")).history is None


def test_a_parameter_of_the_predicted_latency_counts_or_is_noted() -> None:
    def config(parameters: str) -> PickerConfig:
        return read_picker_config(scored_by("predicted-latency-scorer", parameters))

    def score(of: PickerConfig) -> list[float | None]:
        (scorer,) = of.profiles["default"].scorers
        times = (TimeSums(9, 9, 9 * ms, 9, 9 * ms) for ms in (100, 180))
        some = [target(str(at), answer_times=AnswerTimes(each)) for at, each in enumerate(times)]
        return [*scorer.score(prompt(64, asked=AskedTimes(200)), some)]

    plain = config("samplingMean: 100, selectionMode: linear, sloBufferFactor: 0.9")
    assert "predicted-latency-scorer: samplingMean, selectionMode are not used" in " ".join(plain.notes)
    assert (plain.needs_answer_times, plain.needs_gauges) == (True, False)
    assert score(plain) == pytest.approx([0.01, 1.0])
    assert config("").notes == ()
    assert score(config("sloBufferFactor: 0.8")) == [1.0, 0.0]
    assert score(config("headroomSelectionStrategy: most")) == pytest.approx([1.0, 0.01])
    assert config("headroomSelectionStrategy: composite-most").needs_gauges


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("[", "the file is not YAML", id="no-yaml"),
        pytest.param("kind: 2001-99-99", "the file is not YAML: month must be", id="no-date"),
        pytest.param("[" * 8000, "the file is nested too deeply", id="deep"),
        pytest.param("- " * 8000, "the file is nested too deeply", id="deep-lists"),
        pytest.param("- a", "the file must be a mapping", id="a-list"),
        pytest.param("kind: Pod", 'kind is "Pod"; it must be EndpointPickerConfig', id="kind"),
        pytest.param("plugin: []", '"plugin" is not known; did you mean plugins?', id="field"),
        pytest.param("plugins: {}", "plugins must be a list", id="no-list"),
        pytest.param(
            scored_by("predicted-latency-scorer", "headroomSelectionStrategy: lest"),
            'headroomSelectionStrategy is "lest"; it must be one of least, most, composite-least',
            id="strategy",
        ),
        pytest.param(
            scored_by("predicted-latency-scorer", "sloBufferFactor: 0"),
            "sloBufferFactor is 0; it must be 0.01 to 100",
            id="buffer",
        ),
        pytest.param("plugins: []", "schedulingProfiles is empty", id="no-profile"),
        pytest.param(plugins("- type: queue-scorr"), "did you mean queue-scorer?", id="type"),
        pytest.param(plugins("- name: a"), "plugins[0].type is missing", id="no-type"),
        pytest.param(
            plugins("- type: load-aware-scorer", "  parameters: {treshold: 3}"),
            "plugins[0].parameters.treshold is not known; did you mean threshold?",
            id="parameter",
        ),
        pytest.param(
            plugins("- type: responses-store", "  parameters: {storeConfig: {inMemoryConfig: {maxEntrys: 1}}}"),
            "storeConfig.inMemoryConfig.maxEntrys is not known; did you mean maxEntries?",
            id="nested-parameter",
        ),
        pytest.param(
            plugins("- type: queue-scorer", "  parameters: {a: 1}"), "a is not known; it takes none", id="takes-none"
        ),
        pytest.param(
            plugins("- type: active-request-scorer", "  parameters: {requestTimeout: 2 minutes}"),
            "it must be a duration such as 2s, 5m or 1h30m",
            id="duration",
        ),
        pytest.param(
            plugins("- type: active-request-scorer", "  parameters: {maxBusyScore: 1.5}") + "",
            "",
            id="not-referred-to",
        ),
        pytest.param(plugins("- type: queue-scorer", "- type: queue-scorer"), "is used twice", id="twice"),
        pytest.param(plugins("- {type: queue-scorer, name: prefix-key}"), "another name", id="name-of-the-key"),
        pytest.param(
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue}]}]",
            'pluginRef "queue" is not in plugins; known are queue-scorer',
            id="reference",
        ),
        pytest.param(
            "plugins: [{type: queue-scorer}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: -1}]}]",
            "weight is -1; it must be a number of 0 to 1000000",
            id="weight",
        ),
        pytest.param(
            "plugins: [{type: active-request-scorer, parameters: {maxBusyScore: 1.5}}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: active-request-scorer}]}]",
            "maxBusyScore is 1.5; it must be 0 to 1",
            id="out-of-range",
        ),
        pytest.param(
            "plugins: [{type: tokenizer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: tokenizer}]}]",
            "is of kind other; a profile has filters, scorers, pickers",
            id="no-place",
        ),
        pytest.param(
            "plugins: [{type: by-label, parameters: {label: a}}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: by-label}]}]",
            "validValues is missing",
            id="by-label",
        ),
        pytest.param(
            "plugins: []\nschedulingProfiles: [{name: a, plugins: []}, {name: b, plugins: []}]",
            "a single profile runs without disagg-profile-handler",
            id="two-profiles",
        ),
        pytest.param(
            DISAGGREGATED.replace("- type: disagg-headers-handler\n", ""),
            "needs disagg-headers-handler",
            id="no-headers",
        ),
        pytest.param(
            DISAGGREGATED.replace("prefill: prefix-based-pd-decider", "prefill: prefill-filter"),
            "is not a decider in plugins; known are prefix-based-pd-decider",
            id="no-decider",
        ),
        pytest.param(
            DISAGGREGATED.replace("- name: decode\n", "- name: decoding\n"),
            'profile "decode" is not in schedulingProfiles; did you mean decoding?',
            id="no-decode-profile",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(text: str, sentence: str) -> None:
    if not sentence:
        read_picker_config(text)  # a scorer that no profile refers to is never asked
        return
    with pytest.raises(InvalidValue) as refused:
        read_picker_config(text)
    assert sentence in refused.value.sentence


def test_every_plugin_that_is_documented_is_known() -> None:
    kinds = {kind: sorted(plugin.type for plugin in PLUGINS.values() if plugin.kind is kind) for kind in PluginKind}

    assert kinds[PluginKind.HANDLER] == ["disagg-profile-handler", "pd-profile-handler", "single-profile-handler"]
    assert len(kinds[PluginKind.SCORER]) == 12
    assert len(kinds[PluginKind.PICKER]) == 3
    assert all(plugin.note for plugin in PLUGINS.values() if plugin.kind is PluginKind.OTHER)


# ---- parameters at the edges of what they may be --------------------------------------------------------


def of_type(plugin: str, parameters: str) -> str:
    """Return a file with a plugin that no profile refers to."""
    return plugins(f"- {{type: {plugin}, parameters: {{{parameters}}}}}")


def weighted(weight: str) -> str:
    profile = f"{{name: a, plugins: [{{pluginRef: queue-scorer, weight: {weight}}}]}}"
    return f"plugins: [{{type: queue-scorer}}]\nschedulingProfiles: [{profile}]\n"


def handled(kind: str, parameters: str, *more: str, headers: str = "{type: disagg-headers-handler}") -> str:
    """Return a file with a handler, deciders of each type, and a profile for each stage."""
    deciders = (
        "{type: always-disagg-pd-decider}, {type: always-disagg-multimodal-decider}, "
        "{name: far, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 50}}, "
        "{type: prefix-based-pd-decider}"
    )
    entries = ", ".join(each for each in (headers, deciders, f"{{type: {kind}, parameters: {{{parameters}}}}}", *more))
    stages = ", ".join(f"{{name: {name}}}" for name in ("decode", "prefill", "encode"))
    return f"plugins: [{entries}]\nschedulingProfiles: [{stages}]\n"


@pytest.mark.parametrize(
    "text",
    [
        weighted("0"),
        weighted("1000000"),
        weighted("0.5"),
        scored_by("max-score-picker", "maxNumOfEndpoints: 1"),
        handled("pd-profile-handler", "primaryPort: 0"),
        handled("pd-profile-handler", "primaryPort: 65535"),
        of_type("prefix-based-pd-decider", "nonCachedTokens: 0"),
        of_type("by-label", "validValues: [], allowsNoLabel: false"),
        of_type("by-label-selector", "matchLabels: {}, matchExpressions: []"),
        of_type("by-label-selector", "matchExpressions: [{key: a, operator: Exists}]"),
        of_type("by-label-selector", "matchExpressions: [{key: a, operator: In, values: [b, c]}]"),
        of_type("active-request-scorer", "requestTimeout: 1h30m"),
        of_type("active-request-scorer", "requestTimeout: 1.5s"),
        of_type("active-request-scorer", "requestTimeout: 10ns20us"),
        scored_by("prefix-cache-scorer", "blockSize: 64, blockSizeTokens: 16"),
        plugins("- {type: queue-scorer, parameters: }"),
        plugins("- {type: queue-scorer, name: another}", "- {type: queue-scorer}"),
        "plugins:\nschedulingProfiles: [{name: a}]",
        "kind: EndpointPickerConfig\nschedulingProfiles: [{name: a, plugins: }]",
        handled("disagg-profile-handler", "", headers="{type: tokenizer}"),
        # A stage without a decider never runs, and its profile may be missing.
        handled("disagg-profile-handler", "profiles: {prefill: none}"),
    ],
)
def test_a_value_at_the_edge_is_taken(text: str) -> None:
    assert read_picker_config(text).profiles


@pytest.mark.parametrize(
    ("text", "sentence", "field"),
    [
        (weighted("1000001"), "it must be a number of 0 to 1000000", "schedulingProfiles[0].plugins[0].weight"),
        (weighted("-0.1"), "it must be a number of 0 to 1000000", "schedulingProfiles[0].plugins[0].weight"),
        (weighted("true"), "it must be a number of 0 to 1000000", "schedulingProfiles[0].plugins[0].weight"),
        (weighted("'1'"), "it must be a number of 0 to 1000000", "schedulingProfiles[0].plugins[0].weight"),
        (weighted(".nan"), "it must be a number of 0 to 1000000", "schedulingProfiles[0].plugins[0].weight"),
        (
            handled("disagg-profile-handler", "profiles: {1: decode}"),
            "profiles must be a mapping by name",
            "plugins[5].parameters.profiles",
        ),
        (
            scored_by("load-aware-scorer", f"threshold: {10**400}"),
            "it must be 1 to 1e+06",
            "plugins[0].parameters.threshold",
        ),
        (scored_by("max-score-picker", "maxNumOfEndpoints: 0"), "it must be a number of at least 1", None),
        (scored_by("random-picker", "maxNumOfEndpoints: 1.5"), "it must be a number of at least 1", None),
        (
            scored_by("random-picker", "maxNumOfEndpoints: true"),
            "it must be a number",
            "plugins[0].parameters.maxNumOfEndpoints",
        ),
        (
            handled("pd-profile-handler", "primaryPort: -1"),
            "it must be a port, or 0",
            "plugins[5].parameters.primaryPort",
        ),
        (
            handled("pd-profile-handler", "primaryPort: 65536"),
            "is 65536; it must be a port, or 0",
            "plugins[5].parameters.primaryPort",
        ),
        (
            handled("pd-profile-handler", "primaryPort: 80.5"),
            "it must be a port, or 0",
            "plugins[5].parameters.primaryPort",
        ),
        (
            handled(
                "disagg-profile-handler",
                "deciders: {prefill: less}",
                "{name: less, type: prefix-based-pd-decider, parameters: {nonCachedTokens: -1}}",
            ),
            "plugins[6].parameters.nonCachedTokens is -1; it must be a number of at least 0",
            None,
        ),
        (
            handled(
                "disagg-profile-handler",
                "deciders: {prefill: less}",
                "{name: less, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 0.5}}",
            ),
            "it must be a number of at least 0",
            None,
        ),
        (
            scored_by("prefix-cache-scorer", "blockSize: 64"),
            "is a number of characters; give blockSizeTokens, a number of tokens",
            "plugins[0].parameters.blockSize",
        ),
        (of_type("by-label", "validValues: a"), "must be a list of texts", "plugins[0].parameters.validValues"),
        (of_type("by-label", "validValues: [1]"), "must be a list of texts", "plugins[0].parameters.validValues"),
        (of_type("by-label", "allowsNoLabel: 'yes'"), "must be true or false", "plugins[0].parameters.allowsNoLabel"),
        (of_type("by-label", "label: 7"), "is 7; it must be a text", "plugins[0].parameters.label"),
        (of_type("load-aware-scorer", "threshold: '7'"), "must be a number", "plugins[0].parameters.threshold"),
        (of_type("load-aware-scorer", "threshold: true"), "must be a number", "plugins[0].parameters.threshold"),
        (
            of_type("by-label-selector", "matchLabels: {a: 1}"),
            "must be texts by name",
            "plugins[0].parameters.matchLabels",
        ),
        (
            of_type("by-label-selector", "matchLabels: {1: a}"),
            "must be texts by name",
            "plugins[0].parameters.matchLabels",
        ),
        (
            of_type("by-label-selector", "matchLabels: [a]"),
            "must be texts by name",
            "plugins[0].parameters.matchLabels",
        ),
        (
            of_type("responses-store", "storeConfig: 1"),
            "must be a mapping by name",
            "plugins[0].parameters.storeConfig",
        ),
        (plugins("- type: ''"), "plugins[0].type is missing, or is no text", "plugins[0].type"),
        (plugins("- type: 7"), "plugins[0].type is missing, or is no text", "plugins[0].type"),
        (plugins("- {type: queue-scorer, name: ''}"), "plugins[0].name is missing", "plugins[0].name"),
        (plugins("- type: queue"), 'plugins[0].type is "queue", which is no plugin', "plugins[0].type"),
        (plugins("- a"), "plugins[0] must be a mapping by name", "plugins[0]"),
        (plugins("- {1: a}"), "plugins[0] must be a mapping by name", "plugins[0]"),
        (plugins("- {type: queue-scorer, parameters: [1]}"), "must be a mapping by name", "plugins[0].parameters"),
        (plugins("- {type: queue-scorer, parameter: {}}"), 'plugins[0]: "parameter" is not known', "parameter"),
        ("schedulingProfiles: {a: b}", "schedulingProfiles must be a list", "schedulingProfiles"),
        ("schedulingProfiles: [{plugins: []}]", "schedulingProfiles[0].name is missing", "schedulingProfiles[0].name"),
        ("schedulingProfiles: [{name: a, plugin: []}]", '"plugin" is not known; did you mean plugins?', "plugin"),
        (
            "schedulingProfiles: [{name: a, plugins: [{weight: 1}]}]",
            "plugins[0].pluginRef is missing",
            "schedulingProfiles[0].plugins[0].pluginRef",
        ),
        ("schedulingProfiles: [{name: a}, {name: a}]", 'schedulingProfiles[1].name "a" is used twice', None),
        ("kind: Pod", "it must be EndpointPickerConfig", "kind"),
        (
            plugins("- type: single-profile-handler", "- type: pd-profile-handler"),
            "several profile handlers (single-profile-handler, pd-profile-handler); keep one",
            None,
        ),
        (
            handled(
                "disagg-profile-handler", "deciders: {encode: always-disagg-pd-decider}", headers="{type: tokenizer}"
            ),
            "disagg-profile-handler with a decider needs disagg-headers-handler among plugins; add it",
            None,
        ),
        (
            handled("disagg-profile-handler", "deciders: {encode: none}"),
            'decider "none" is not a decider in plugins',
            None,
        ),
        (
            handled("disagg-profile-handler", "deciders: {encode: far}, profiles: {encode: encod}"),
            'profile "encod" is not in schedulingProfiles; did you mean encode?',
            None,
        ),
    ],
)
def test_a_value_beyond_the_edge_is_refused_with_its_field(text: str, sentence: str, field: str | None) -> None:
    with pytest.raises(InvalidValue) as refused:
        read_picker_config(text)
    assert sentence in refused.value.sentence
    if field is not None:
        assert refused.value.field == field


@pytest.mark.parametrize("duration", ["", "5", "s", "5 s", "-5s", "5d", "1h 30m", "5s5", ".5s", "5S"])
def test_a_text_that_is_no_duration_is_refused(duration: str) -> None:
    with pytest.raises(InvalidValue, match="it must be a duration such as 2s, 5m or 1h30m"):
        read_picker_config(of_type("active-request-scorer", f"requestTimeout: '{duration}'"))


@pytest.mark.parametrize(
    "row",
    [
        "a",
        "{operator: Exists}",
        "{key: 1, operator: Exists}",
        "{key: a}",
        "{key: a, operator: exists}",
        "{key: a, operator: In, values: b}",
        "{key: a, operator: In, values: [1]}",
        "{key: a, operator: In, value: [b]}",
    ],
)
def test_an_expression_has_a_key_an_operator_and_texts(row: str) -> None:
    with pytest.raises(InvalidValue, match=r"it must be a list of key, operator .* and values") as refused:
        read_picker_config(
            of_type("by-label-selector", f"matchExpressions: [{{key: a, operator: In, values: [b]}}, {row}]")
        )
    assert refused.value.field == "plugins[0].parameters.matchExpressions"


# ---- stages and what they need --------------------------------------------------------------------------

NEW = prompt(60)
PICTURE = prompt(60, is_multimodal=True)
HAVING = target("a", device=11)


@pytest.mark.parametrize(
    ("parameters", "kind", "prefill", "encode"),
    [
        ("deciders: {prefill: always-disagg-pd-decider}", "disagg-profile-handler", (True, True), None),
        ("deciders: {prefill: far}", "disagg-profile-handler", (False, False), None),
        ("deciders: {encode: always-disagg-multimodal-decider}", "disagg-profile-handler", None, (False, True)),
        ("deciders: {encode: far, prefill: always-disagg-multimodal-decider}", "disagg-profile-handler", (False, True),
         (False, False)),
        ("", "disagg-profile-handler", None, None),
        # A bound of 0 tokens separates nothing.
        ("", "pd-profile-handler", (False, False), None),
        ("deciderPluginName: always-disagg-pd-decider", "pd-profile-handler", (True, True), None),
        ("prefillDeciderPluginName: far, deciderPluginName: always-disagg-pd-decider", "disagg-profile-handler",
         (False, False), None),
        ("encodeDeciderPluginName: always-disagg-pd-decider", "disagg-profile-handler", None, (True, True)),
        ("encodeDeciderPluginName: far, deciders: {encode: always-disagg-pd-decider}", "disagg-profile-handler", None,
         (True, True)),
    ],
)  # fmt: skip
def test_a_stage_has_the_decider_that_its_handler_names(
    parameters: str, kind: str, prefill: tuple[bool, bool] | None, encode: tuple[bool, bool] | None
) -> None:
    """Of 60 tokens 11 are there, and then whether there is a picture."""
    config = read_picker_config(handled(kind, parameters))
    for name, decider, expected in (
        (config.prefill, config.prefill_decider, prefill),
        (config.encode, config.encode_decider, encode),
    ):
        assert (name is None) == (decider is None) == (expected is None)
        if decider is not None:
            assert (decider(NEW, HAVING), decider(PICTURE, HAVING)) == expected
    assert config.decode == "decode"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("", ("decode", "prefill", "encode")),
        ("decodeProfile: prefill, prefillProfile: encode, encodeProfile: decode", ("prefill", "encode", "decode")),
        ("profiles: {decode: encode, prefill: decode, encode: prefill}", ("encode", "decode", "prefill")),
        ("profiles: {decode: encode}, decodeProfile: prefill", ("encode", "prefill", "encode")),
    ],
)
def test_a_stage_has_the_profile_that_its_handler_names(parameters: str, expected: tuple[str, str, str]) -> None:
    deciders = "deciders: {prefill: far, encode: far}"
    config = read_picker_config(handled("disagg-profile-handler", f"{deciders}, {parameters}".rstrip(", ")))
    assert (config.decode, config.prefill, config.encode) == expected


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (handled("disagg-profile-handler", "deciders: {prefill: far}, profiles: {}"), ()),
        (
            handled("disagg-profile-handler", "prefillDeciderPluginName: far, decodeProfile: decode"),
            ("disagg-profile-handler: decodeProfile, prefillDeciderPluginName are older names; write profiles.* and "
             "deciders.*",),
        ),
        (
            handled("pd-profile-handler", "primaryPort: 8000, decodeProfile: decode"),
            ("primaryPort: requests go to the port in the address of each registration",),
        ),
    ],
)  # fmt: skip
def test_the_log_says_what_a_handler_has_that_is_older_or_elsewhere(text: str, notes: tuple[str, ...]) -> None:
    found = read_picker_config(text).notes
    assert found[-len(notes) :] == notes if notes else not any("older names" in note for note in found)


def test_fields_beside_plugins_and_a_handler_that_is_not_needed_are_noted() -> None:
    config = read_picker_config(
        "data: {}\nsaturationDetector: {}\nplugins: [{type: prefill-header-handler}]\nschedulingProfiles: [{name: a}]"
    )
    assert [note.partition(":")[0] for note in config.notes] == ["prefill-header-handler", "data", "saturationDetector"]


@pytest.mark.parametrize("name", SCORERS)
def test_a_profile_knows_what_its_scorer_needs(name: str) -> None:
    config = read_picker_config(scored_by(name, ""))
    (scorer,) = config.profiles["default"].scorers
    row = SCORERS[name]
    assert (scorer.name, scorer.weight) == (name, 1.0)
    assert (scorer.needs_gauges, scorer.needs_answer_times, scorer.is_prefix) == (
        row.needs_gauges,
        row.needs_answer_times,
        row.is_prefix,
    )
    assert (config.needs_gauges, config.needs_answer_times) == (row.needs_gauges, row.needs_answer_times)
    some = [target("a", device=16, active=2, gauges=busy(1, 2, 0.5)), target("b", gauges=busy(3, 1, 0.25))]
    values = read_constants(row.parameters, {}, "parameters")
    assert [*scorer.score(prompt(64), some)] == [*row.score(prompt(64), some, values)]


@pytest.mark.parametrize(
    ("picker", "expected"),
    [
        ("", 1),
        ("{type: max-score-picker}", 1),
        ("{type: max-score-picker, parameters: {maxNumOfEndpoints: 1}}", 1),
        ("{type: max-score-picker, parameters: {maxNumOfEndpoints: 5}}", 5),
    ],
)
def test_a_profile_has_one_endpoint_unless_its_picker_says_more(picker: str, expected: int) -> None:
    references = "[{pluginRef: max-score-picker}]" if picker else "[]"
    text = f"plugins: [{picker}]\nschedulingProfiles: [{{name: a, plugins: {references}}}]\n"
    assert read_picker_config(text).profiles["a"].endpoints_max == expected


@pytest.mark.parametrize(
    ("parameters", "label", "expected"),
    [
        ("", CONTEXT_LABEL, {"short": 0.3 / 1.054, "long": 1.0}),
        ("enableFiltering: false", CONTEXT_LABEL, {"short": 0.3 / 1.054, "long": 1.0}),
        ("enableFiltering: true", CONTEXT_LABEL, {"long": 1.0}),
        ("enableFiltering: true, label: lengths", "lengths", {"long": 1.0}),
        # Targets without the label take any length.
        ("enableFiltering: true, label: lengths", CONTEXT_LABEL, {"short": 0.5, "long": 0.5}),
    ],
)
def test_lengths_are_a_score_and_a_filter_if_that_is_wanted(
    parameters: str, label: str, expected: dict[str, float]
) -> None:
    config = read_picker_config(scored_by("context-length-aware", parameters))
    some = [target("short", labels={label: "0-10"}), target("long", labels={label: "64-64"})]
    found = {each.candidate.instance_id: each.value for each in config.run(prompt(64), some, Random(1)).decode}
    assert found == pytest.approx(expected)
