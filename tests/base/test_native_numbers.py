"""The C module with more or fewer bits for numbers of things than 27: no number for one more, and short distances."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.base.test_native_limits import loaded
from tests.patience import patient
from waymark.domain.known import Spot
from waymark.domain.rows import Place

NATIVE = Path(__file__).parents[2] / "native"
BLOCKS_MAX, PLACES_MAX = 768, 1023
"""Blocks of a table, in whole chunks of 256, and places."""


def counts(source: Path) -> bool:
    """Whether what is compiled of a source depends on the bits for numbers, which ``index.h`` has."""
    included = re.findall(r'^#include "(\w+\.h)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return "index.h" in included or any(counts(NATIVE / name) for name in included)


def compile_native(folder: Path, *arguments: str | Path) -> None:
    """Run the compiler in a directory."""
    compiler, headers = shutil.which("gcc"), Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").is_file():
        pytest.skip("there is no compiler")
    flags = ("-fPIC", "-O0", "-DPy_LIMITED_API=0x030B0000", '-DWAYMARK_SOURCES="few"', f"-I{headers}")
    subprocess.run([compiler, *flags, *arguments], cwd=folder, check=True, timeout=patient(120))


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What is the same in each of the modules, compiled once."""
    folder = tmp_path_factory.mktemp("alike")
    compile_native(folder, "-c", *(each for each in NATIVE.glob("*.c") if not counts(each)))
    return list(folder.glob("*.o"))


def compiled(folder: Path, number_bits: int, alike: list[Path]) -> Any:
    """Return the C module, compiled with so many bits for numbers."""
    others = [each for each in NATIVE.glob("*.c") if counts(each)]
    compile_native(folder, "-shared", f"-DNUMBER_BITS={number_bits}", *others, *alike, "-o", "few.so")
    return loaded(folder / "few.so")


def fill(known: Any, first: int) -> list[int]:
    """Store blocks at a place of their own until there is no number; their engine hashes."""
    stored: list[int] = []
    with contextlib.suppress(MemoryError):
        for number in range(first, first + 2 * PLACES_MAX):
            known.store(Place(number), 0, [number << 20], [0], [number])
            stored.append(number)
    return stored


def check(known: Any, stored: list[int]) -> None:
    """The table has these blocks, and no others."""
    assert [known.get(each) for each in stored] == [Spot(Place(each), 0, 0, each << 20) for each in stored]
    assert [known.first(each << 20) for each in stored] == stored
    assert (len(known), known.blocks()) == (len(stored), len(stored))


@pytest.mark.outside
def test_without_a_number_for_one_more_nothing_changes(tmp_path: Path, alike: list[Path]) -> None:
    few_numbers = compiled(tmp_path, 10, alike)
    places = few_numbers.Places(Place, Spot)
    one, other = (few_numbers.KnownBlocks(places, True) for _ in range(2))
    blocks, more = fill(one, 1), fill(other, 10_001)
    assert (len(blocks), len(more), len(places)) == (BLOCKS_MAX, PLACES_MAX - BLOCKS_MAX, PLACES_MAX)
    check(one, blocks)
    check(other, more)
    one.discard(blocks[:5])
    again = fill(other, 20_001)
    assert (len(again), len(places)) == (5, PLACES_MAX)
    check(one, blocks[5:])
    check(other, more + again)
    one.discard(blocks)
    other.discard(more + again)
    assert (len(one), len(other), len(places)) == (0, 0, 0)


@pytest.mark.outside
@pytest.mark.parametrize("number_bits", [pytest.param(29, id="up-to-7"), pytest.param(30, id="up-to-3")])
def test_things_far_from_where_they_belong_are_found(tmp_path: Path, alike: list[Path], number_bits: int) -> None:
    """A slot tells a short distance only here; for a longer one the hash of the thing is read. With room for 4, an
    x86-64 looks at four slots at once.
    """
    module = compiled(tmp_path, number_bits, alike)
    known, model, chosen = module.KnownBlocks(module.Places(Place, Spot), True), dict[int, int](), random.Random(29)
    for blocks in (20_000, 500, 5_000, 0):
        while len(model) != blocks:
            if len(model) > blocks:
                gone = chosen.sample(list(model), min(len(model) - blocks, 1 + len(model) // 2))
                known.discard(gone)
                for each in gone:
                    del model[each]
            else:
                engine_hash, key = chosen.getrandbits(64), chosen.getrandbits(64)
                model[engine_hash] = key
                known.store(Place(1), 0, [key], [0], [engine_hash])
        assert len(known) == known.blocks() == blocks
        assert all(known.get(each) == Spot(Place(1), 0, 0, key) for each, key in model.items())
        assert all(known.first(key) == each for each, key in model.items())
        assert not any(known.get(chosen.getrandbits(64)) for _ in range(5_000))
