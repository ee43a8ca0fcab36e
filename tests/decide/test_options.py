"""What a replica decides by is checked at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from waymark.base import watched_file
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.presets import PRESETS
from waymark.decide.selector import Selector
from waymark.runtime import parts
from waymark.store.store import Store


def test_the_settings_are_taken_in_their_units() -> None:
    options = parts.selection_options(Settings(policy="lmetric", loads_ms=250, query_deadline_ms=500))
    assert options.default_policy().preset == PRESETS["lmetric"]
    assert parts.selection_options(Settings()).default_policy().preset == PRESETS["least-work"]
    assert SelectionOptions().default_policy().preset == PRESETS["least-work"]
    assert (options.loads_seconds, options.deadline_seconds) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("settings", "name", "expected"),
    [
        ({}, "deadline_seconds", 1.0),
        ({"query_deadline_ms": 20}, "deadline_seconds", 0.02),
        ({}, "loads_seconds", 0.1),
        ({"loads_ms": 0}, "loads_seconds", 0.0),
        ({}, "target_requests_max", 0),
        ({"target_requests_max": 7}, "target_requests_max", 7),
        ({}, "drift_max", 0.2),
        ({}, "is_speculative", False),
        ({"speculative": True}, "is_speculative", True),
        ({"prefill_tokens_per_second": 8_000}, "prefill_tokens_per_second", 8_000.0),
        ({"decisions_kept": 1}, "decisions_kept", 1.0),
        ({}, "shadows", ()),
        ({"shadow": ""}, "shadows", ()),
        ({"shadow": " , "}, "shadows", ()),
    ],
)
def test_each_setting_has_its_option(settings: dict[str, Any], name: str, expected: object) -> None:
    assert getattr(parts.selection_options(Settings(**settings)), name) == expected


def picker(path: Path, *types: str) -> str:
    plugins = ", ".join(f"{{type: {name}}}" for name in types)
    references = ", ".join(f"{{pluginRef: {name}}}" for name in types)
    path.write_text(
        f"plugins: [{plugins}]\nschedulingProfiles: [{{name: one, plugins: [{references}]}}]\n", encoding="utf-8"
    )
    return str(path)


@pytest.mark.parametrize(
    ("settings", "gauged", "is_warned"),
    [
        ({"policy": "llm-d"}, None, True),
        ({"policy": "least-work"}, None, False),
        ({"policy": "least-work", "shadow": "lmetric, llm-d"}, None, True),
        ({"policy": "least-work", "shadow": "lmetric"}, None, False),
        ({}, "policy", True),
        ({}, "", False),
        ({}, "shadow", True),
        ({"policy": "llm-d", "gauges_seconds": 1}, None, False),
        ({"gauges_seconds": 0.5}, "policy", False),
    ],
)
def test_a_policy_of_gauges_that_nobody_reads_is_warned_of(
    settings: dict[str, Any], gauged: str | None, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"gauges_seconds": 0} | settings
    if gauged is not None:
        scorer = "queue-scorer" if gauged else "active-request-scorer"
        given[gauged or "policy"] = picker(tmp_path / "picker.yaml", scorer)
    parts.selection_options(Settings(**given))
    assert ("WAYMARK_GAUGES_SECONDS is 0" in caplog.text) is is_warned


def test_the_policy_of_a_request_that_names_none_is_that_of_the_file(tmp_path: Path) -> None:
    of_preset = parts.selection_options(Settings(policy="lmetric")).default_policy()
    assert (of_preset.preset, of_preset.file) == (PRESETS["lmetric"], None)
    path = picker(tmp_path / "picker.yaml", "session-affinity-scorer")
    of_file = parts.selection_options(Settings(policy=path)).default_policy()
    assert of_file.preset is None
    assert of_file.file is not None
    assert [scorer.name for scorer in of_file.file.profiles["one"].scorers] == ["session-affinity-scorer"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lmetric", ["lmetric"]),
        (" lmetric ,, sticky,", ["lmetric", "sticky"]),
        ("lmetric,sticky,dynamo,longest", ["lmetric", "sticky", "dynamo", "longest"]),
        # A preset whose name looks like a path stays one.
        ("llm-d", ["llm-d"]),
    ],
)
def test_shadows_are_named_one_behind_the_other(text: str, names: list[str]) -> None:
    shadows = parts.selection_options(Settings(shadow=text)).shadows
    assert [shadow.name for shadow in shadows] == names
    assert [shadow.policy.preset for shadow in shadows] == [PRESETS[name] for name in names]


@pytest.mark.parametrize(
    "text", ["lmetric,sticky,dynamo,longest,llm-d", "lmetric,lmetric", "sticky, lmetric ,sticky", "a,b,c,d,e"]
)
def test_shadows_are_few_and_different(text: str) -> None:
    with pytest.raises(SettingsError, match=r"WAYMARK_SHADOW is .*; name at most 4 different policies"):
        parts.selection_options(Settings(shadow=text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lmetrics", r'WAYMARK_SHADOW is "lmetrics", .*did you mean lmetric\?, or write the path of a picker file'),
        ("sticky,nobody", r'WAYMARK_SHADOW is "nobody", which is no policy; known are .*, or write the path'),
        ("picker.yaml", r"WAYMARK_SHADOW picker\.yaml cannot be used: .*No such file"),
        ("/none/picker", r"WAYMARK_SHADOW /none/picker cannot be used: .*No such file"),
    ],
)
def test_a_word_is_a_policy_and_a_path_is_a_file(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        parts.selection_options(Settings(shadow=text))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "picker.yaml"
    path.write_bytes(b"\xff\xfe")
    for variable, settings in (("WAYMARK_POLICY", "policy"), ("WAYMARK_SHADOW", "shadow")):
        given: dict[str, Any] = {settings: str(path)}
        with pytest.raises(SettingsError, match=rf"{variable} .*picker\.yaml cannot be used: .*utf-8"):
            parts.selection_options(Settings(**given))


def test_an_unknown_policy_is_named_with_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r'WAYMARK_POLICY is "least-wrok".*did you mean least-work'):
        parts.selection_options(Settings(policy="least-wrok"))


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "picker.yaml"
    wrong.write_text("kind: Nope", encoding="utf-8")
    with pytest.raises(SettingsError, match=r'WAYMARK_POLICY .*picker.yaml.*kind is "Nope"'):
        parts.selection_options(Settings(policy=str(wrong)))
    with pytest.raises(SettingsError, match=r"WAYMARK_POLICY .*cannot be used"):
        parts.selection_options(Settings(policy=str(tmp_path / "none.yaml")))


def test_the_log_says_what_does_the_work_of_a_plugin_that_belongs_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("plugins: [{type: tokenizer}]\nschedulingProfiles: [{name: one}]\n", encoding="utf-8")
    with caplog.at_level("INFO"):
        options = parts.selection_options(Settings(policy=str(file)))
    file_policy = options.default_policy().file
    assert file_policy is not None
    (note,) = file_policy.notes
    assert [record.__dict__["fields"] for record in caplog.records] == [{"note": note}]


async def test_a_picker_file_that_changes_counts_without_a_restart_and_a_wrong_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched_file, "_POLL_SECONDS", 0.0)
    file = tmp_path / "picker.yaml"

    def write(weight: str) -> None:
        """Replace the file as a mounted ConfigMap does."""
        (tmp_path / "new").write_text(
            "plugins: [{type: active-request-scorer}]\nschedulingProfiles: [{name: one, plugins: "
            f"[{{pluginRef: active-request-scorer, weight: {weight}}}]}}]\n",
            encoding="utf-8",
        )
        (tmp_path / "new").rename(file)

    def weight() -> float:
        config = selector.default_policy.file
        assert config is not None
        return config.profiles["one"].scorers[0].weight

    write("1")
    store = Store.open("memory://")
    selector = Selector(store, parts.selection_options(Settings(policy=str(file))), Metrics())
    assert weight() == 1.0
    before = selector.default_policy
    write("22")
    assert weight() == 22.0
    assert before.file is not None
    assert before.file.profiles["one"].scorers[0].weight == 1.0, "a decision that has begun keeps its policy"
    write("heavy")
    assert weight() == 22.0
    assert "picker file cannot be used, the previous picker stay valid" in caplog.text
    file.unlink()
    assert weight() == 22.0
    write("333")
    assert weight() == 333.0
    await store.close()
