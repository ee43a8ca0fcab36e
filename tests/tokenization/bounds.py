"""The times within which tokenizers in a test's process have to answer."""

from __future__ import annotations

import pytest

from tests.patience import patient
from waymark.tokenization import local, places, renderers, tokenizers


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Give them longer on a busy machine, where a process of a template needs many seconds to start."""
    bounds = ((tokenizers, "SECONDS"), (renderers, "WALL_SECONDS"), (renderers, "_START_SECONDS"))
    for module, name in (*bounds, (local, "_TURN_SECONDS"), (places, "_WAIT_SECONDS")):
        patch.setattr(module, name, patient(getattr(module, name)))
