"""Records what SGLang makes of prompts: ``PYTHON -m tests.tokenization.record_sglang`` writes a file of ids.

PYTHON is that of an environment with sglang and transformers; neither torch nor a GPU is needed. SGLang's own handler
of ``/tokenize`` is run, with its classes for requests and chats, on a small tokenizer of transformers. What these
import and do not call (torch, kernels, models) is left out: a name in it is a class that does nothing.
"""

from __future__ import annotations

import abc
import asyncio
import importlib
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tokenization import record as of_vllm
from tests.tokenization import small
from tests.tokenization.record import ANSWER, CALL, RESULT, SYSTEM, TOOLS, USER, bodies, templates, today

RECORDED = Path(__file__).parents[1] / "fixtures" / "tokens" / "sglang_0.5.23.json"

_PARTS = [{"type": "text", "text": "It is"}, {"type": "text", "text": "sunny"}]
#: Bodies whose prompt vLLM makes otherwise, or refuses.
CHATS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER], "continue_final_message": True},
    {"messages": [USER, ANSWER]},
    {"messages": [USER, ANSWER], "add_generation_prompt": False},
    {"messages": [USER | {"name": "me"}, ANSWER | {"name": "you", "reasoning_content": "Look it up."}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, *_PARTS]}, USER]},
    {"messages": [USER, CALL, RESULT | {"content": _PARTS}, USER], "tools": [{"function": {"name": "now"}}, *TOOLS]},
    {"messages": [SYSTEM | {"role": "System"}, USER]},
]

LEFT_OUT = (
    *("sglang.kernels", "sglang.srt.layers", "sglang.srt.models", "sglang.srt.distributed", "sglang.srt.mem_cache"),
    *("sglang.srt.lora", "sglang.srt.configs", "sglang.srt.multimodal", "sglang.srt.model_executor"),
    *("sglang.srt.speculative", "sglang.srt.managers"),
)


class _Nothing(abc.ABCMeta):
    """A class whose every name is such a class; called with a function or a class it gives that back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __call__(cls, *given: Any, **_: Any) -> Any:
        return given[0] if given and isinstance(given[0], types.FunctionType | type) else super().__call__()

    def __bool__(cls) -> bool:
        return False

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __lt__(cls, _: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


def _schema(*_: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _nothing(name: str) -> Any:
    def call(self: Any, *given: Any, **_: Any) -> Any:
        return given[0] if given and isinstance(given[0], types.FunctionType | type) else self

    return _Nothing(
        name,
        (),
        {
            "__get_pydantic_core_schema__": classmethod(_schema),
            "__getattr__": lambda self, name: _nothing(name),
            "__call__": call,
            "__enter__": lambda self: self,
            "__exit__": lambda self, *_: None,
            "__bool__": lambda self: False,
            "__iter__": lambda self: iter(()),
            "__lt__": lambda self, _: False,
            "__gt__": lambda self, _: False,
            "__le__": lambda self, _: False,
            "__ge__": lambda self, _: False,
            "__or__": lambda self, _: self,
        },
    )


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.9.0"
        if name.startswith("__") or name == "npu":  # an empty one would be taken for hardware
            raise AttributeError(name)
        found = _nothing(name)
        setattr(self, name, found)
        return found


class LeftOut:
    """Finds every module that is left out by its name, or is not installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        if not name.startswith(self._names) and (
            root in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(root) is not None
        ):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        """It is empty."""


def all_bodies() -> list[tuple[str | None, dict[str, Any]]]:
    """Each body, and the template that it is for."""
    return bodies() + [(name, body) for name in templates() for body in CHATS]


def loader() -> Any:
    """What loads a tokenizer as SGLang does. From now on its modules can be imported."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    # Before anything is left out: these look themselves for what they could use.
    for name in ("fastapi", "pydantic", "openai", "httpx", "aiohttp", "requests", "jsonschema"):
        importlib.import_module(name)
    loaded = importlib.import_module("transformers").AutoTokenizer
    sys.meta_path.insert(0, LeftOut(LEFT_OUT))
    return loaded


def handler_of(tokenizer: Any) -> tuple[Any, Any]:
    """The class of its requests, and its handler of ``/tokenize`` for the template that the tokenizer has."""
    of = "sglang.srt.entrypoints.openai"
    serving_chat: Any = importlib.import_module(f"{of}.serving_chat")
    new_request = importlib.import_module(f"{of}.protocol").TokenizeRequest
    new_handler = importlib.import_module(f"{of}.serving_tokenize").OpenAIServingTokenize
    format_of = importlib.import_module("sglang.srt.parser.jinja_template_utils").detect_jinja_template_content_format
    serving_chat.get_serving = lambda: types.SimpleNamespace(default_chat_template_kwargs=None)
    serving_chat.get_model = lambda: types.SimpleNamespace(context_length=4096, is_multimodal=False)
    manager = types.SimpleNamespace(
        tokenizer=tokenizer,
        server_args=types.SimpleNamespace(),
        served_model_name="m",
        config_value=lambda _: None,
        model_config=types.SimpleNamespace(
            is_multimodal=False,
            context_len=4096,
            hf_config=types.SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"]),
            get_default_sampling_params=dict,
        ),
    )
    template_manager = types.SimpleNamespace(
        chat_template_name=None,
        jinja_template_content_format=format_of(tokenizer.chat_template),
        jinja_template_may_reorder_tool_results=False,
        python_chat_template=None,
        reasoning_config=None,
        force_reasoning=False,
    )
    return new_request, new_handler(manager, template_manager)


def record() -> None:
    loaded = loader()
    with tempfile.TemporaryDirectory() as path:
        model = small.directory(Path(path) / "m", template=small.CHATML)
        recorded = json.loads(of_vllm.RECORDED.read_text(encoding="utf-8"))["tokenizer"]
        (model / "tokenizer.json").write_text(json.dumps(recorded))
        config = json.loads((model / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": small.EOS}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = loaded.from_pretrained(str(model))
        cases = asyncio.run(_asked(tokenizer))
    about = {"engine": "SGLang 0.5.23", "how": __doc__, "date": today(), "tokenizer": of_vllm.RECORDED.name}
    RECORDED.write_text(json.dumps(about | {"cases": cases}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


async def _asked(tokenizer: Any) -> Sequence[dict[str, Any]]:
    cases = []
    for name, body in all_bodies():
        tokenizer.chat_template = templates()[name or "chatml"]
        new_request, handler = handler_of(tokenizer)
        try:
            request = new_request(model="m", **body)
            answer = await handler._handle_non_streaming_request(request, request, None)
            said = answer.model_dump() if hasattr(answer, "model_dump") else json.loads(answer.body)
        except ValueError as error:
            said = {"message": str(error)}
        cases.append({"template": name, "body": body, "tokenize": said})
    return cases


if __name__ == "__main__":
    record()
