"""What a replica decides by is checked at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from waymark.base.errors import SettingsError
from waymark.base.settings import Settings
from waymark.decide.options import SelectionOptions


def test_the_settings_are_taken_in_their_units() -> None:
    options = SelectionOptions.of(
        Settings(policy="lmetric", loads_ms=250, approximate_seconds=7, query_deadline_ms=500)
    )
    assert (options.policy.name, options.picker) == ("lmetric", None)
    assert (options.loads_seconds, options.approximate_milliseconds, options.deadline_seconds) == (0.25, 7000, 0.5)


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
    assert options.picker is not None
    assert len(caplog.records) == len(options.picker.notes) == 1
