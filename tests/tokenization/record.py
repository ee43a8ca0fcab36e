"""Records what vLLM makes of prompts: ``python -m tests.tokenization.record VLLM`` writes ``tests/fixtures/tokens``.

VLLM is the ``vllm`` command of an environment with vLLM and a CPU build of torch; no GPU is needed, since its render
server (``vllm launch render``) does everything but compute. ``CASES`` are asked of it, with a small tokenizer and the
templates of ``tests/fixtures/templates``; the answers are kept as they came.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from tests.patience import patient
from tests.tokenization import small

RECORDED = Path(__file__).parents[1] / "fixtures" / "tokens" / "vllm_0.33.0.json"
_STARTS_WITHIN = 300

#: As small as a configuration may be; nothing is computed with it.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}

USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "Be brief. "}
PARTS = {"role": "user", "content": [{"type": "text", "text": "été"}, {"type": "text", "text": " 中文\n"}]}
ANSWER = {"role": "assistant", "content": "It is sunny, 21 degrees."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "21"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

#: Bodies of ``/tokenize``.
TEXTS: list[dict[str, Any]] = [
    {"prompt": "Hello, world!"},
    {"prompt": "Hello, world!", "add_special_tokens": False},
    {"prompt": ""},
    {"prompt": " two  blanks\n\n\tnew 🙂 e\u0301"},
    {"prompt": f"{small.BOS}Hello<|im_end|> x <|im_start|>y"},
    {"prompt": f"{small.BOS}Hello", "add_special_tokens": False},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER]},
    {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    {"messages": [USER], "add_special_tokens": True},
    {"messages": [PARTS]},
    {"messages": [USER, ANSWER, PARTS]},
    {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [USER, CALL, RESULT, ANSWER, USER], "tools": TOOLS},
    {"messages": [SYSTEM, USER], "tools": TOOLS},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
]


def today() -> str:
    """Some templates write it."""
    return datetime.now().date().isoformat()


def templates() -> dict[str, str]:
    """Chat templates by name."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(small.TEMPLATES.glob("*.jinja"))}
    return {"chatml": small.CHATML} | found


def bodies() -> list[tuple[str | None, dict[str, Any]]]:
    """Each body, and the template that it is for."""
    return [(None, body) for body in TEXTS] + [(name, body) for name in templates() for body in CHATS]


def record(vllm: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        model = small.directory(Path(path) / "m", template=small.CHATML)
        (model / "config.json").write_text(json.dumps(_CONFIG))
        config = json.loads((model / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": small.EOS}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [vllm, "launch", "render", str(model), "--served-model-name", "m", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--trust-request-chat-template"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
        with subprocess.Popen(command, env=environment) as server:
            try:
                cases = _asked(f"http://127.0.0.1:{port}", server)
            finally:
                server.terminate()
    RECORDED.parent.mkdir(exist_ok=True)
    tokenizer = json.loads(small.trained("byte-level"))
    about = {"engine": "vLLM 0.33.0", "how": __doc__, "date": today(), "tokenizer": tokenizer}
    RECORDED.write_text(json.dumps(about | {"cases": cases}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _asked(url: str, server: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    until = time.monotonic() + _STARTS_WITHIN
    with httpx.Client(base_url=url, timeout=patient(60)) as client:
        while True:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit("the render server has not started; its output says why")
            try:
                client.get("/health")
                break
            except httpx.TransportError:
                time.sleep(1)
        cases = []
        for name, body in bodies():
            sent = body | {"model": "m"} | ({} if name is None else {"chat_template": templates()[name]})
            tokenized = client.post("/tokenize", json=sent)
            case = {"template": name, "body": body, "status": tokenized.status_code, "tokenize": tokenized.json()}
            path = "/v1/completions/render" if "prompt" in body else "/v1/chat/completions/render"
            rendered = client.post(path, json=sent)
            answer = rendered.json()
            one = answer[0] if isinstance(answer, list) else answer
            case["render"] = {"status": rendered.status_code} | {name: one.get(name) for name in ("token_ids", "error")}
            cases.append(case)
        return cases


if __name__ == "__main__":
    record(sys.argv[1])
