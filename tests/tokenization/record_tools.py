"""Records how engines write ``tools`` for a template: ``python -m tests.tokenization.record_tools PACKAGES``.

PACKAGES is a folder with the released packages vllm and sglang. Two classes of each are run, with nothing of the
package beside them: what ``model_dump`` gives is what the engine's ``/tokenize`` and chat API hand to a template.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any, Literal, Optional

import pydantic

_FOLDER = Path(__file__).parents[1] / "fixtures" / "tokens"
RECORDED = _FOLDER / "vllm_0.33.0_tools.json"
RECORDED_OF_SGLANG = _FOLDER / "sglang_0.5.23_tools.json"
#: The class of a function, and that of a tool, each with its file.
_OF_VLLM = {
    "FunctionDefinition": "vllm/entrypoints/generate/base/protocol.py",
    "ChatCompletionToolsParam": "vllm/entrypoints/openai/chat_completion/protocol.py",
}
_OF_SGLANG = dict.fromkeys(("Function", "Tool"), "sglang/srt/entrypoints/openai/protocol.py")

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {"function": {"name": "now", "description": "The time"}},
    {"type": "function", "function": {"parameters": _CITY, "description": "The weather", "name": "weather"}},
    {"function": {"name": "now", "description": None, "parameters": {}}, "type": "function"},
    {"type": "function", "function": {"name": "now", "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": None, "author": "me"}, "version": 2},
    {"type": "function", "function": {"name": "now"}, "defer_loading": True},
    {"type": "function", "function": {"name": "now", "defer_loading": False}, "defer_loading": True},
    {"type": "function", "function": {"name": "now", "defer_loading": True}},
]


def record(packages: Path) -> None:
    for path, engine, classes in (
        (RECORDED, "vLLM 0.33.0", _OF_VLLM),
        (RECORDED_OF_SGLANG, "SGLang 0.5.23", _OF_SGLANG),
    ):
        new_tool = _class(packages, classes)
        cases = [{"tool": tool, "shown": new_tool(**tool).model_dump()} for tool in TOOLS]
        about = {"engine": engine, "how": __doc__}
        path.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n", encoding="utf-8")


def _class(packages: Path, classes: dict[str, str]) -> Any:
    """The last of the classes."""

    class OpenAIBaseModel(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")

    names = ("BaseModel", "Field", "model_serializer", "model_validator")
    space: dict[str, Any] = {"OpenAIBaseModel": OpenAIBaseModel, "Any": Any, "Literal": Literal}
    space |= {"List": list, "Optional": Optional} | {name: getattr(pydantic, name) for name in names}
    for name, file in classes.items():
        tree = ast.parse((packages / file).read_text(encoding="utf-8"))
        (node,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        module = ast.fix_missing_locations(ast.Module([future, node], []))
        exec(compile(module, file, "exec", dont_inherit=True), space)
        space[name].model_rebuild(_types_namespace=space)
    return space[[*classes][-1]]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
