"""``EndpointPickerConfig``, the YAML of llm-d's and Heimdall's endpoint pickers, read as it is.

The file has ``plugins`` (type, name, parameters), ``schedulingProfiles`` (which plugins in which order, scorers with a
weight) and sections about other parts of a gateway. Anything unknown in it is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.decide.policies import filters
from waymark.decide.policies import profile as deciders
from waymark.decide.policies.filters import OPERATORS
from waymark.decide.policies.latency import needs_gauges
from waymark.decide.policies.plugins import PLUGINS, Plugin, PluginKind
from waymark.decide.policies.policy import Filter, Values, nearest, read_constants
from waymark.decide.policies.profile import (
    PICKERS,
    PREFIX_KEY,
    Decider,
    HistoryTerms,
    Picker,
    PickerConfig,
    Profile,
    Speculation,
    WeightedScorer,
    max_score,
)
from waymark.decide.policies.scorers import CONTEXT_LABEL, SCORERS, scored_by_label

KIND = "EndpointPickerConfig"
_FIELDS = ("apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles", "data", "saturationDetector")
#: Fields of the file that a setting stands for.
_ELSEWHERE = {
    "data": "ingest workers read the gauges of engines, every WAYMARK_GAUGES_SECONDS",
    "saturationDetector": "a target is full at WAYMARK_TARGET_REQUESTS_MAX requests",
}
_ROLES: Mapping[str, Filter] = {
    "prefill-filter": filters.prefill_filter,
    "decode-filter": filters.decode_filter,
    "encode-filter": filters.encode_filter,
}


class DeclaredPlugin:
    """One entry of ``plugins``: its type's row, its name and its parameters, checked."""

    def __init__(self, entry: Any, index: int) -> None:
        where = f"plugins[{index}]"
        fields = _mapping(entry, where)
        _only(fields, ("type", "name", "parameters"), where)
        self.type = _text(fields.get("type"), f"{where}.type")
        if self.type not in PLUGINS:
            sentence = f"{where}.type is {shown(self.type)}, which is no plugin; {nearest(self.type, PLUGINS)}"
            raise InvalidValue(sentence, field=f"{where}.type")
        self.row: Plugin = PLUGINS[self.type]
        self.name = _text(fields.get("name", self.type), f"{where}.name")
        self.where = f"{where}.parameters"
        given = fields.get("parameters")
        self.parameters = _mapping({} if given is None else given, self.where)
        self.unused: tuple[str, ...] = ()
        if self.row.is_open:
            self.unused = tuple(sorted(self.parameters.keys() - self.row.parameters.keys()))
            self.parameters = {name: self.parameters[name] for name in self.parameters if name not in self.unused}
        check_parameters(self.parameters, self.row.parameters, self.where)


def read_picker_config(text: str) -> PickerConfig:
    """Parse the file. ``InvalidValue`` names the first mistake and the way out."""
    import yaml  # imported here, because a replica without such a file does not need it

    try:
        # libyaml, if PyYAML has it: the loader in Python takes seconds for some thousand brackets within each other.
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (
        RecursionError,
        yaml.YAMLError,
        ValueError,
    ) as exc:  # PyYAML raises ValueError at a date that does not exist
        if isinstance(exc, RecursionError) or "maximum nesting depth" in str(exc):
            raise InvalidValue("the file is nested too deeply; its fields need fewer than ten levels") from None
        raise InvalidValue(f"the file is not YAML: {' '.join(str(exc).split())}") from exc
    top = _mapping(content, "the file")
    _only(top, _FIELDS, "the file")
    if top.get("kind", KIND) != KIND:
        raise InvalidValue(f"kind is {shown(top['kind'])}; it must be {KIND}", field="kind")
    declared: dict[str, DeclaredPlugin] = {}
    for index, entry in enumerate(_list(top.get("plugins"), "plugins")):
        plugin = DeclaredPlugin(entry, index)
        if plugin.name == PREFIX_KEY:
            raise InvalidValue(
                f"plugins[{index}].name is {shown(PREFIX_KEY)}, under which the answer has the part of the prefix key; "
                "give the plugin another name"
            )
        if plugin.name in declared:
            raise InvalidValue(
                f"plugins[{index}].name {shown(plugin.name)} is used twice; give each plugin another name"
            )
        declared[plugin.name] = plugin
    profiles: dict[str, Profile] = {}
    for index, entry in enumerate(_list(top.get("schedulingProfiles"), "schedulingProfiles")):
        profile = _profile(entry, f"schedulingProfiles[{index}]", declared)
        if profile.name in profiles:
            raise InvalidValue(
                f"schedulingProfiles[{index}].name {shown(profile.name)} is used twice; give each profile another name"
            )
        profiles[profile.name] = profile
    if not profiles:
        raise InvalidValue("schedulingProfiles is empty; name at least one profile", field="schedulingProfiles")
    notes = [f"{plugin.type}: {plugin.row.note}" for plugin in declared.values() if plugin.row.note]
    notes += [
        f"{plugin.type}: {', '.join(plugin.unused)} are not used; it predicts from what /release says of each target"
        for plugin in declared.values()
        if plugin.unused
    ]
    notes += [f"{name}: {_ELSEWHERE[name]}" for name in _ELSEWHERE if name in top]
    config = _handled(declared, profiles, tuple(dict.fromkeys(notes)))
    return replace(config, speculation=_speculation(declared), history=_history(declared))


# ---- profiles --------------------------------------------------------------------------------------


def _profile(entry: Any, where: str, declared: Mapping[str, DeclaredPlugin]) -> Profile:
    fields = _mapping(entry, where)
    _only(fields, ("name", "plugins"), where)
    filters: list[Filter] = []
    prompt_filters: list[Filter] = []
    scorers: dict[str, WeightedScorer] = {}
    picker: Picker = max_score
    endpoints = 1
    for index, reference in enumerate(_list(fields.get("plugins"), f"{where}.plugins")):
        here = f"{where}.plugins[{index}]"
        values = _mapping(reference, here)
        _only(values, ("pluginRef", "weight"), here)
        name = _text(values.get("pluginRef"), f"{here}.pluginRef")
        if name not in declared:
            raise InvalidValue(f"{here}.pluginRef {shown(name)} is not in plugins; {nearest(name, declared)}")
        plugin = declared[name]
        if plugin.row.kind is PluginKind.FILTER:
            filters.append(_filter(plugin))
        if plugin.row.kind is PluginKind.FILTER_AND_SCORER and plugin.parameters.get("enableFiltering", False):
            prompt_filters.append(_length_filter(plugin))
        if plugin.row.kind in (PluginKind.SCORER, PluginKind.FILTER_AND_SCORER):
            weight = _weight(values.get("weight", 1), f"{here}.weight")
            weight += scorers[name].weight if name in scorers else 0.0
            scorers[name] = _scorer(plugin, weight)
        elif plugin.row.kind is PluginKind.PICKER:
            picker, endpoints = _picker(plugin)
        elif plugin.row.kind is not PluginKind.FILTER:
            problem = f"{here}.pluginRef {shown(name)} is of kind {plugin.row.kind}"
            sentence = f"{problem}; a profile has filters, scorers, pickers"
            raise InvalidValue(sentence, field=f"{here}.pluginRef")
    return Profile(
        _text(fields.get("name"), f"{where}.name"),
        tuple(filters),
        tuple(scorers.values()),
        picker,
        endpoints,
        tuple(prompt_filters),
    )


def _length_filter(plugin: DeclaredPlugin) -> Filter:
    return filters.by_context_length(str(plugin.parameters.get("label", CONTEXT_LABEL)))


def _filter(plugin: DeclaredPlugin) -> Filter:
    parameters = plugin.parameters
    if plugin.type in _ROLES:
        return _ROLES[plugin.type]
    if plugin.type == "by-label":
        allows_no_label = bool(parameters.get("allowsNoLabel", False))
        label = _text(parameters.get("label"), f"{plugin.where}.label")
        valid = frozenset(parameters.get("validValues", ()))
        if not valid and not allows_no_label:
            raise InvalidValue(f"{plugin.where}.validValues is missing; name the values, or set allowsNoLabel")
        return filters.by_label(label, valid, allows_no_label)
    requirements = [
        filters.Requirement(row["key"], row["operator"], frozenset(row.get("values", ())))
        for row in parameters.get("matchExpressions", ())
    ]
    return filters.by_selector(parameters.get("matchLabels", {}), requirements)


def _scorer(plugin: DeclaredPlugin, weight: float) -> WeightedScorer:
    if plugin.type == "context-length-aware":
        label = str(plugin.parameters.get("label", CONTEXT_LABEL))
        return WeightedScorer(plugin.name, weight, partial(scored_by_label, label=label))
    row = SCORERS[plugin.type]
    if "blockSize" in plugin.parameters and "blockSizeTokens" not in plugin.parameters:
        where = f"{plugin.where}.blockSize"
        raise InvalidValue(f"{where} is a number of characters; give blockSizeTokens, a number of tokens", field=where)
    values = _constants(plugin)
    return WeightedScorer(
        plugin.name,
        weight,
        lambda request, candidates: row.score(request, candidates, values),
        needs_gauges=row.needs_gauges or (row.needs_answer_times and needs_gauges(values)),
        needs_answer_times=row.needs_answer_times,
        is_prefix=row.is_prefix,
    )


def _constants(plugin: DeclaredPlugin) -> Values:
    """Return the numbers of a scorer's own table."""
    row = SCORERS[plugin.type]
    own = {parameter.name for parameter in row.parameters}
    parameters = {name: value for name, value in plugin.parameters.items() if name in own}
    return read_constants(row.parameters, parameters, plugin.where)


def _picker(plugin: DeclaredPlugin) -> tuple[Picker, int]:
    endpoints = plugin.parameters.get("maxNumOfEndpoints", 1)
    if not (isinstance(endpoints, int) and endpoints >= 1):
        raise InvalidValue(f"{plugin.where}.maxNumOfEndpoints is {shown(endpoints)}; it must be a number of at least 1")
    return PICKERS[plugin.type], endpoints


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
        raise InvalidValue(f"{where} is {shown(value)}; it must be a number of 0 to 1000000", field=where)
    return float(value)


def _speculation(declared: Mapping[str, DeclaredPlugin]) -> Speculation | None:
    """Return what the file says of speculative entries; None if it says nothing."""
    speculative = [plugin for plugin in declared.values() if "speculativeIndexing" in plugin.parameters]
    for plugin in speculative:
        if not plugin.parameters["speculativeIndexing"]:
            continue
        text = plugin.parameters.get("speculativeTTL", "2s")
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
        if not 0.001 <= seconds <= _SPECULATIVE_SECONDS_MAX:
            where = f"{plugin.where}.speculativeTTL"
            raise InvalidValue(
                f"{where} is {shown(text)}; it must be 1ms to {_SPECULATIVE_SECONDS_MAX // 60}m", field=where
            )
        # 0.7 s are a little more than 700 ms in binary.
        return Speculation(is_on=True, milliseconds=math.ceil(round(1000 * seconds, 6)))
    return Speculation(is_on=False) if speculative else None


def _history(declared: Mapping[str, DeclaredPlugin]) -> HistoryTerms | None:
    """Return what is remembered for the scorers of histories: enough for each scorer."""
    values = [_constants(plugin) for plugin in declared.values() if plugin.type == "prefix-cache-scorer"]
    if not values:
        return None
    capacity = int(max(constants.number("lruCapacityPerServer") for constants in values))
    return HistoryTerms(
        capacity, min(capacity, int(max(constants.number("maxPrefixBlocksToMatch") for constants in values)))
    )


# ---- handlers and deciders -------------------------------------------------------------------------


def _handled(
    declared: Mapping[str, DeclaredPlugin], profiles: Mapping[str, Profile], notes: tuple[str, ...]
) -> PickerConfig:
    handlers = [plugin for plugin in declared.values() if plugin.row.kind is PluginKind.HANDLER]
    if len(handlers) > 1:
        names = ", ".join(plugin.name for plugin in handlers)
        raise InvalidValue(f"plugins has several profile handlers ({names}); keep one")
    handler = handlers[0] if handlers else None
    if handler is None or handler.type == "single-profile-handler":
        if len(profiles) > 1:
            raise InvalidValue(
                f"schedulingProfiles has {len(profiles)} profiles ({', '.join(profiles)}), and a single profile runs "
                "without disagg-profile-handler; declare it, or keep one profile"
            )
        return PickerConfig(profiles, next(iter(profiles)), notes=notes)
    parameters = handler.parameters
    nested, asked = parameters.get("profiles", {}), parameters.get("deciders", {})
    decode = str(nested.get("decode", parameters.get("decodeProfile", "decode")))
    prefill = str(nested.get("prefill", parameters.get("prefillProfile", "prefill")))
    encode = str(nested.get("encode", parameters.get("encodeProfile", "encode")))
    if "primaryPort" in parameters:
        notes = (*notes, _primary_port(parameters["primaryPort"], f"{handler.where}.primaryPort"))
    legacy = sorted(parameters.keys() - {"profiles", "deciders"})
    if legacy and handler.type == "disagg-profile-handler":
        notes = (*notes, f"{handler.type}: {', '.join(legacy)} are older names; write profiles.* and deciders.*")
    default = "prefix-based-pd-decider" if handler.type == "pd-profile-handler" else None
    first = parameters.get("prefillDeciderPluginName", parameters.get("deciderPluginName", default))
    prefill_decider = _decider(declared, asked.get("prefill", first), handler.where)
    encode_decider = _decider(declared, asked.get("encode", parameters.get("encodeDeciderPluginName")), handler.where)
    header_handlers = ("disagg-headers-handler", "prefill-header-handler")
    if (prefill_decider or encode_decider) and not any(plugin.type in header_handlers for plugin in declared.values()):
        raise InvalidValue(f"{handler.type} with a decider needs disagg-headers-handler among plugins; add it")
    for name, is_needed in ((decode, True), (prefill, prefill_decider), (encode, encode_decider)):
        if is_needed and name not in profiles:
            way_out = nearest(name, profiles)
            raise InvalidValue(f"{handler.where}: profile {shown(name)} is not in schedulingProfiles; {way_out}")
    return PickerConfig(
        profiles,
        decode,
        prefill if prefill_decider else None,
        encode if encode_decider else None,
        prefill_decider,
        encode_decider,
        notes,
    )


def _primary_port(port: Any, where: str) -> str:
    if not (isinstance(port, int) and 0 <= port <= 65535):
        raise InvalidValue(f"{where} is {shown(port)}; it must be a port, or 0", field=where)
    return "primaryPort: requests go to the port in the address of each registration"


def _decider(declared: Mapping[str, DeclaredPlugin], name: Any, where: str) -> Decider | None:
    if name is None:
        return None
    plugin = declared.get(name)
    if plugin is None or plugin.row.kind is not PluginKind.DECIDER:
        names = [entry.name for entry in declared.values() if entry.row.kind is PluginKind.DECIDER]
        raise InvalidValue(f"{where}: decider {shown(name)} is not a decider in plugins; {nearest(str(name), names)}")
    if plugin.type == "prefix-based-pd-decider":
        tokens = plugin.parameters.get("nonCachedTokens", 0)
        if not (isinstance(tokens, int) and tokens >= 0):
            raise InvalidValue(f"{plugin.where}.nonCachedTokens is {shown(tokens)}; it must be a number of at least 0")
        return deciders.prefix_based(tokens)
    return deciders.multimodal if plugin.type == "always-disagg-multimodal-decider" else deciders.always


# ---- shapes ----------------------------------------------------------------------------------------


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidValue(f"{where} must be a mapping by name", field=where, reason="invalid_type")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidValue(f"{where} must be a list", field=where, reason="invalid_type")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValue(f"{where} is missing, or is no text", field=where, reason="missing")
    return value


def _only(fields: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in fields:
        if name not in names:
            raise InvalidValue(f"{where}: {shown(name)} is not known; {nearest(name, names)}", field=name)


# Checks that the parameters of plugins are of the kinds that ``plugins`` gives them.


#: Go's durations: numbers with units, such as ``2m`` or ``1h30m``.
_DURATION = re.compile(r"([0-9]+(\.[0-9]*)?(ns|us|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(?<![0-9.])([0-9]+(?:\.[0-9]*)?)(ns|us|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: An entry that no event confirms in this time is wrong.
_SPECULATIVE_SECONDS_MAX = 600


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _is_expressions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and row.keys() <= {"key", "operator", "values"}
        and isinstance(row.get("key"), str)
        and row.get("operator") in OPERATORS
        and _is_texts(row.get("values", []))
        for row in value
    )


def _is_duration(value: Any) -> bool:
    return isinstance(value, str) and _DURATION.fullmatch(value) is not None


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "texts": (_is_texts, "a list of texts"),
    "labels": (_is_labels, "texts by name"),
    "expressions": (_is_expressions, f"a list of key, operator ({', '.join(OPERATORS)}) and values"),
    "duration": (_is_duration, "a duration such as 2s, 5m or 1h30m"),
}


def check_parameters(parameters: Mapping[str, Any], parameters_known: Mapping[str, Any], where: str) -> None:
    """Raise ``InvalidValue`` at the first unknown name or value, nested ones too."""
    for name, value in parameters.items():
        if name not in parameters_known:
            raise InvalidValue(
                f"{where}.{name} is not known; {nearest(name, parameters_known)}", field=f"{where}.{name}"
            )
        kind = parameters_known[name]
        if isinstance(kind, Mapping):
            check_parameters(_mapping(value, f"{where}.{name}"), kind, f"{where}.{name}")
            continue
        fits, sentence = _KINDS[kind]
        if not fits(value):
            raise InvalidValue(f"{where}.{name} is {shown(value)}; it must be {sentence}", field=f"{where}.{name}")
