"""The options of a replica's decisions, and the files that they name."""

from __future__ import annotations

import logging
from dataclasses import field
from pathlib import Path

from waymark.base.errors import InvalidValue, SettingsError
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.base.watched_file import WatchedFile
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.presets import DEFAULT, PRESETS, preset
from waymark.decide.policies.profile import PickerConfig
from waymark.decide.question import PolicyChoice, ProfileName

log = logging.getLogger(__name__)


PolicySource = PolicyChoice | WatchedFile[PolicyChoice]
"""A preset, or the one entry of an ``EndpointPickerConfig`` file, which is read again when it has changed."""
RESERVATIONS_MAX = 1_000_000
"""The most reservations of one model: those of a thousand engines with a thousand requests each. Without a bound, a
client that releases none would fill Redis."""
DRIFT_MAX = 0.2
"""The share of a target's expected tokens that may be missing before its tokens count for less. The dashboard and
its runbook name this share, too."""
#: The most shadows: each one ranks the targets of every decision.
_SHADOWS_MAX = 4


def current(source: PolicySource) -> PolicyChoice:
    """Return the policy of a source as it is now."""
    return source if isinstance(source, PolicyChoice) else source.entries[0]


@record(frozen=True, slots=True)
class Shadow:
    """A policy that orders the targets of each decision, and decides nothing."""

    name: str
    """The name of a preset, or the path of a picker file."""
    source: PolicySource

    @property
    def policy(self) -> PolicyChoice:
        """The policy; a file is read again when it has changed."""
        return current(self.source)


@record(frozen=True, slots=True)
class SelectionOptions:
    """The options. Times are in seconds unless the name says otherwise."""

    policy: PolicySource = field(default_factory=lambda: PolicyChoice.of(PRESETS[DEFAULT]))
    """The policy of a request that names none."""
    profile: ProfileName | None = None
    """The profile of a request that names none; None: the policy decides."""
    deadline_seconds: float = 1.0
    loads_seconds: float = 0.1
    """The greatest age of loads that candidates are ranked by; 0: they are read for each decision."""
    target_requests_max: int = 0
    reservations_max: int = RESERVATIONS_MAX
    drift_max: float = DRIFT_MAX
    is_speculative: bool = False
    prefill_tokens_per_second: float = 0.0
    shadows: tuple[Shadow, ...] = ()
    decisions_kept: float = 0.0
    """The share of decisions to keep in Redis."""

    def default_policy(self) -> PolicyChoice:
        """Return the policy of a request that does not name one; a file is read again when it has changed."""
        return current(self.policy)

    @property
    def needs_gauges(self) -> bool:
        """Whether a policy, of decisions or a shadow, needs gauges of engines."""
        return any(
            policy.needs_gauges for policy in (self.default_policy(), *(shadow.policy for shadow in self.shadows))
        )


def read_policy(name: str, variable: str, subject: str = "picker") -> PolicySource:
    """Return the preset of this name, or the policy of the picker file at this path, which is read again when it has
    changed. Raise ``SettingsError``, which names ``variable``, if there is none.
    """
    if set(name) & {"/", "."}:
        return WatchedFile(Path(name), lambda path: [PolicyChoice.of(read_file(str(path), variable))], subject)
    try:
        return PolicyChoice.of(preset(name, variable))
    except InvalidValue as exc:
        raise SettingsError(f"{exc.sentence}, or write the path of a picker file") from None


def read_shadows(text: str) -> tuple[Shadow, ...]:
    """Read the shadows: names of presets and paths of picker files. Raise ``SettingsError`` for an unknown name."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if len(names) > _SHADOWS_MAX or len(set(names)) < len(names):
        raise SettingsError(f"WAYMARK_SHADOW is {shown(text)}; name at most {_SHADOWS_MAX} different policies")
    return tuple(Shadow(name, read_policy(name, "WAYMARK_SHADOW", "shadow")) for name in names)


def read_file(path: str, variable: str) -> PickerConfig:
    """Read a picker file. Raise ``SettingsError``, which names ``variable``."""
    try:
        config = read_picker_config(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{variable} {path} cannot be used: {exc}") from None
    except InvalidValue as exc:
        raise SettingsError(f"{variable} {path}: {exc.sentence}") from None
    for note in config.notes:
        log.info("an entry of the picker file works differently in waymark", extra=fields(note=note))
    return config
