"""Records how vLLM writes ``tools`` for a template: ``python -m tests.tokenization.record_tools VLLM``.

VLLM is the folder of the released package. Two of its classes are run, with nothing of the package beside them: what
``model_dump`` gives is what its render server and ``/tokenize`` hand to a template.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any, Literal

import pydantic

RECORDED = Path(__file__).parents[1] / "fixtures" / "tokens" / "vllm_0.33.0_tools.json"
_CLASSES = {
    "FunctionDefinition": "entrypoints/generate/base/protocol.py",
    "ChatCompletionToolsParam": "entrypoints/openai/chat_completion/protocol.py",
}

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


def record(package: Path) -> None:
    class OpenAIBaseModel(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")

    space: dict[str, Any] = {"OpenAIBaseModel": OpenAIBaseModel, "Any": Any, "Literal": Literal}
    space |= {name: getattr(pydantic, name) for name in ("model_serializer", "model_validator")}
    for name, file in _CLASSES.items():
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        (node,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
        exec(compile(ast.Module([node], []), file, "exec", dont_inherit=True), space)
    cases = [{"tool": tool, "shown": space["ChatCompletionToolsParam"](**tool).model_dump()} for tool in TOOLS]
    about = {"engine": "vLLM 0.33.0", "how": __doc__}
    RECORDED.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
