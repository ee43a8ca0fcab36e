"""What a replica decides by is checked at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from waymark.base import watched_file
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.options import SelectionOptions
from waymark.decide.selector import Selector
from waymark.store.store import Store


def test_the_settings_are_taken_in_their_units() -> None:
    options = SelectionOptions.of(Settings(policy="lmetric", loads_ms=250, query_deadline_ms=500))
    assert (options.policy.name, options.picker_file) == ("lmetric", None)
    assert (options.loads_seconds, options.deadline_seconds) == (0.25, 0.5)


def test_an_unknown_policy_is_named_with_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r'WAYMARK_POLICY is "least-wrok".*did you mean least-work'):
        SelectionOptions.of(Settings(policy="least-wrok"))


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "picker.yaml"
    wrong.write_text("kind: Nope", encoding="utf-8")
    with pytest.raises(SettingsError, match=r'WAYMARK_PICKER_CONFIG .*picker.yaml.*kind is "Nope"'):
        SelectionOptions.of(Settings(picker_config=str(wrong)))
    with pytest.raises(SettingsError, match=r"WAYMARK_PICKER_CONFIG .*cannot be used"):
        SelectionOptions.of(Settings(picker_config=str(tmp_path / "none.yaml")))


def test_the_log_says_what_does_the_work_of_a_plugin_that_belongs_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("plugins: [{type: tokenizer}]\nschedulingProfiles: [{name: one}]\n", encoding="utf-8")
    with caplog.at_level("INFO"):
        options = SelectionOptions.of(Settings(picker_config=str(file)))
    assert options.picker_file is not None
    assert len(caplog.records) == len(options.picker_file.entries[0].notes) == 1


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
    selector = Selector(store, SelectionOptions.of(Settings(picker_config=str(file))), Metrics())
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
