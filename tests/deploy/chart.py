"""The Helm chart as tests see it: its values, what they render to, and the parts of it that are written by a program.

``python -m tests.deploy.chart`` writes those parts: the settings in ``values.yaml`` and ``values.schema.json``, the
table of values in ``README.md``, and the table of settings in ``docs/configuration.md``. A setting that is added to
``app/waymark/base/settings.py`` needs nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import yaml

from tests.settings_table import Described, describe, markdown_table
from waymark.decide.policies.presets import PRESETS
from waymark.domain.engines import TRAITS, EngineKind

CHART = Path(__file__).parents[2] / "helm"
RELEASE, NAMESPACE = "wm", "serving"
#: The least that must be said.
REDIS = {"redis": {"url": "redis://redis:6379/0"}}

#: Settings that are not in ``config``, and the value that sets each instead; None: the chart, and nobody else.
ELSEWHERE: dict[str, str | None] = {
    "WAYMARK_REDIS_URL": "redis.url",
    "WAYMARK_REDIS_READ_URL": "redis.readUrl",
    "WAYMARK_REDIS_PASSWORD_FILE": "redis.passwordSecret.name",
    "WAYMARK_API_TOKEN": "apiToken.existingSecret",
    "WAYMARK_API_TOKENS_FILE": "apiTokensSecret.name",
    "WAYMARK_ENGINE_API_KEY": "engineApiKey.existingSecret",
    "WAYMARK_ENGINE_KEYS": "engineApiKey.keysKey",
    "WAYMARK_ENGINE_CA_FILE": "engineCaSecret.name",
    "WAYMARK_PUBLISHERS_FILE": "publishers",
    "WAYMARK_DISCOVERY": "discovery.enabled",
    "WAYMARK_DISCOVERY_NAMESPACE": "discovery.namespace",
    "WAYMARK_DELETION_COST": "discovery.deletionCost",
    "WAYMARK_FINISH_SECONDS": "gateway.finishSeconds",
    "WAYMARK_RESPONSES_MONGO_URL": "gateway.mongoSecret.name",
    "WAYMARK_ANSWERS_REDIS_URL": "gateway.answersRedisSecret.name",
    "WAYMARK_EPP_DRAIN_SECONDS": "epp.drainSeconds",
    "WAYMARK_EPP_PORT": None,
    "WAYMARK_EPP_HEALTH_PORT": None,
    "WAYMARK_PORT": None,
    "WAYMARK_PROBE_PORT": None,
    "WAYMARK_WORKER_ID": None,
}

WRITE = "run `python -m tests.deploy.chart`"
PAGE_TABLE = ("<!-- settings -->", "<!-- /settings -->")
SETTINGS = ("# <settings>\n", "# </settings>\n")
TABLE = ("<!-- values -->\n", "<!-- /values -->\n")
#: Where JSON's numbers, and YAML's in Helm, lose their last digits.
EXACT_MAX = 2**53


class Value(NamedTuple):
    """One value: its dotted path, its default, and the comment above it."""

    path: str
    default: Any
    comment: str


@lru_cache(maxsize=1)
def load() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render(values: Mapping[str, Any], *, name: str = RELEASE) -> dict[str, list[dict[str, Any]]]:
    """The documents of each template by its path below ``templates/``; raises what Helm raises."""
    return {path: parsed(text) for path, text in texts(values, name=name).items() if path.endswith(".yaml")}


def parsed(text: str) -> list[dict[str, Any]]:
    """The documents of a template."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def texts(values: Mapping[str, Any], *, name: str = RELEASE) -> dict[str, str]:
    """The same as it is written."""
    rendered = load().render(dict(values), name=name, namespace=NAMESPACE)
    return {path.partition("/templates/")[2]: text for path, text in rendered.items()}


def documents(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [document for rendered in render(values).values() for document in rendered]


def one(values: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The only document of a template."""
    (document,) = render(values)[template]
    return document


def container(values: Mapping[str, Any], role: str) -> dict[str, Any]:
    (found,) = one(values, f"{role}-deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def variables(values: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The environment of a role's container: a text, or where it comes from."""
    values_of = {each["name"]: each.get("value", each.get("valueFrom")) for each in container(values, role)["env"]}
    (config, *_) = render(values)["configmap.yaml"]
    return dict(config.get("data", {})) | values_of


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm lays them."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            both_maps = isinstance(value, Mapping) and isinstance(whole.get(name), Mapping)
            whole[name] = merged(whole[name], value) if both_maps else value
    return whole


def at(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


# ---- values.yaml, read with its comments -----------------------------------------------------------


@lru_cache(maxsize=1)
def documented() -> list[Value]:
    """Every value that has a comment above it, in order."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.load(text, Loader=yaml.CSafeLoader)
    found: list[Value] = []
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := re.match(r"( *)# (.*)", line):
            above.append(match[2])
        elif match := re.match(r"( *)(\w+):", line):
            indent = len(match[1])
            path = [*(each for each in path if each[0] < indent), (indent, match[2])]
            if above:
                names = [name for _, name in path]
                found.append(Value(".".join(names), _dig(defaults, names), " ".join(above)))
            above = []
        else:
            above = []
    return found


def leaves(values: Mapping[str, Any], comments: set[str], before: str = "") -> Iterator[str]:
    """The paths of all values: what is no map, and maps that are documented as a whole."""
    for name, value in values.items():
        path = before + name
        if isinstance(value, Mapping) and value and path not in comments:
            yield from leaves(value, comments, f"{path}.")
        else:
            yield path


def _dig(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[name]
    return values


# ---- the parts that are written --------------------------------------------------------------------


def in_config() -> list[Described]:
    """The settings that are given as such."""
    return [setting for setting in describe() if setting.variable not in ELSEWHERE]


def settings_text() -> str:
    """The settings as comments for ``values.yaml``, each with its sentence and its default."""
    lines = []
    for setting in in_config():
        # YAML reads a bare off as false.
        default = {"none": '""', "off": '"off"'}.get(setting.default, setting.default)
        lines += [f"#   # {setting.sentence}", f"#   {setting.variable}: {default}"]
    return "\n".join(lines) + "\n"


def settings_schema() -> dict[str, Any]:
    """The schema of ``config``: every setting with its type and bounds, and nothing else."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {setting.variable: _with_empty(setting, _setting_schema(setting.type)) for setting in in_config()}
        # A text for the settings, because they are read without the policies.
        | {"WAYMARK_POLICY": {"anyOf": [{"enum": [*PRESETS]}, {"type": "string", "pattern": "[/.]"}]}},
    }


def kinds_schema() -> dict[str, Any]:
    """The schema of a publisher's ``type``: each kind and its aliases, as written, in lower and in upper case."""
    names = [name for kind in EngineKind for name in (str(kind), *TRAITS[kind].aliases)]
    return {"enum": sorted({spelling for name in names for spelling in (name, name.lower(), name.upper())})}


def _setting_schema(kind: str) -> dict[str, Any]:
    if bounds := re.fullmatch(r"(integer|number), (\S+) to (\S+)", kind):
        least, most = (json.loads(bound) for bound in bounds.groups()[1:])
        if most <= EXACT_MAX:
            return {"type": bounds[1], "minimum": least, "maximum": most}
        # Above it as text, which loses nothing.
        exact = {"type": bounds[1], "minimum": least, "maximum": EXACT_MAX}
        return {"anyOf": [exact, {"type": "string", "pattern": "^[0-9]+$"}]}
    if kind == "`true` or `false`":
        return {"type": "boolean"}
    if kind.startswith("`true` or `false` or "):
        return {"anyOf": [{"enum": [True, False]}, {"type": "string"}]}
    choices = re.findall(r"`(\w+)`", kind)
    if kind == " or ".join(f"`{choice}`" for choice in choices):
        return {"enum": choices}
    return {"type": "string"}


def _with_empty(setting: Described, schema: dict[str, Any]) -> dict[str, Any]:
    """An empty text leaves a setting without a value, if that is its default."""
    if setting.default == "none" and "enum" in schema:
        return {"enum": ["", *schema["enum"]]}
    return schema


def values_table() -> str:
    """Every value, its default and its comment, as the table in the chart's README."""
    lines = ["| Value | Default | What it is |", "|---|---|---|"]
    for value in documented():
        default = json.dumps(value.default).replace("|", "\\|")
        lines.append(f"| `{value.path}` | `{default}` | {value.comment} |")
    return "\n".join(lines) + "\n"


def between(text: str, marks: tuple[str, str]) -> str:
    """What stands between two marks, each there once."""
    start, end = marks
    assert text.count(start) == text.count(end) == 1, f"{start!r} and {end!r} must be there once"
    return text.partition(start)[2].partition(end)[0]


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return loaded


def _put(path: Path, marks: tuple[str, str], part: str) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(marks[0] + between(text, marks), marks[0] + part), encoding="utf-8")


def write() -> None:
    """Write every part again."""
    _put(CHART / "values.yaml", SETTINGS, settings_text())
    closed = schema()
    closed["properties"]["config"] = settings_schema()
    closed["properties"]["publishers"]["items"]["properties"]["type"] = kinds_schema()
    (CHART / "values.schema.json").write_text(json.dumps(closed, indent=2) + "\n", encoding="utf-8")
    _put(CHART / "README.md", TABLE, values_table())
    _put(CHART.parent / "docs" / "configuration.md", PAGE_TABLE, f"\n{markdown_table()}\n")


if __name__ == "__main__":
    write()
