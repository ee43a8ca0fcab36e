"""Random histories of rows agree with a model, and deliberate defects of the scripts do not."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store import rows_model
from tests.store.rows_model import run_histories
from waymark.domain import moves, placing
from waymark.domain.parts import new_waves
from waymark.store.redis.client import SCRIPTS, Script

HISTORIES = {"real": 60, "emulated": 8}
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
    "a block may be noted twice": ("apply_rows", "if find(noted.slots, key, 1, true) then return false end", ""),
    "a noted run may be across the border of two slots": ("apply_rows", "if not at or at % 17 ~= 1 or", "if not at or"),
    "the engine hash of a noted block is not kept": (
        "apply_rows",
        "noted.hashes .. hashes, true",
        "noted.hashes, true",
    ),
    "a noted engine hash is not at its slot": (
        "apply_rows",
        "or hashes ~= '' and noted.length + #noted.hashes ~= 8 * from then",
        "then",
    ),
    "a noted removal leaves a mark or a branch row": (
        "apply_rows",
        "if not is_left and (noted.is_marked or part.branch > 0) then return false end",
        "",
    ),
    "a branch row is made of a block that the row has": (
        "apply_rows",
        "mark % 17 ~= 1 or find(head, key, 1, true) then",
        "mark % 17 ~= 1 then",
    ),
    "a row is cut up without what is noted": ("apply_rows", "if notes[i] then finish(i) end", ""),
    "another holder is noted in the note of one": ("apply_rows", "noted.holder ~= part.holder or", ""),
    "a long row is read again without what it got": (
        "apply_rows",
        "if appended[i] then values[i]",
        "if false then values[i]",
    ),
    "a block comes into a shared branch row without its parent": (
        "apply_rows",
        "or not slot_of(piece, part.above) then return 'branch'",
        "then return 'branch'",
    ),
    "a block comes into a shared branch row of other digits": (
        "apply_rows",
        "not part.above or not is_named_for(part) or",
        "not part.above or",
    ),
    "a noted block comes into a shared branch row without its parent": (
        "apply_rows",
        "if is_shared(part) and not may_share(part, value, noted.slots) then return false end",
        "",
    ),
    "a noted block comes into a shared branch row of other digits": (
        "apply_rows",
        "part.row <= rows_read or not is_named_for(part) then",
        "part.row <= rows_read then",
    ),
    "a noted block that the row lists comes into a shared branch row": (
        "apply_rows",
        " and not lists(head, sub(part.slots, 1, 16))",
        "",
    ),
    "the name of a shared branch row counts as a parent": (
        "apply_rows",
        "lists(sub(value, 18), part.above)",
        "lists(value, part.above)",
    ),
    "a mark stays after its branch rows": ("sweep_rows", "if row and row:byte(at) == 43 then", "if false then"),
}

#: Defects that few histories find, and the first of these, before which none is tried.
FOUND_BY = {
    "a noted run may be across the border of two slots": 39,
    "a block comes into a shared branch row without its parent": 34,
    "a block comes into a shared branch row of other digits": 40,
    "a noted block comes into a shared branch row of other digits": 120,
}

LONG = "local LONG = 4096", "local LONG = 17 * tonumber(ARGV[9]) + 2"
"""A row is long as soon as it has more than its slots."""


@pytest.fixture(autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    return "real" if "real" in request.node.name else "emulated"


def change(monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str) -> None:
    text = SCRIPTS[name].text
    assert right in text
    text = text.replace(right, wrong)
    monkeypatch.setitem(SCRIPTS, name, Script.of(text))


async def test_random_histories_agree_with_the_model(redis: Redis, kind: str) -> None:
    rows_model.seen.clear()
    await run_histories(redis, range(HISTORIES[kind]))
    happened = (
        "lost replies", "stopped before a call", "stopped after a call", "branch", "row", "branch rows", "singles",
        "second hashes", "aliases", "takeovers", "restarts", "sweep steps", "late calls", "shared branch rows",
    )  # fmt: skip
    assert [what for what in happened if not rows_model.seen.get(what)] == []


async def test_random_histories_of_long_rows_agree_with_the_model(
    redis: Redis, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_model.seen.clear()
    change(monkeypatch, "apply_rows", *LONG)
    change(monkeypatch, "apply_rows", "local GAP = 8", "local GAP = 1")
    await run_histories(redis, range(HISTORIES[kind] // 2))
    assert kind == "emulated" or rows_model.seen.get("apart", 0) > 0


# The real Redis is faster, and the scripts are the same.
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_defect_of_a_script_is_caught(redis: Redis, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    monkeypatch.setattr(moves, "REFUSALS_MAX", 1000)
    change(monkeypatch, *DEFECTS[defect])
    if "long" in defect:
        change(monkeypatch, "apply_rows", *LONG)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await run_histories(redis, range(FOUND_BY.get(defect, 0), 200))
    assert any(note.startswith("history ") for note in caught.value.__notes__)


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_parts_that_do_not_wait_for_other_shards_are_caught(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "new_waves", lambda _: new_waves(1))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await run_histories(redis, range(200))
    assert any(note.startswith("history ") for note in caught.value.__notes__)
