"""The counts of ``make house``: rooms, arrows, floors, crumbs, lines and words, of a house of a few files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house

FILES = {
    "__init__.py": "",
    "__main__.py": "from waymark.cli import main\n",
    "base/__init__.py": "",
    "base/errors.py": "class E(Exception): ...\n",
    "store/__init__.py": "",
    "store/index.py": "from waymark.base import errors\nfrom waymark.store.redis.client import Client\n",
    "store/redis/__init__.py": "",
    "store/redis/client.py": "def f():\n    from waymark.base.errors import E\n",
    "cli/__init__.py": "import waymark.store.index\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return build(tmp_path, FILES)


def build(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "app" / "waymark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_room_is_a_package_and_an_arrow_an_import_of_another_room(tree: Path) -> None:
    arrows = house.arrows_of(house.read_modules(tree))
    assert arrows == {
        "waymark": {"cli"},
        "base": set(),
        "cli": {"store"},
        "store": {"base", "store.redis"},
        "store.redis": {"base"},
    }
    assert house.floors_of(arrows) == {"base": 1, "store.redis": 2, "store": 3, "cli": 4, "waymark": 5}
    assert house.circles_of(arrows) == []


def test_the_rooms_of_a_circle_are_named_and_share_a_floor() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert house.circles_of(arrows) == ["b", "c"]
    assert house.floors_of(arrows) == {"d": 1, "b": 2, "c": 2, "a": 3}


def test_a_module_with_one_importer_is_listed_with_it(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = house.read_modules(tree)
    assert house.crumbs_of(modules) == {"store.redis.client": "store.index", "store.index": "cli"}
    assert house.main([str(tree), "--crumbs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["store.index", "2", "cli", "1"],
        ["store.redis.client", "2", "store.index", "2"],
    ]


def test_figures_are_of_code_names_and_prose(tmp_path: Path) -> None:
    text = (
        '"""What is held, if any of it is None; `what` is code."""\n\n'
        "# Nothing, where none is.\n"
        "class Settings:\n"
        "    port: int = 1\n"
        '    """The port."""\n'
        "    host: str = (\n"
        '        "x"\n'
        "    )\n\n\n"
        "def short(found, self):\n    size = 1\n    return size\n\n\n"
        "def long():\n" + "    pass\n" * house.FUNCTION_LINES
    )
    figures = house.measure(build(tmp_path, {"__init__.py": "", "settings.py": text}))
    assert figures["settings"] == "2"
    assert figures["functions"] == "2"
    assert figures[f"functions above {house.FUNCTION_LINES} lines"] == "1"
    assert figures["lines without blank lines, comments and docstrings"] == str(9 + house.FUNCTION_LINES)
    words = 11 + 4 + 2
    assert figures["words of docstrings and comments"] == str(words)
    assert figures['"what" as a noun, in 1,000 words'] == f"{1000 / words:.1f}"
    assert figures['"none", "nothing", "nobody", in 1,000 words'] == f"{1000 / words:.1f}"
    assert figures['"of it", "of them", "of these", in 1,000 words'] == f"{1000 / words:.1f}"
    assert figures["names that are pronouns, prepositions or participles, %"] == f"{100 / 4:.1f}"


def test_trees_are_columns_of_one_table(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "ROOT", build(tmp_path / "now", FILES))
    assert house.main([str(tree), str(house.ROOT)]) == 0
    head, rule, rooms, *_ = capsys.readouterr().out.splitlines()
    assert str(tree) in head
    assert "now" in head
    assert set(rule) == {"|", "-"}
    assert [cell.strip() for cell in rooms.split("|")][1:3] == ["rooms", "5"]


def test_what_is_no_checkout_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        house.main([str(tmp_path)])
    assert f"{tmp_path} is not a checkout: it has no app/waymark" in capsys.readouterr().err


def test_the_picture_has_each_room_on_its_floor_and_no_arrow_that_a_longer_way_says(tmp_path: Path) -> None:
    files = {"a/__init__.py": "import waymark.b, waymark.c", "b/__init__.py": "import waymark.c", "c/__init__.py": ""}
    tree = build(tmp_path, files)
    picture = house.picture(tree)
    assert [line.strip() for line in picture.splitlines() if "-->" in line] == [
        "room_a --> room_b",
        "room_b --> room_c",
    ]
    assert picture.index('"level 3"') < picture.index('["a"]') < picture.index('"level 2"') < picture.index('["b"]')


@pytest.mark.slow
def test_the_design_shows_the_rooms_as_they_are() -> None:
    page = (house.ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{house.picture(house.ROOT)}\n```" in page, "run: make house HOUSE=--picture"
