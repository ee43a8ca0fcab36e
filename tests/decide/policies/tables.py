"""The tables of ``docs/routing.md``, from the rows that the code goes by."""

from __future__ import annotations

from waymark.decide.policies.plugins import PLUGINS, PluginKind
from waymark.decide.policies.presets import DEFAULT, PRESETS
from waymark.decide.policies.scorers import SCORERS


def policies() -> str:
    """Return a table of every policy, its order, and whether it needs the gauges of engines."""
    lines = ["| Policy | From | Order | Needs |", "|---|---|---|---|"]
    for preset in PRESETS.values():
        name = f"**`{preset.name}`** (default)" if preset.name == DEFAULT else f"`{preset.name}`"
        needs = "gauges" if preset.needs_gauges else "prefix key" if preset.name == "sticky" else ""
        lines.append(f"| {name} | {preset.source} | {preset.order} | {needs} |")
    return "\n".join(lines)


def constants() -> str:
    """Return a table of every constant of every policy: the possible overrides of a request."""
    lines = ["| Policy | Constant | Default | Range | What it means |", "|---|---|---|---|---|"]
    for preset in PRESETS.values():
        for constant in preset.constants:
            default = str(constant.default).lower() if isinstance(constant.default, bool) else constant.default
            text = f"{default:g}" if isinstance(default, float) else default
            lines.append(
                f"| `{preset.name}` | `{constant.name}` | `{text}` | {constant.range_text()} | {constant.sentence} |"
            )
    return "\n".join(lines)


def scorers() -> str:
    """Return a table of every scorer of an ``EndpointPickerConfig``."""
    lines = ["| Scorer | Score, 0 to 1 | Needs |", "|---|---|---|"]
    for scorer in SCORERS.values():
        needs = "gauges" if scorer.needs_gauges else "`ttft_ms`, `tpot_ms`" if scorer.needs_answer_times else ""
        lines.append(f"| `{scorer.name}` | {scorer.sentence} | {needs} |")
    return "\n".join(lines)


def others() -> str:
    """Return a table of plugins that a file may name and whose work another part does here."""
    lines = ["| Plugin | Here |", "|---|---|"]
    lines += [f"| `{plugin.type}` | {plugin.note} |" for plugin in PLUGINS.values() if plugin.kind is PluginKind.OTHER]
    return "\n".join(lines)


TABLES = {"policies": policies, "constants": constants, "scorers": scorers, "others": others}
"""The tables of the page of routing, by the name between the page's marks."""
