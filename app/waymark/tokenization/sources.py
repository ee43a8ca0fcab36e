"""The source of a model's tokens, and its opening. Optional packages are imported only when they are needed."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.shown import shown

#: The bound on directories below WAYMARK_TOKENIZERS_DIR to look at; a volume may hold anything.
_DIRECTORIES_MAX = 10_000
#: The files of a tokenizer; the weights next to them are not fetched.
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def no_tokenizer(model: str) -> InvalidValue:
    """Return the refusal of text for a model without a source."""
    return InvalidValue(
        f"there is no tokenizer for the model {shown(model)}, and no engine of it that is registered with an address; "
        "register an engine with an address, name a tokenizer in WAYMARK_TOKENIZERS, put its directory into "
        "WAYMARK_TOKENIZERS_DIR, or send token_ids",
        reason="no_tokenizer",
        field="model",
    )


def found_in(directory: Path) -> dict[str, str]:
    """URLs by model: each ``tokenizer.json`` one or two levels down, its model named by the path of its directory."""
    names: dict[str, str] = {}
    looked_at = 0
    for path in _directories(directory):
        for below in [path, *_directories(path)]:
            looked_at += 1
            if looked_at > _DIRECTORIES_MAX:
                return names
            if (below / "tokenizer.json").is_file():
                names[below.relative_to(directory).as_posix()] = below.absolute().as_uri()
    return names


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []  # unreadable, so without a tokenizer


def directory_of(url: str, *, hub_cache: Path | None = None) -> Path:
    """Return the directory of a ``file`` or ``hf`` URL, after fetching it from the hub if necessary. Blocks.

    ``hub_cache`` is the directory for the hub's files, by default that of ``huggingface_hub``.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        return path.parent if path.name == "tokenizer.json" else path
    name, _, revision = (parts.netloc + parts.path).partition("@")
    return _from_hub(url, name.rstrip("/"), revision or None, hub_cache)


def is_for_sglang(url: str) -> bool:
    """Return whether SGLang serves the model of a ``file`` or ``hf`` URL; else messages are read in vLLM's way."""
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
    """Return the refusal without an optional package."""
    return InvalidValue(
        f"the tokenizer {url} needs the package {package}, which is not installed; install waymark[{extra}]",
        reason="no_tokenizer",
        field="model",
    )
