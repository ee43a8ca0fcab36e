"""The options of ``waymark simulate``, checked before anything is opened, and the faults that an engine can have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.simulator.encode import DIALECTS, ReplayFraming

#: The words for a bound; pydantic's own are for programs.
_WANTED = {
    "greater_than_equal": "it is at least {ge}",
    "less_than_equal": "it is at most {le}",
    "literal_error": "it is {expected}",
}


class Options(BaseModel):
    """Options, checked when they are set; ``InvalidValue`` names the first wrong one."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            name = str(error["loc"][0]) if error["loc"] else "options"
            wanted = _WANTED.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
            sentence = f"{name} is {shown(error['input'])}; {wanted.format(**error.get('ctx', {}))}"
            raise InvalidValue(sentence, field=name) from None


class Faults(Options):
    """Each number counts batches; 0 means never. ``_every``: each n-th one; ``_after``: once, from the n-th on."""

    drop_every: int = Field(0, ge=0)
    """Each n-th batch is not sent live. A replay contains it."""
    restart_after: int = Field(0, ge=0)
    """At the n-th batch the engine restarts: cache and buffer are empty, and seq begins again."""
    silent_after: int = Field(0, ge=0)
    """From the n-th batch on the engine hangs: it sends nothing, and answers no replay."""
    garbage_every: int = Field(0, ge=0)
    """Before each n-th batch, a frame is sent whose payload is not a batch. The frame has a seq of its own."""
    malformed_every: int = Field(0, ge=0)
    """Before each n-th batch, frames of a wrong form are sent. They have no seq."""
    unknown_every: int = Field(0, ge=0)
    """Each n-th batch begins with an event of an unknown type."""
    replay_silent: bool = False
    """A replay request is received and never answered."""
    truncate_replay: int = Field(0, ge=0)
    """A replay ends after this number of batches, without an end marker."""
    late_replay: int = Field(0, ge=0)
    """A replay begins this number of batches later than requested."""
    replay_hole_every: int = Field(0, ge=0)
    """Replays omit each n-th batch, always the same ones."""
    snapshot_unavailable: int = Field(0, ge=0)
    """The first n requests for a snapshot are answered with -2: ask later."""
    snapshot_silent: bool = False
    """A request for a snapshot is received and never answered."""
    snapshot_version: Literal[1, 2] = 2
    """The version of SGLang's snapshots that the engine makes; it refuses the other."""
    snapshot_cut: bool = False
    """The last chunk of a snapshot ends in its middle."""
    snapshot_other_id: bool = False
    """The last chunk of a snapshot is of another process."""
    snapshot_below_zero: bool = False
    """A snapshot removes each of its blocks once too often; one of SGLang's lacks a record."""


class AnswerFaults(Options):
    """Faults of answers over HTTP. Each number counts requests; 0 means never."""

    error_every: int = Field(0, ge=0)
    """Each n-th request is answered with an error."""
    error_status: int = Field(503, ge=400, le=599)
    """The status of each such error."""
    hang_every: int = Field(0, ge=0)
    """Each n-th request gets no answer."""
    cut_every: int = Field(0, ge=0)
    """The connection of each n-th request is closed in the middle of the answer."""


def is_due(period: int, count: int) -> bool:
    """Return whether ``count``, from 1, is a multiple of ``period``; 0 means never."""
    return period > 0 and count % period == 0


PORT_MAX = 65535


class SimulateOptions(Options):
    """All options, with defaults; ``InvalidValue`` names the field that does not fit."""

    engines: int = Field(1, ge=1)
    """The number of engines."""
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks of each engine. All ranks of an engine publish on its one socket."""
    dialect: str = "vllm-map"
    """The format of events, such as vllm-map, sglang-map or standard. The error for an unknown one lists them all."""
    host: str = "127.0.0.1"
    """The address that the sockets are bound to."""
    advertised_host: str | None = None
    """The address in registrations, in place of ``host``. It is needed if ``host`` is ``0.0.0.0``."""
    base_port: int = Field(5557, ge=0)
    """Engine i publishes on port ``base_port + 2 i`` and replays on the next port. 0 means any free ports."""
    snapshot_port: int | None = Field(None, ge=0)
    """Engine i answers with snapshots of its cache on port ``snapshot_port + i``, names its process in each batch, and
    sends an empty batch each second. 0 means any free ports."""
    http_port: int | None = Field(None, ge=0)
    """Engine i answers over HTTP on port ``http_port + i``. 0 means any free ports; without it there is no HTTP."""
    has_replay: bool = True
    """Each engine has a replay endpoint; with --no-replay it has none."""
    replay_framing: ReplayFraming = "topic"
    """The form of replay messages: topic sends a topic and the seq (batch number), seq the seq alone, as older vLLM."""
    buffer_batches: int = Field(10_000, ge=1)
    """The number of batches that an engine keeps for replays."""
    topic: str = ""
    """The topic in front of each frame."""
    model_name: str = "demo"
    """The served model."""
    tenant_id: str = "default"
    """The served tenant."""
    instance_prefix: str = "engine"
    """Engine i is instance ``<prefix>-<i>``."""
    block_size: int = Field(16, ge=1)
    """Tokens per block."""
    gpu_blocks: int = Field(4096, ge=1)
    """Blocks that fit on a rank's GPU."""
    cpu_blocks: int = Field(0, ge=0)
    """Blocks that fit in the host memory of a rank. It gets the blocks that the GPU evicts."""
    disk_blocks: int = Field(0, ge=0)
    """Blocks that fit on the disk of a rank. It gets the blocks that host memory evicts."""
    repeat_rate: float = Field(0.05, ge=0, le=1)
    """The probability that an engine stores a cached part of a prompt again, as a second copy."""
    seed: int = 0
    """The seed for the prompts, their order, and the engine of each."""
    prompts: int | None = Field(None, ge=0)
    """Stop after this number of prompts. By default the duration, the end of the trace or SIGTERM ends the run."""
    duration_seconds: float | None = Field(None, ge=0)
    """Stop after this number of seconds."""
    prompts_per_second: float | None = Field(None, ge=0)
    """Prompts per second over all engines; 0 means as fast as possible. By default 10, or the times of the trace."""
    blocks_per_second: float | None = Field(None, ge=0)
    """Blocks of prompts per second over all engines, in place of ``prompts_per_second``."""
    trace: Path | None = None
    """A file of recorded prompts, in place of generated conversations."""
    trace_speed: float = Field(1.0, ge=0)
    """The factor by which a trace runs faster than recorded, if no rate is given. 0 means as fast as possible."""
    lora_names: tuple[str, ...] = ()
    """Adapters that conversations use, separated by commas."""
    cache_salts: tuple[str, ...] = ()
    """Cache salts that conversations use, separated by commas."""
    stay: bool = False
    """Keep the sockets open after the last prompt, until SIGTERM or the end of the duration."""
    answer_tokens: int = Field(16, ge=1, le=100_000)
    """Tokens of an answer over HTTP, if the request has no limit."""
    prefill_tokens_per_second: float = Field(0.0, ge=0)
    """The prefill speed of an engine for HTTP requests, in tokens per second. 0 means no delay."""
    tokens_per_second: float = Field(0.0, ge=0)
    """The decode speed of one answer over HTTP, in tokens per second. 0 means no delay."""
    register_url: str | None = Field(None, alias="register")
    """Base URL of a running Waymark to register the engines with, such as ``http://127.0.0.1:13333``."""
    register_within_seconds: float = Field(0.0, ge=0)
    """Seconds to wait until the Waymark of --register answers. 0 means no wait."""
    api_token: str | None = Field(None, repr=False)
    """The bearer token, if the Waymark of --register requires one."""
    faults: Faults = Field(default_factory=Faults)
    """What goes wrong on purpose with events. Each number counts batches; 0 means never."""
    answer_faults: AnswerFaults = Field(default_factory=AnswerFaults)
    """What goes wrong on purpose with answers over HTTP. Each number counts requests; 0 means never."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _require(self.dialect in DIALECTS, "dialect", f"is {shown(self.dialect)}; it is one of {', '.join(DIALECTS)}")
        _require(not self.disk_blocks or self.cpu_blocks > 0, "disk_blocks", "needs cpu_blocks: blocks come from there")
        _require(
            self.prompts_per_second is None or self.blocks_per_second is None,
            "blocks_per_second", "and prompts_per_second exclude each other",
        )  # fmt: skip
        last_port = self.base_port + 2 * self.engines - 1
        _require(
            self.base_port == 0 or last_port <= PORT_MAX,
            "base_port", f"is {self.base_port}; {self.engines} engines would need port {last_port}",
        )  # fmt: skip
        last_port = (self.snapshot_port or 0) + self.engines - 1
        _require(
            not self.snapshot_port or last_port <= PORT_MAX,
            "snapshot_port", f"is {self.snapshot_port}; {self.engines} engines would need port {last_port}",
        )  # fmt: skip
        _require(
            self.snapshot_port is None or self.dialect.startswith("vllm-map"),
            "snapshot_port", f"needs a dialect that vllm-map begins, not {self.dialect}",
        )  # fmt: skip
        last_port = (self.http_port or 0) + self.engines - 1
        _require(
            not self.http_port or last_port <= PORT_MAX,
            "http_port", f"is {self.http_port}; {self.engines} engines would need port {last_port}",
        )  # fmt: skip
        _require(
            self.trace is None or self.trace.is_file(), "trace", f"{self.trace} is no file; give the path of a trace"
        )
        _require(
            self.register_url is None or self.register_url.startswith(("http://", "https://")),
            "register", f"is {shown(self.register_url)}; it must be a URL such as http://127.0.0.1:13333",
        )  # fmt: skip
        _require(
            self.register_url is None or self.host not in ("0.0.0.0", "*") or self.advertised_host is not None,
            "advertised_host", f"is needed to register engines bound to {self.host}, which is no address to connect to",
        )  # fmt: skip
        return self


def _require(is_met: bool, name: str, complaint: str) -> None:
    if not is_met:
        raise InvalidValue(f"{name} {complaint}", field=name)


# The flags of ``waymark simulate``, one for each option, and the options that they make.


#: A type in the annotation of a field -> the parser of its flag's text; for any other, the text is the value.
_READERS: dict[Any, Any] = {tuple: lambda text: tuple(text.split(",")), Path: Path, int: int, float: float}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; the parsed arguments have None for a missing one."""
    for name, field in SimulateOptions.model_fields.items():
        options = field.annotation
        if isinstance(options, type) and issubclass(options, Options):
            group = parser.add_argument_group(name.replace("_", " "), _sentence(field))
            for fault, field_info in options.model_fields.items():
                _add_flag(group, f"--fault-{fault}", fault, field_info)
        else:
            _add_flag(parser, f"--{field.alias or name}", name, field)


def options_of(arguments: argparse.Namespace) -> SimulateOptions:
    """Return the options from the flags. Raise ``InvalidValue`` if one does not fit."""
    return SimulateOptions(
        **_given(arguments, SimulateOptions),
        faults=Faults(**_given(arguments, Faults)),
        answer_faults=AnswerFaults(**_given(arguments, AnswerFaults)),
    )


def _add_flag(group: Any, flag: str, name: str, field: FieldInfo) -> None:
    flag, sentence = flag.replace("_", "-"), _sentence(field)
    if field.annotation is bool:
        action, flag = ("store_false", flag.replace("--has-", "--no-")) if field.default else ("store_true", flag)
        group.add_argument(flag, dest=name, action=action, default=None, help=sentence)
        return
    default = "" if field.default in (None, "", ()) else f" ({field.default})"
    metavar = (field.alias or name).upper()
    group.add_argument(flag, dest=name, type=_reader(field), metavar=metavar, help=sentence + default)


def _reader(field: FieldInfo) -> Any:
    """Return the parser of the flag's text; None among the types of the field means that it is optional."""
    types = {get_origin(type_arg) or type_arg for type_arg in (field.annotation, *get_args(field.annotation))}
    return next((reader for kind, reader in _READERS.items() if kind in types), str)


def _sentence(field: FieldInfo) -> str:
    """Return the sentence of the field as argparse prints it."""
    return " ".join((field.description or "").split()).replace("``", "").replace("%", "%%")


def _given(arguments: argparse.Namespace, options: type[Options]) -> dict[str, Any]:
    values = {field.alias or name: getattr(arguments, name, None) for name, field in options.model_fields.items()}
    return {name: value for name, value in values.items() if value is not None}
