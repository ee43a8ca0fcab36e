"""The figures of the README are those of the pages, and every file that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "helm" / "README.md",
    ROOT / "lua" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_the_first_screen_says_what_it_is_worth_with_the_figures_of_the_pages_that_measured_it() -> None:
    first = README.partition("If you have a GPU, these three commands lead to a chat completion")[0]
    measured = (ROOT / "docs" / "notes" / "hit-ratio.md").read_text(encoding="utf-8").replace("\n", " ")
    earned, by_chance = re.findall(r"([\d,]+) tokens not computed again .*? of its ([\d,]+)\.", measured)[0]
    computed, by_chance = [float(each.replace(",", "")) / 1e6 for each in (earned, by_chance)]
    said = f"compute {by_chance - computed:.1f} million prompt tokens, and {by_chance:.1f} million"
    assert said in first.replace("\n", " ")
    rows = dict(
        re.findall(
            r"^\| \**([^|*]+?)\** \| \**([\d.]+) s", (ROOT / "docs" / "gateway.md").read_text("utf-8"), re.MULTILINE
        )
    )
    behind, in_turn = (float(rows[name]) for name in ("two gateways, `least-work`", "no gateway: each engine in turn"))
    assert f"is {behind:.1f} s behind two gateways, and {in_turn:.1f} s if each engine is taken in turn" in first
    assert first.count("by `waymark bench --simulate") == 2, "each figure has its command"


def headings(text: str) -> list[str]:
    """Return the names of a page's headings in links: lower-case letters, hyphens for spaces, and no other signs."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, part in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not part or part in headings(target.read_text(encoding="utf-8")), f"{name}#{part}"
    for name in re.findall(r"`((?:app|lua|docs|native)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def test_the_page_of_security_leads_to_the_permissions_in_redis() -> None:
    rows = re.findall(r"^\| Redis \|.*$", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE)
    ((name, part),) = re.findall(r"\]\(([\w./-]+)#([\w-]+)\)", "".join(rows))
    before, command, _ = (ROOT / name).read_text(encoding="utf-8").partition("\nACL SETUSER waymark ")
    assert command
    assert headings(before)[-1] == part


def test_every_page_can_be_found_from_the_readme() -> None:
    named = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}
