"""The results of a simulation, as text and as JSON: a table of routings, a table about the kill, and the
requirements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.benchmarks.report import aligned
from tools.benchmarks.simulate_index import Kill
from tools.benchmarks.simulate_run import Course

CHANCE = "chance"
CACHES = "the caches themselves"
KILLED = "Waymark, killed"
MODEL = "model: no replay, killed"

AROUND_SECONDS = 120.0
"""The length of the spans right before the kill and right after the indexes are back."""


def waymark_name(replicas: int) -> str:
    return f"Waymark, {replicas} replica{'s' if replicas > 1 else ''}"


def table(courses: Sequence[Course]) -> str:
    """Return a table with one line per run."""
    head = ("routing", "block hit ratio", "tokens computed", "first token", "answers", "exact", "fallbacks")
    lines = [head]
    for course in courses:
        asked = (
            (f"{course.answers:,}", f"{course.exact:,}", f"{course.fallbacks:,}") if course.answers else ("", "", "")
        )
        computed, first = f"{course.computed_tokens / 1e6:.2f} M", f"{course.first_token_seconds:.2f} s"
        lines.append((course.name, _percent(course.hit_ratio()), computed, first, *asked))
    return aligned(lines)


def kill_table(courses: Sequence[Course], kill: Kill) -> str:
    """Return a table of the hit ratios of every run before, during and after the time in which the killed indexes were
    not available."""
    named = spans(courses, kill)
    lines = [("routing", *named)]
    for course in courses:
        lines.append((course.name, *(_percent(course.hit_ratio(*span)) for span in named.values())))
    return aligned(lines)


def spans(courses: Sequence[Course], kill: Kill) -> dict[str, tuple[float, float]]:
    """Return the names of spans of the trace's time, each with its beginning and end."""
    at = kill.at_seconds
    back = back_at(courses, kill)
    near = f"{AROUND_SECONDS:.0f} s"
    return {
        f"{near} before": (at - AROUND_SECONDS, at),
        f"killed, {back - at:.0f} s": (at, back),
        f"{near} after": (back, back + AROUND_SECONDS),
        f"next {near}": (back + AROUND_SECONDS, back + 2 * AROUND_SECONDS),
        "rest": (back + 2 * AROUND_SECONDS, float("inf")),
    }


def back_at(courses: Sequence[Course], kill: Kill) -> float:
    """Return the time at which the killed indexes answered again, on the trace's clock."""
    restart = max((course.restart_seconds or 0.0 for course in courses), default=0.0)
    return kill.at_seconds + kill.outage_seconds + restart


def sentences(courses: Sequence[Course]) -> list[str]:
    """Return a sentence for each requirement, with the numbers that show whether it holds."""
    whole = [course for course in courses if course.name.startswith("Waymark") and course.name != KILLED]
    said = []
    if whole:
        ways = zip(*([step.engine for step in course.steps] for course in whole), strict=True)
        same = sum(len(set(way)) == 1 for way in ways)
        names = ", ".join(course.name for course in whole)
        said.append(
            f"Same engine with every number of replicas ({names}): {same:,} of {len(whole[0].steps):,} requests."
        )
    for chance in courses:
        if chance.name == CHANCE and whole:
            saved = chance.computed_tokens - whole[0].computed_tokens
            said.append(
                f"{whole[0].name}: {saved:,} tokens not computed again that routing by chance computes "
                f"for the same requests, {_percent(saved / chance.computed_tokens)} of its {chance.computed_tokens:,}."
            )
    for course in courses:
        if course.idle_answers:
            said.append(
                f"{course.name}: {course.idle_exact:,} of {course.idle_answers:,} answers at the end, "
                "when nothing was on its way, are just what the caches hold."
            )
        if course.name == KILLED and course.restart_seconds is not None:
            said.append(
                f"{course.name}: {course.restart_seconds:.1f} s from the start of the new processes until every stream "
                "was caught up and every replica answered."
            )
    return said


def content(courses: Sequence[Course], kill: Kill, windows: int, about: dict[str, Any]) -> dict[str, Any]:
    """Return the results for programs: ``about``, ``killed`` (from, to), ``window_begins``, and the runs."""
    first, last = courses[0].steps[0].at_seconds, courses[0].steps[-1].at_seconds
    edges = [first + (last - first) * i / windows for i in range(windows)] + [float("inf")]
    named = spans(courses, kill)
    runs = [
        {
            "routing": course.name,
            "hit_ratio": course.hit_ratio(),
            "computed_tokens": course.computed_tokens,
            "first_token_seconds": course.first_token_seconds,
            "answers": course.answers,
            "exact": course.exact,
            "fallbacks": course.fallbacks,
            "restart_seconds": course.restart_seconds,
            "idle_answers": course.idle_answers,
            "idle_exact": course.idle_exact,
            "around_the_kill": {name: course.hit_ratio(*span) for name, span in named.items()},
            "windows": [course.hit_ratio(*span) for span in pairwise(edges)],
        }
        for course in courses
    ]
    killed = [kill.at_seconds, back_at(courses, kill)]
    return {"about": about, "killed": killed, "window_begins": edges[:-1], "end": last, "runs": runs}


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.2f} %"
