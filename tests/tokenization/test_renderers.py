"""renderers: a template that takes too much costs its own process, which ends with the process that has started it."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_for
from tests.tokenization.bounds import be_patient
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.tokenization import renderers, rendering
from waymark.tokenization.prompt import ChatPrompt
from waymark.tokenization.renderers import PROCESSES_MAX, Rendered, Renderers
from waymark.tokenization.templates import ChatTemplate

pytestmark = pytest.mark.outside

USER = {"role": "user", "content": "Hi"}
NOW = datetime(2026, 1, 2)


def doubled(statement: str, first: str) -> str:
    times = "{% for i in range(60) %}" + statement + "{% endfor %}"
    return f"{{% set ns = namespace(x={first}) %}}{times}{{{{ ns.x | length }}}}{{{{ ns.x }}}}"


#: Some ten seconds in one step.
TRIM = "{{ ('a' * 400000) | trim('b' * 400000 ~ 'a') }}"
HOSTILE = {
    "a text is doubled": doubled("{% set ns.x = ns.x ~ ns.x %}", "messages[0].content"),
    "a list is doubled": doubled("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "an indent": "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "a product": "{{ 'x' * 9999999999 }}",
    "a trim": TRIM,
    "parentheses": "{{ " + "(" * 200_000 + "1" + ")" * 200_000 + " }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
}


@pytest.fixture
def pool() -> Iterator[Renderers]:
    pool = Renderers(Metrics())
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


# A trim takes its whole second of CPU, and has tests of its own: below, and in ``e2e/test_hostile_template.py``.
@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "a trim"])
def test_a_hostile_template_is_refused_with_a_sentence(pool: Renderers, name: str) -> None:
    with pytest.raises(InvalidValue, match="the chat template") as caught:
        ChatTemplate(HOSTILE[name], {}, bytes_max=2**20, renderers=pool).render(ChatPrompt([USER]))
    assert caught.value.field in ("messages", "model")


def test_a_template_has_just_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn of a loop costs is the library's matter, so it is found out first."""

    def is_rendered(turns: int, steps: int) -> bool:
        monkeypatch.setattr(rendering, "STEPS_MAX", steps)
        request = marshal.dumps(({"turns": [0] * turns}, (*NOW.timetuple()[:6], 0)), 2)
        kind, _ = rendering.answer(rendering.Template("{% for turn in turns %}{% endfor %}"), request, 10)
        assert kind in (rendering.TEXT, rendering.OUT_OF_STEPS)
        return kind == rendering.TEXT

    steps_max = rendering.STEPS_MAX
    first, second, third = (next(steps for steps in range(1, 100) if is_rendered(turns, steps)) for turns in range(3))
    assert third - second == second - first > 0
    turns = (steps_max - first) // (second - first)
    assert [is_rendered(number, steps_max) for number in (turns, turns + 1)] == [True, False]


def test_what_stops_a_rendering_is_counted_and_the_next_one_works() -> None:
    metrics = Metrics()
    pool = Renderers(metrics)
    source = (
        "{{ [1, [2]] | tojson(indent=indent) }}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    )
    renderer = pool.of(source)

    def kind(**context: Any) -> bytes:
        return renderer.render({"indent": 0, "n": 1} | context, NOW, 1000).kind

    assert kind() == rendering.TEXT
    assert kind(indent=200_000_000) == rendering.OUT_OF_MEMORY
    assert kind(n=9_999) == rendering.OUT_OF_STEPS
    assert kind(indent=1000) == rendering.TOO_LARGE
    assert kind() == rendering.TEXT
    for reason in ("memory", "steps", "bytes"):
        assert f'waymark_renderings_stopped_total{{reason="{reason}"}} 1.0' in metrics.render()[0].decode()
    pool.close()


def test_a_rendering_that_takes_long_ends_at_its_bound_of_cpu(pool: Renderers) -> None:
    renderer = pool.of(TRIM)
    assert renderer.render({}, NOW, 2**20) == Rendered(rendering.OUT_OF_CPU, "")


def test_a_rendering_that_nobody_waits_for_longer_is_unavailable(
    pool: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = pool.of(TRIM)
    assert renderer.compile().kind == rendering.TEXT
    before = children()
    monkeypatch.setattr(renderers, "WALL_SECONDS", 0.01)
    with pytest.raises(TokenizerUnavailable, match=r"within 0\.01 s"):
        renderer.render({}, NOW, 2**20)
    assert len(children() & before) == len(before) - 1


def test_a_process_that_was_killed_is_replaced(pool: Renderers) -> None:
    before = children()
    renderer = pool.of("{{ x }}")
    renderer.compile()
    (process,) = children() - before
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] == "Z", "it has ended")
    assert renderer.render({"x": 1}, NOW, 1000) == Rendered(rendering.TEXT, "1")


def test_a_forked_process_starts_its_own(pool: Renderers) -> None:
    renderer = pool.of("{{ x }}")
    assert renderer.render({"x": 1}, NOW, 1000).text == "1"
    forked = os.fork()
    if not forked:
        status = 1
        try:
            status = 0 if renderer.render({"x": 2}, NOW, 1000).text == "2" else 1
            renderer.stop()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert renderer.render({"x": 3}, NOW, 1000).text == "3"


def test_idle_processes_end_above_the_bound(pool: Renderers) -> None:
    before = children()
    several = [pool.of(f"{{{{ x }}}}{n}") for n in range(PROCESSES_MAX + 2)]
    for _ in range(2):
        for n, renderer in enumerate(several):
            assert renderer.render({"x": "x"}, NOW, 1000).text == f"x{n}"
    assert len(children() - before) == PROCESSES_MAX


@pytest.mark.parametrize("is_rendering", [False, True])
def test_no_process_outlives_the_one_that_has_started_it(is_rendering: bool) -> None:
    program = (
        "import os, sys, time\nfrom datetime import datetime\nfrom pathlib import Path\n"
        "from waymark.tokenization.renderers import Renderers\n"
        f"renderer = Renderers().of({TRIM!r})\nassert renderer.compile().kind == b't'\n"
        "print(Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text(), flush=True)\n"
        + ("renderer.render({}, datetime.now(), 2**20)\n" if is_rendering else "time.sleep(60)\n")
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{parent.stdout.readline().strip()}")
        assert child.exists()
        parent.kill()
    wait_for(lambda: not child.exists(), "the child has ended, too")


def test_a_context_that_is_not_json_is_refused(pool: Renderers) -> None:
    with pytest.raises(InvalidValue, match="cannot use these messages"):
        ChatTemplate("{{ x }}", {}, bytes_max=1000, renderers=pool).render(
            ChatPrompt([USER], template_kwargs={"x": object()})
        )


def test_the_program_answers_each_kind() -> None:
    """In this process, so that its coverage is seen."""
    template = rendering.Template("{{ raise_exception('no') if x == 1 else strftime_now('%Y') ~ x }}")

    def kind(x: Any, bytes_max: int = 100) -> tuple[bytes, str]:
        return rendering.answer(template, marshal.dumps(({"x": x}, (*NOW.timetuple()[:6], 0)), 2), bytes_max)

    assert kind(1) == (rendering.REFUSED, "no")
    assert kind(2) == (rendering.TEXT, "20262")
    assert kind("x" * 200) == (rendering.TOO_LARGE, "")
    template = rendering.Template("{{ [1] | tojson(separators=1) }}")
    assert kind(1)[0] == rendering.UNFIT
