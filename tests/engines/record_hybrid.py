"""Records what the block manager of vLLM reuses of prompts to hybrid models, and the events that it has for them.

``PYTHON tests/engines/record_hybrid.py`` writes ``tests/fixtures/engines/vllm_0.33_hybrid.msgpack.gz``. PYTHON is that
of an environment in which ``vllm==0.33.0`` is installed, without what it depends on: torch and whatever else the block
manager imports but does not need for its work is stood in for.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import math
import pickle
import random
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

RECORDED = Path(__file__).parents[1] / "fixtures" / "engines" / "vllm_0.33_hybrid.msgpack.gz"
PROMPTS = 60
SEED = 2

_CORE = "vllm.v1.core"
#: Modules of vLLM that run as they are; the packages around them are empty, and everything else is stood in for.
_REAL = {
    *(f"{_CORE}.{name}" for name in ("kv_cache_manager", "kv_cache_coordinator", "kv_cache_utils", "block_pool")),
    *(f"{_CORE}.{name}" for name in ("single_type_kv_cache_manager", "kv_cache_metrics")),
    *(f"vllm.v1.{name}" for name in ("kv_cache_interface", "kv_cache_layout", "kv_cache_spec_registry")),
    *("vllm.v1.hisparse.block_pool", "vllm.distributed.kv_events", "vllm.utils.math_utils", "vllm.utils.hashing"),
}
_PACKAGES = {"vllm", "vllm.v1", _CORE, "vllm.v1.hisparse", "vllm.distributed", "vllm.utils"}
_ABSENT = {"torch", "cbor2", "xxhash", "transformers", "blake3"}


class _AnyType(type):
    """A class that has whatever attribute is asked of it."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(cls, name)

    def __or__(cls, other: object) -> Any:
        return object

    def __ror__(cls, other: object) -> Any:
        return object


class _AnyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _stand_in(self, name)


def _stand_in(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _AnyType(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls), "__init__": lambda *_, **__: None})
    setattr(owner, name, made)
    return made


class _Finder:
    """Finds the stand-ins."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_absent = name.split(".")[0] in _ABSENT
        if name in _REAL or not (is_absent or name == "vllm" or name.startswith("vllm.")):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AnyModule(spec.name)
        module.__path__ = [str(self._root.joinpath(*spec.name.split(".")[1:]))] if spec.name in _PACKAGES else []
        vars(module)["__version__"] = "2.99.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class VLLM:
    """The modules of vLLM's block manager."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            sys.exit("vllm is not installed here")
        sys.meta_path.insert(0, _Finder(Path(found.origin).parent))
        quiet = SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "warning_once", "info_once"), _nothing))
        _set("vllm.logger", init_logger=lambda _: quiet)
        _set("vllm.envs", __getattr__=_environment)
        _set("vllm.utils.torch_utils", get_dtype_size=lambda _: 2)
        _set("vllm.multimodal.utils", get_mm_features_in_window=lambda *_: (0, []))
        _set("vllm.platforms", current_platform=SimpleNamespace(register_custom_kv_cache_specs=_nothing))
        self.dtype = object()
        _set("torch", bfloat16=self.dtype)
        self.manager: Any = importlib.import_module(f"{_CORE}.kv_cache_manager")
        self.utils: Any = importlib.import_module(f"{_CORE}.kv_cache_utils")
        self.specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        vars(self.utils).update(NONE_HASH=_hash("none"), _NONE_HASH_SEED="none")

    def full(self, size: int) -> Any:
        return self.specs.FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=self.dtype)

    def window(self, size: int, tokens: int) -> Any:
        return self.specs.SlidingWindowSpec(
            block_size=size, num_kv_heads=1, head_size=1, dtype=self.dtype, sliding_window=tokens
        )

    def state(self, size: int) -> Any:
        return self.specs.MambaSpec(block_size=size, shapes=((1,),), dtypes=(self.dtype,), mamba_cache_mode="align")


def _set(name: str, **values: Any) -> None:
    module: Any = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), last, module)


def _environment(name: str) -> bool:
    if name.startswith("__"):
        raise AttributeError(name)
    return name == "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def _nothing(*_: object, **__: object) -> None:
    """What is logged or registered has no use here."""


def _hash(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, 5)).digest()


class _Request:
    """The attributes of a request that the block manager reads."""

    made = 0

    def __init__(self, tokens: Sequence[int]) -> None:
        _Request.made += 1
        self.request_id = f"r{_Request.made}"
        self.all_token_ids = self.prompt_token_ids = list(tokens)
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.block_hashes: list[bytes] = []
        self.mm_features: list[object] = []
        self.lora_request = self.cache_salt = self.session_id = self.prompt_embeds = self.status = None
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_preemptions = 0
        self.shared_prefix_boundary = self.num_output_placeholders = 0
        self.skip_reading_prefix_cache = False

    def hashed(self, hasher: Any) -> Self:
        self.block_hashes = hasher(self)
        return self


def cases(of: VLLM) -> dict[str, dict[str, Any]]:
    """The groups of each session, the tokens that are hashed at once, the blocks there are, and the largest step."""
    usual = {"hash_size": 16, "step": 128}
    return {
        "window": usual | {"specs": [of.full(16), of.window(16, 64)], "blocks": 140},
        "windows before full attention": usual
        | {"specs": [of.window(16, 100), of.window(16, 100), of.full(16)], "blocks": 200, "step": 10**6},
        "window with larger blocks": usual | {"specs": [of.full(16), of.window(32, 100)], "blocks": 100},
        "window with smaller blocks": usual | {"specs": [of.full(32), of.window(16, 100)], "blocks": 100},
        "window kept at few boundaries": usual
        | {"specs": [of.full(16), of.window(16, 64)], "blocks": 120, "retention": 0},
        "states": usual | {"specs": [of.full(16), of.state(64)], "blocks": 100},
        "window and states": usual | {"specs": [of.full(16), of.window(16, 64), of.state(32)], "blocks": 160},
    }


def _prompts() -> Any:
    """Chats that go on, some with a common beginning."""
    rng = random.Random(SEED)
    heads = [[rng.randrange(128) for _ in range(rng.randrange(2, 12) * 16)] for _ in range(4)]
    chats: list[list[int]] = []
    for _ in range(PROMPTS):
        if chats and rng.random() < 0.6:
            chat = rng.choice(chats)
        else:
            chat = list(rng.choice(heads))
            chats.append(chat)
            if len(chats) > 12:
                chats.pop(0)
        chat += [rng.randrange(128) for _ in range(rng.randrange(5, 90))]
        if len(chat) > 700:
            chats.remove(chat)
        yield list(chat)


def session(
    of: VLLM, specs: Sequence[Any], *, hash_size: int, blocks: int, step: int, retention: int | None = None
) -> list[dict[str, Any]]:
    """Each prompt with the number of its tokens that were reused, and the batches of events until the next one."""
    encode = importlib.import_module("msgspec").msgpack.encode
    aligned = math.lcm(*(spec.block_size for spec in specs))
    groups = [of.specs.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]
    config = of.specs.KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
    )
    manager = of.manager.KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=aligned, hash_block_size=hash_size, enable_kv_cache_events=True
    )
    hasher = of.utils.get_request_block_hasher(hash_size, _hash)
    steps: list[dict[str, Any]] = []
    running: list[_Request] = []
    for prompt in _prompts():
        request = _Request(prompt).hashed(hasher)
        found, reused, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        first = {"num_new_computed_tokens": reused, "new_computed_blocks": found}
        batches, done, is_held = [], reused, True
        while is_held and done < request.num_tokens:
            new = min(step, request.num_tokens - done)
            if done + new < request.num_tokens:
                new -= (done + new) % aligned
            while (held := manager.allocate_slots(request, new, **first)) is None and running:
                manager.free(running.pop(0))
            is_held, first = held is not None, {}
            if is_held:
                done += new
                request.num_computed_tokens = done
                batches.append(manager.take_events())
        running.append(request)
        if not is_held or len(running) > 3:
            manager.free(running.pop(0))
        batches.append(manager.take_events())
        told = [encode([0.0, batch, 0]) for batch in batches if batch]
        steps.append({"prompt": bytes(prompt), "reused": reused, "batches": told})
    return steps


def main() -> None:
    of = VLLM()
    sessions = []
    for name, case in cases(of).items():
        size = next(spec.block_size for spec in case["specs"] if type(spec) is of.specs.FullAttentionSpec)
        sessions.append({"name": name, "block_size": size, "steps": session(of, **case)})
        print(name, sum(each["reused"] for each in sessions[-1]["steps"]), "tokens reused")
    packed = importlib.import_module("msgspec").msgpack.encode(sessions)
    RECORDED.write_bytes(gzip.compress(packed, 9, mtime=0))


if __name__ == "__main__":
    main()
