"""Imports go one way: this is the table of who may import whom."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = {"__main__", "cli", "demo", "registering", "runtime", "runtime_epp", "publishers_file"}
LEAVES = {"errors", "instruments", "settings", "metrics", "logs", "native", "shown", "endpoints", "asker", "protobuf"}
LEAVES |= {"watched_file"}
BELOW_ROLES = LEAVES | {"domain", "engines", "store", "apply"}

# Part of waymark -> the other parts of it that it may import. The version in app/waymark/__init__.py is free for all.
PARTS: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    **{leaf: {"errors"} for leaf in LEAVES - {"errors", "native"}},
    "metrics": {"instruments"},
    "endpoints": {"errors", "shown"},
    "asker": {"endpoints", "errors", "settings", "shown"},
    "watched_file": {"errors", "logs"},
    "native": {"_native"},
    "domain": {"errors", "native"},
    "store": LEAVES | {"domain"},
    "apply": LEAVES | {"domain", "store"},
    "tokenization": LEAVES | {"domain", "chat"},
    "discovery": LEAVES | {"domain", "store"},
    "engines": {"domain", "errors", "native", "shown"},
    "routing": {"domain", "errors"},
    "chat": {"domain", "errors", "shown"},
    "selection": LEAVES | {"domain", "store", "routing", "chat", "tokenization"},
    "ingest": BELOW_ROLES | {"chat"},
    "api": BELOW_ROLES | {"discovery", "selection", "routing", "chat", "tokenization", "inspection"},
    "gateway": LEAVES | {"domain", "store", "selection", "routing", "chat", "tokenization", "discovery", "serving"},
    "simulator": {"client", "domain", "errors"},
    "client": {"domain", "errors", "native"},
    "serving": LEAVES,
    "inspection": LEAVES | {"domain", "store"},
    "console": LEAVES | {"domain", "store", "tokenization", "inspection"},
    "remote": {"console", "domain", "errors", "settings", "shown", "tokenization"},
    "epp": LEAVES | {"domain", "selection", "routing", "chat", "tokenization", "discovery", "serving"},
    **{
        top: BELOW_ROLES
        | TOP
        | {"api", "epp", "gateway", "serving", "console", "inspection", "client", "remote", "ingest", "simulator"}
        | {"selection", "tokenization", "discovery"}
        for top in TOP
    },
}

# The parts that write lines of a protocol themselves.
ON_THE_WIRE = {"store", "serving"}

# Third-party package -> the parts or modules that may import it.
LIBRARIES: dict[str, set[str]] = {
    "aiohttp": {"asker", "gateway", "simulator"},
    "argcomplete": {"cli"},
    "annotated_types": {"settings"},
    "cryptography": {"epp.tls"},
    "envoy": {"epp"},
    "fakeredis": {"store"},
    "google": {"epp", "protobuf"},
    "grpc": {"tokenization.uds", "epp"},
    "grpc_health": {"epp"},
    "httptools": {"serving"},
    "httpx": {"client", "remote"},
    "hiredis": {"store"},
    "huggingface_hub": {"tokenization"},
    "minijinja": {"tokenization"},
    "msgpack": {"client", "domain.hashing", "engines", "ingest", "api", "simulator"},
    "orjson": {"store", "discovery", "epp", "ingest", "api", "gateway", "serving", *TOP},
    "prometheus_client": {"instruments", "metrics", "engines.gauges"},
    "bson": {"gateway.mongo"},
    "pymongo": {"gateway.mongo"},
    "pydantic": {"settings", "api", "simulator"},
    "pydantic_core": {"api"},
    "pydantic_settings": {"settings"},
    "redis": {"store"},
    "rich": {"console"},
    "starlette": {"api"},
    "tokenizers": {"tokenization"},
    "uvicorn": {"serving", "runtime"},
    "uvloop": {"cli", "runtime"},
    "xxhash": {"domain.hashing", "ingest", "tokenization"},
    "yaml": {"publishers_file", "routing.picker_config"},
    "yarl": {"gateway.upstream"},
    "zmq": {"ingest", "simulator"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports here are absolute"
            # `from waymark import logs` means waymark.logs, `from waymark import __version__` does not.
            names |= (
                {f"waymark.{alias.name}" for alias in node.names} if node.module == "waymark" else {str(node.module)}
            )
    return names - {"waymark", "waymark.__version__"}


MODULES = pytest.mark.parametrize(
    "path", sorted((ROOT / "app").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)


@MODULES
def test_only_where_the_wire_is_does_a_module_write_its_lines(path: Path) -> None:
    """RESP is the store's, HTTP is that of those who speak it."""
    if path.relative_to(ROOT / "app" / "waymark").parts[0] in ON_THE_WIRE:
        return
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    lines = [node.value for node in nodes if isinstance(node, ast.Constant) and r"\r\n" in repr(node.value)]
    assert lines == []


@MODULES
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT / "app" / "waymark").with_suffix("").parts)
    part = module.partition(".")[0]
    wrong = []
    for name in imported(path):
        package, _, rest = name.partition(".")
        if package == "waymark":
            target = rest.partition(".")[0]
            allowed = target == part or target in PARTS[part]
        else:
            allowed = package in sys.stdlib_module_names or bool({part, module} & LIBRARIES.get(package, set()))
        if not allowed:
            wrong.append(name)
    assert sorted(wrong) == [], f"waymark.{module} may not import these"
