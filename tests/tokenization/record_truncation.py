"""Records how vLLM cuts prompts: ``PYTHON -m tests.tokenization.record_truncation PACKAGES`` writes a file of ids.

PYTHON is that of an environment with transformers, and PACKAGES a folder with the released package vllm. Its class of
tokenization parameters is run, with nothing of the package beside it, on a tokenizer that cuts from the left, as
vLLM opens it for models that generate: the same calls that its renderer makes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

from tests.tokenization import record as of_vllm
from tests.tokenization import small

RECORDED = of_vllm.RECORDED.with_name("vllm_0.33.0_truncation.json")
TEXT = "The quick brown fox"
CHAT = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"

#: What is asked: the text that is encoded, and the fields of the request.
CASES: list[dict[str, Any]] = [
    {"text": text, "add_special_tokens": adds, "truncate_prompt_tokens": keep, "truncation_side": side}
    for text, adds in ((TEXT, True), (TEXT, False), (CHAT, False))
    for keep in (-1, 0, 1, 2, 7, 1000)
    for side in (None, "left", "right")
]


def record(packages: Path) -> None:
    new_tokenizer: Any = importlib.import_module("transformers").PreTrainedTokenizerFast
    new_params = _params(packages)
    with tempfile.TemporaryDirectory() as path:
        model = small.directory(Path(path) / "m", template=small.CHATML)
        tokenizer_json = json.loads(of_vllm.RECORDED.read_text(encoding="utf-8"))["tokenizer"]
        (model / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        tokenizer = new_tokenizer(
            tokenizer_file=str(model / "tokenizer.json"), bos_token=small.BOS, truncation_side="left"
        )
    tokenizer.max_chars_per_token = 64
    cases = [case | {"ids": _cut(new_params, tokenizer, case)} for case in CASES]
    about = {"engine": "vLLM 0.33.0", "how": __doc__, "tokenizer": of_vllm.RECORDED.name}
    text = ",\n".join(json.dumps(case) for case in cases)
    RECORDED.write_text(json.dumps(about)[:-1] + f',\n"cases": [\n{text}\n]}}\n', encoding="utf-8")


def _cut(new_params: Any, tokenizer: Any, case: dict[str, Any]) -> Any:
    fields = {name: value for name, value in case.items() if name != "text"}
    try:
        params = new_params(max_total_tokens=4096, max_output_tokens=16, **fields)
        prompt = params.apply_pre_tokenization(tokenizer, {"prompt": case["text"]})
        ids = tokenizer(prompt["prompt"], **params.get_encode_kwargs())["input_ids"]
        return params.apply_post_tokenization(tokenizer, {"prompt_token_ids": ids})["prompt_token_ids"]
    except Exception as error:  # whatever it raises, the request is refused
        return str(error)


def _params(packages: Path) -> Any:
    source = (packages / "vllm/renderers/params.py").read_text(encoding="utf-8")
    names = ("TokenizeParams", "_PARALLEL_TO_PROMPT_TOKENS")
    nodes = [
        node
        for node in ast.parse(source).body
        if getattr(node, "name", None) in names
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names)
    ]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    space: dict[str, Any] = {"__name__": __name__, "VLLMValidationError": ValueError}
    space |= {"dataclass": dataclasses.dataclass, "field": dataclasses.field}
    space |= {"cast": typing.cast, "overload": typing.overload}
    module = ast.fix_missing_locations(ast.Module([future, *nodes], []))
    exec(compile(module, "params.py", "exec", dont_inherit=True), space)
    return space["TokenizeParams"]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
