"""The settings of an endpoint picker's servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from waymark.base.settings import Settings

IDLE_SECONDS = 600.0
"""After so long without a message the stream of a request is ended. Envoy ends a request without bytes after 300 s, so
such a stream is forgotten."""

INDEX_STREAMS_MAX = 256
"""Streams of ``RadixIndex``. A gateway of smg opens two and keeps them, so these are 128 gateways."""


@dataclass(frozen=True, slots=True)
class EppOptions:
    """Times in seconds."""

    host: str = "0.0.0.0"
    port: int = 9002
    """The port; 0 for any free one."""
    health_port: int | None = 9003
    """None: health is answered on ``port`` alone."""
    has_tls: bool = True
    cert_file: Path | None = None
    key_file: Path | None = None
    streams_max: int = 4096
    index_streams_max: int = INDEX_STREAMS_MAX
    prefix_seconds: float = 0.1
    """How long an answer to SGLang's router may take, which waits no longer."""
    drain_seconds: float = 5.0
    finish_seconds: float = 60.0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            host=settings.host,
            port=settings.epp_port,
            health_port=settings.epp_health_port or None,
            has_tls=settings.epp_tls,
            cert_file=settings.epp_cert_file,
            key_file=settings.epp_key_file,
            streams_max=settings.epp_streams_max,
            drain_seconds=settings.epp_drain_seconds,
            finish_seconds=settings.epp_finish_seconds,
        )
