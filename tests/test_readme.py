"""The commands of the README and of the first steps print what the pages show, and every file they name exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.live import start
from tests.patience import patient

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_STEPS = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "helm" / "README.md",
    ROOT / "lua" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CURL = re.compile(r"^\$ curl -s localhost:13333(/\S+) -H \"\$J\" -d '(.*?)'\n(.*?)$", re.MULTILINE | re.DOTALL)
GET = re.compile(r"^\$ redis-cli (H?GET) '(\S+)'(?: (\S+))?\n(\".*\")$", re.MULTILINE)


async def test_what_is_tried_by_hand_answers_as_printed(redis_url: str, tmp_path: Path) -> None:
    requests = CURL.findall(FIRST_STEPS)
    on_the_first_page = CURL.findall(README)
    assert [path for path, _, _ in on_the_first_page] == ["/query"]
    lookups = GET.findall(FIRST_STEPS)
    assert [path for path, _, _ in requests] == ["/register", "/events", "/query"]
    assert len(lookups) == 2
    async with start("serve", redis_url, tmp_path / "log") as live, live.client() as client:
        for path, body, printed in requests + on_the_first_page:
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.text == printed
        redis = Redis.from_url(redis_url)
        # Redis' clock says where holder ids begin.
        (head, printed_row), *_ = [(key, json.loads(text)) for command, key, _, text in lookups if command == "GET"]
        value = await redis.get(head)
        assert isinstance(value, bytes)
        holder, printed_id = (re.findall(r" ([0-9]+):", row)[0] for row in (value.decode(), printed_row))
        for command, key, field, printed in lookups:
            value = await (redis.hget(key, field.replace(printed_id, holder)) if command == "HGET" else redis.get(key))
            assert value == json.loads(printed).replace(printed_id, holder).encode()
        listed = re.search(r"^\$ redis-cli --scan.*\n((?:\"wm:.*\"\n)+)", FIRST_STEPS, re.MULTILINE)
        assert listed is not None
        found: list[bytes] = [
            bytes(key) for key in await redis.keys("wm:*") if isinstance(key, bytes) and key != b"wm:activity"
        ]
        assert set(re.findall(r"\"(\S+)\"", listed[1].replace(printed_id, holder))) == {
            str(key, "utf-8") for key in found
        }
        await redis.aclose()


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.outside
def test_the_readme_shows_what_the_demo_prints() -> None:
    shown = re.search(r"^`make demo` shows\n\n```\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert shown is not None
    command = [sys.executable, "-m", "waymark", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60.0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines() == shown[1].strip().splitlines()


def headings(text: str) -> list[str]:
    """The names that links to the headings of a page have: small letters, hyphens for spaces, no other signs."""
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
