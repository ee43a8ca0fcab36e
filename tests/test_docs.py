"""The docs are right about the settings, and the requests in them are valid."""

from __future__ import annotations

import re
from pathlib import Path

from tests.deploy.chart import PAGE_TABLE, WRITE, between
from tests.live import start
from tests.settings_table import markdown_table
from tools.benchmarks import capacity as capacity_model
from tools.conformance import differences
from waymark.base.settings import FORMER, RENAMED, SETTINGS
from waymark.store.hot import HOLDERS_MIN, MILLISECONDS

ROOT = Path(__file__).parents[1]


def test_the_page_of_settings_holds_their_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert between(page, PAGE_TABLE).strip() == markdown_table(), WRITE


#: The bound on the words of a way through the pages.
WAY_WORDS = 3000


def section(text: str, name: str) -> str:
    """Return the part of a page from the heading that a link names to the next heading of the same level."""
    headings = list(re.finditer(r"^(#+) (.+)$", text, re.MULTILINE))
    for at, heading in enumerate(headings):
        if re.sub(r"[^\w\s-]", "", heading[2].lower()).replace(" ", "-") == name:
            ends = (each.start() for each in headings[at + 1 :] if len(each[1]) <= len(heading[1]))
            return text[heading.start() : next(ends, len(text))]
    raise AssertionError(f"there is no heading {name}")


def test_each_of_the_four_ways_is_short_and_ends_in_something_that_runs() -> None:
    index = ROOT / "docs" / "index.md"
    ways = re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(ways) == 4
    for way in ways:
        steps = "\n".join(re.findall(r"^\d\. .*$", way, re.MULTILINE))
        words = len(way.split())
        for page, part in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", steps):
            text = (index.parent / page).read_text(encoding="utf-8")
            words += len((section(text, part) if part else text).split())
        assert 1000 < words <= WAY_WORDS, f"{way.splitlines()[0]} has {words} words"
        (ending,) = re.findall(r"^```console\n\$ (.+)\n```$", way, re.MULTILINE)  # which test_fences.py runs
        assert ending


def test_every_file_that_the_page_of_the_source_names_is_there() -> None:
    page = (ROOT / "docs" / "source.md").read_text(encoding="utf-8")
    folder = ROOT
    for name in re.findall(r"`([\w./-]+(?:\.py|\.lua|\.md|/))`", page):
        path = ROOT / name if "/" in name else folder / name
        assert path.exists(), name
        folder = path if path.is_dir() else path.parent


def test_nothing_but_the_changelog_names_a_former_setting() -> None:
    """A reader of a page, a message or the dashboard with a former name would set a variable that stops the process."""
    texts = [path for folder in ("docs", "helm", "lua", "deploy") for path in (ROOT / folder).rglob("*.*")]
    texts += [ROOT / "README.md", ROOT / "docker-compose.yml", *(ROOT / "app").rglob("*.py")]
    named = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path.suffix in (".md", ".py", ".json", ".yaml", ".yml", ".lua", ".sh")
        for name in (FORMER.keys() | RENAMED.keys())
        & set(re.findall(r"WAYMARK_[A-Z_]+", path.read_text(encoding="utf-8")))
    }
    assert named == set()


def test_the_page_of_the_source_names_functions_and_metrics_as_they_are() -> None:
    page = (ROOT / "docs" / "source.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "app").rglob("*.py"))
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", page):
        assert f"class {owner}" in source, owner
        assert f"def {name}(" in source, name
    (metric,) = re.findall(r"`grep -rnw (\w+) app/waymark`", page)
    assert f"metrics.{metric}" in source


def test_the_page_of_figures_names_each_target_that_is_not_reached() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    before, _, after = page.partition("<!-- measured -->")
    missed = set(re.findall(r"^\| (P\d+b?) \|.*\| no \|$", after.partition("<!-- /measured -->")[0], re.MULTILINE))
    (table,) = re.findall(r"^\| \| Figure \| Bar \| Cause \|\n\|-.*\n((?:\|.*\n)+)", before, re.MULTILINE)
    named = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert {each for names in named for each in names.split(", ")} == missed


def test_the_page_of_capacity_holds_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    measured = {
        what: float(figure.replace(",", ""))
        for what, figure in re.findall(r"^\| \w+ \| ([^|]+) \| ([0-9.,]+) [^|]+\|", page, re.MULTILINE)
    }

    def rounded(figure: float) -> str:
        """Round a figure to two digits."""
        return f"{float(f'{figure:.2g}'):,.12g}"

    def of(what: str) -> str:
        return rounded(measured[what])

    second, later, standard_later = (
        f"{measured[what]:.0f}"
        for what in (
            "second holder, with a vLLM publisher's entry",
            "each later holder, with a vLLM publisher's entry",
            "a further holder, with a standard publisher's entry",
        )
    )
    vllm, standard = (f"{measured[f'blocks per GiB, {kind}'] / 1e6:.1f}" for kind in ("vLLM", "standard publisher"))
    sizes = ("64", "512", "2,048")

    def rates(what: str) -> str:
        cores = ("Redis", "Redis"), ("worker", "ingest workers")
        return ", ".join(
            f"{of(f'{what} blocks per second and {core} core')} per core of {name}" for core, name in cores
        )

    replica, redis = (
        ", ".join(of(f"queries of {size} blocks per second and {core} core") for size in sizes)
        for core in ("replica", "Redis")
    )
    lines = [
        f"| blocks per GiB of Redis, one holder each | {vllm} million of vLLM, "
        f"{standard} million of standard publishers |",
        f"| bytes of the second holder of a block, and of each later one | {second} and {later} of vLLM, "
        f"{standard_later} of standard publishers |",
        f"| blocks per second in prefill, 64 in an event | {rates('new')} |",
        f"| blocks per second in decode, one in an event | {rates('decoded')} |",
        f"| removed blocks per second, 64 in an event | {rates('removed')} |",
        f"| queries per second, of 64, 512 and 2,048 blocks | {replica} per core of query replicas; "
        f"{redis} per core of Redis |",
    ]
    capacity = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in lines if line not in capacity]
    assert not missing, "put these lines into docs/capacity.md:\n\n" + "\n".join(lines)


def test_the_page_of_capacity_is_computed_from_its_constants() -> None:
    page = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    start, end = capacity_model.MARKS
    tables = capacity_model.page(*capacity_model.read_model(capacity_model.FILE))
    found = page.partition(start)[2].partition(end)[0].strip()
    assert found == tables.strip(), "run `python -m tools.benchmarks.capacity --markdown docs/capacity.md`"


def test_the_page_of_differences_is_that_of_the_cases() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    start, end = differences.MARKS
    assert page.partition(start)[2].partition(end)[0].strip() == differences.table(), "run `make conformance`"


async def test_the_requests_of_the_runbooks_are_understood_as_they_stand(redis_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    name, header = re.findall(r"the header\s+`(Content-Type): (\S+)`", page)[0]
    requests = re.findall(r"`curl[^`$]* \$WAYMARK(/(?:query|register|unregister)\S*)([^`]*)`", page)
    assert [path for path, _ in requests] == ["/unregister", "/query"]
    async with start("serve", redis_url, tmp_path / "log") as live, live.client() as client:
        for path, flags in requests:
            given = re.fullmatch(r""" -H "\$JSON" -d '(.*)'""", flags)
            assert given is not None, f"{path} needs a body of a kind that is named"
            answer = await client.post(path, content=given[1], headers={name: header})
            assert answer.status_code in (200, 404), answer.text


#: Each row of the table about the age of answers -> the test that shows it.
AGES = {
    "`POST /events`, `/register`": "api/test_own_writes::test_events_are_in_the_next_answer",
    "the same, answered by another": "store/test_row_reader::test_only_rows_that_many_holders_share_may_be_old",
    "blocks of an event stream": "store/test_chain::test_no_row_is_used_longer_than_it_may_be_kept",
    "an engine that was unregistered": "store/test_row_reader::test_hot_rows_are_not_asked_for_again_and_ended_holders",
    "an engine that disappears": "ingest/test_stream::test_a_publisher_that_is_away_for_too_long_is_lost",
    "any of these, with": "e2e/test_read_replica::test_what_is_written_to_the_primary_is_answered_from_the_replica",
}


def test_each_row_of_the_ages_of_answers_has_a_test_and_names_what_is_true() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    table = page.partition("### How old an answer may be\n")[2].partition("\n###")[0]
    rows = [line.strip("| ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [next((words for words in AGES if row.startswith(words)), row) for row in rows] == list(AGES)
    for place in AGES.values():
        file, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / "tests" / f"{file}.py").read_text()
    named = set(re.findall(r"`WAYMARK_([A-Z_]+)`", table))
    assert named == {"PUBLISHER_TIMEOUT", "REDIS_READ_URL"}
    assert named <= {name.upper() for name in SETTINGS}
    assert table.count(f"within {MILLISECONDS} ms |") == 2
    assert table.count(f"in rows that {HOLDERS_MIN} or more holders share") == 2
