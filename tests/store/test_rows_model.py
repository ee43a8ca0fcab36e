"""Random histories of rows agree with a model, and deliberate defects of the scripts do not."""

from __future__ import annotations

from hashlib import sha1

import pytest
from redis.asyncio import Redis

from tests.store import rows_model
from tests.store.rows_model import run_histories
from waymark.domain import moves
from waymark.domain.waves import Waves
from waymark.store.lua import SCRIPTS, Script

HISTORIES = {"real": 200, "emulated": 8}
"""``python -m tests.store.rows_model`` runs more, by seed."""

DEFECTS = {
    "keys are found across the border of two slots": ("apply_rows", "while at and at % 17 ~= 1 do", "while false do"),
    "a row with a branch row is not marked": ("apply_rows", "mark_piece(open_piece(part.row, true), '+')", ""),
    "branch rows are not counted down": (
        "apply_rows",
        "part.row]:sub(prefix), -1) == 0",
        "part.row]:sub(prefix), 0) == 0",
    ),
    "the first slot is given away": ("apply_rows", "for slot = count - 1, 1, -1 do", "for slot = count - 1, 0, -1 do"),
    "a part is counted as a whole": ("apply_rows", "part.last - 2 * (part.n - n)", "part.last"),
    "an entry is written from its first slot on": (
        "apply_rows",
        "local from, slot = i, found[i]",
        "local from, slot = i, i - 1",
    ),
    "a block that is noted may be there": ("apply_rows", "if at or slot >= slots_max or", "if slot >= slots_max or"),
    "the engine hash of a noted block is not kept": (
        "apply_rows",
        "noted.hashes .. hashes, slot",
        "noted.hashes, slot",
    ),
    "a noted removal leaves a holder without blocks": (
        "apply_rows",
        "if low == 0 and high == 0 then return false end",
        "",
    ),
    "a row is cut up without what is noted": ("apply_rows", "if notes[i] then settle(i) end", ""),
    "a mark stays after its branch rows": ("sweep_rows", "if row and row:byte(at) == 43 then", "if false then"),
}


@pytest.fixture(autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    return "real" if "real" in request.node.name else "emulated"


async def test_random_histories_agree_with_the_model(redis: Redis, kind: str) -> None:
    rows_model.seen.clear()
    await run_histories(redis, range(HISTORIES[kind]))
    happened = (
        "lost replies", "stopped before a call", "stopped after a call", "branch", "row", "branch rows", "singles",
        "second hashes", "aliases", "takeovers", "restarts", "sweep steps", "late calls",
    )  # fmt: skip
    assert [what for what in happened if not rows_model.seen.get(what)] == []


@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_defect_of_a_script_is_caught(
    redis: Redis, kind: str, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    if kind == "emulated":
        pytest.skip("the real Redis is faster, and the scripts are the same")
    name, right, wrong = DEFECTS[defect]
    text = SCRIPTS[name].text
    assert right in text
    text = text.replace(right, wrong)
    monkeypatch.setattr(moves, "REFUSALS_MAX", 1000)
    monkeypatch.setitem(SCRIPTS, name, Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest()))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await run_histories(redis, range(200))
    assert any(note.startswith("history ") for note in caught.value.__notes__)


async def test_parts_that_do_not_wait_for_other_shards_are_caught(
    redis: Redis, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "emulated":
        pytest.skip("the real Redis is faster")
    monkeypatch.setattr(Waves, "is_needed", property(lambda _: False, lambda *_: None), raising=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await run_histories(redis, range(200))
    assert any(note.startswith("history ") for note in caught.value.__notes__)
