"""Commands with only a URL of Redis: what they leave on a disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from waymark.base.errors import StoreUnavailable
from waymark.base.settings import Settings
from waymark.runtime import commands
from waymark.store.exporting import Exported
from waymark.store.store import Store


async def test_only_its_owner_reads_an_export_and_one_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = Settings(redis_url="memory://"), tmp_path / "index"
    left = tmp_path / "index.part"  # by anybody
    left.write_bytes(b"theirs")
    left.chmod(0o666)

    async def exported(store: Store, file: BinaryIO, **_: object) -> Exported:
        file.write(b"an index")
        return Exported(publishers=1)

    monkeypatch.setattr(commands, "export_index", exported)
    await commands.export_to(settings, path, model=None, tenant=None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert left.read_bytes() == b"theirs"

    async def failed(*_: object, **__: object) -> None:
        raise StoreUnavailable("Redis is gone")

    before = path.read_bytes()
    monkeypatch.setattr(commands, "export_index", failed)
    with pytest.raises(StoreUnavailable):
        await commands.export_to(settings, path, model=None, tenant=None)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["index", "index.part"]
