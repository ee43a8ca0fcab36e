"""What ``waymark simulate`` can be asked for, checked before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from waymark.errors import InvalidValue
from waymark.simulator.encode import DIALECTS
from waymark.simulator.faults import AnswerFaults, Faults, Options
from waymark.simulator.publisher import ReplayFraming

PORT_MAX = 65535


class SimulateOptions(Options):
    """All of it, with defaults; ``InvalidValue`` names the field that does not fit."""

    engines: int = Field(1, ge=1)
    """How many engines."""
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks per engine, all on the engine's one socket."""
    dialect: str = "vllm-map"
    """How events are written, such as vllm-map, sglang-map, standard; an unknown one is answered with all there are."""
    host: str = "127.0.0.1"
    """What the sockets are bound to."""
    advertised_host: str | None = None
    """What a registration names instead of ``host``; needed where that is ``0.0.0.0``."""
    base_port: int = Field(5557, ge=0)
    """Engine i publishes on ``base_port + 2 i`` and replays on the port above; 0: any free ports."""
    http_port: int | None = Field(None, ge=0)
    """Engine i answers over HTTP on ``http_port + i``, as a real one does; 0: any free ports; None: not at all."""
    has_replay: bool = True
    """A replay endpoint; --no-replay opens none."""
    replay_framing: ReplayFraming = "topic"
    """What replies of a replay look like: with a topic before the seq, or seq alone as older vLLMs send."""
    buffer_batches: int = Field(10_000, ge=1)
    """How many batches a replay can go back."""
    topic: str = ""
    """The topic in front of each frame."""
    model_name: str = "demo"
    """The model that is served."""
    tenant_id: str = "default"
    """The tenant that is served."""
    instance_prefix: str = "engine"
    """Engine i is instance ``<prefix>-<i>``."""
    block_size: int = Field(16, ge=1)
    """Tokens per block."""
    gpu_blocks: int = Field(4096, ge=1)
    """Blocks that fit on a rank's GPU."""
    cpu_blocks: int = Field(0, ge=0)
    """Blocks that fit in a rank's host memory, which takes what the GPU evicts."""
    disk_blocks: int = Field(0, ge=0)
    """Blocks that fit on a rank's disk, which takes what host memory evicts."""
    repeat_rate: float = Field(0.05, ge=0, le=1)
    """Chance that a prompt with a hit is stored again in part, as a second physical copy."""
    seed: int = 0
    """Decides prompts, their order and who gets them."""
    prompts: int | None = Field(None, ge=0)
    """Stop after so many prompts in total; None: only by time, at the end of the trace, or on SIGTERM."""
    duration_seconds: float | None = Field(None, ge=0)
    """Stop after so long."""
    prompts_per_second: float | None = Field(None, ge=0)
    """Over all engines; 0: as fast as they go; None: 10, or a trace's own times."""
    blocks_per_second: float | None = Field(None, ge=0)
    """Blocks of prompts, over all engines, instead of ``prompts_per_second``."""
    trace: Path | None = None
    """A file of recorded prompts, instead of made-up conversations."""
    trace_speed: float = Field(1.0, ge=0)
    """How much faster than recorded a trace runs, where no rate is given; 0: as fast as it goes."""
    lora_names: tuple[str, ...] = ()
    """Adapters that conversations use, by commas."""
    cache_salts: tuple[str, ...] = ()
    """Cache salts that conversations use, by commas."""
    stay: bool = False
    """After the last prompt keep the sockets open, until SIGTERM or the end of the duration."""
    faults: Faults = Field(default_factory=Faults)
    answer_faults: AnswerFaults = Field(default_factory=AnswerFaults)
    answer_tokens: int = Field(16, ge=1, le=100_000)
    """Tokens of an answer over HTTP, where the request names no limit."""
    prefill_tokens_per_second: float = Field(0.0, ge=0)
    """How fast an engine computes a prompt that it gets over HTTP; 0: at once."""
    tokens_per_second: float = Field(0.0, ge=0)
    """How fast an engine makes the tokens of one answer; 0: at once."""
    register_url: str | None = Field(None, alias="register")
    """Base URL of a running Waymark to register the engines with, such as ``http://127.0.0.1:13333``."""
    register_within_seconds: float = Field(0.0, ge=0)
    """How long to wait for that Waymark to come up; 0: it has to be there."""
    api_token: str | None = Field(None, repr=False)
    """The token that Waymark asks for."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _require(self.dialect in DIALECTS, "dialect", f"is {self.dialect!r}; it is one of {', '.join(DIALECTS)}")
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
            "register", f"is {self.register_url!r}; it is a URL such as http://127.0.0.1:13333",
        )  # fmt: skip
        _require(
            self.register_url is None or self.host not in ("0.0.0.0", "*") or self.advertised_host is not None,
            "advertised_host", f"is needed to register engines bound to {self.host}, which is no address to connect to",
        )  # fmt: skip
        return self


def _require(is_met: bool, name: str, complaint: str) -> None:
    if not is_met:
        raise InvalidValue(f"{name} {complaint}", field=name)
