"""Which source a model's tokens are from, and what opens it. Nothing optional is imported before it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.shown import shown

#: Directories below WAYMARK_TOKENIZERS_DIR that are looked at; a volume may hold anything.
_DIRECTORIES_MAX = 10_000
#: The files of a tokenizer; the weights next to them are not fetched.
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def no_tokenizer(model: str) -> InvalidValue:
    """The refusal of text for a model without a source."""
    return InvalidValue(
        f"there is no tokenizer for the model {shown(model)}, and no engine of it that is registered with an address; "
        "register an engine with an address, name a tokenizer in WAYMARK_TOKENIZERS, put its directory into "
        "WAYMARK_TOKENIZERS_DIR, or send token_ids",
        reason="no_tokenizer",
        field="model",
    )


def found_in(directory: Path) -> dict[str, str]:
    """URLs by model: each ``tokenizer.json`` one or two levels down, its model named by the path of its directory."""
    found: dict[str, str] = {}
    looked_at = 0
    for path in _directories(directory):
        for below in [path, *_directories(path)]:
            looked_at += 1
            if looked_at > _DIRECTORIES_MAX:
                return found
            if (below / "tokenizer.json").is_file():
                found[below.relative_to(directory).as_posix()] = below.absolute().as_uri()
    return found


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []  # nothing that can be read, so no tokenizer


def directory_of(url: str, *, hub_cache: Path | None = None) -> Path:
    """The directory that a ``file`` or ``hf`` URL names; what the hub has is fetched. Blocks.

    ``hub_cache`` is where the hub's files are kept, by default where ``huggingface_hub`` keeps them.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        return path.parent if path.name == "tokenizer.json" else path
    name, _, revision = (parts.netloc + parts.path).partition("@")
    return _from_hub(url, name.rstrip("/"), revision or None, hub_cache)


def is_for_sglang(url: str) -> bool:
    """Whether SGLang serves the model of a ``file`` or ``hf`` URL; else messages are read as vLLM reads them."""
    return urlsplit(url).query == "engine=sglang"


def _from_hub(url: str, name: str, revision: str | None, cache: Path | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise missing("huggingface_hub", url) from None

    def fetch(*, is_local: bool) -> Path:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=cache, allow_patterns=list(_FILES), local_files_only=is_local
            )
        )

    try:
        try:
            return fetch(is_local=True)
        except LocalEntryNotFoundError:
            return fetch(is_local=False)
    except Exception as error:  # the hub's client lets errors of several libraries through
        first = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise TokenizerUnavailable(f"the tokenizer {url} cannot be fetched: {first}", retry_after_seconds=10) from None


def missing(package: str, url: str, extra: str = "tokens") -> InvalidValue:
    """The refusal where an optional package is not installed."""
    return InvalidValue(
        f"the tokenizer {url} needs the package {package}, which is not installed; install waymark[{extra}]",
        reason="no_tokenizer",
        field="model",
    )
