"""The files of a model that make its tokens: ``tokenizer.json``, ``tokenizer_config.json``, and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from waymark.base.errors import InvalidValue
from waymark.tokenization.prompt import ChatPrompt
from waymark.tokenization.renderers import Renderers
from waymark.tokenization.segments import SegmentMemo, Splitter
from waymark.tokenization.templates import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower exception
        raise InvalidValue(
            f"{path} cannot be read as a tokenizer: {str(error)[:200]}; put a tokenizer there, or give the model "
            "another source in WAYMARK_TOKENIZERS",
            reason="no_tokenizer",
            field="model",
        ) from None
    # Engines cut and fill prompts themselves, if at all.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def splitter_of(tokenizer: Tokenizer) -> Splitter:
    tokens, peculiar = {}, []
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if not token.content or token.normalized:
            continue  # the tokenizer looks for these in each piece, after it has normalized it
        if token.lstrip or token.rstrip or token.single_word:
            peculiar.append(token.content)
        else:
            tokens[token.content] = number
    return Splitter(tokens, peculiar, SegmentMemo.seed())


class Templates:
    """The chat templates of a model: one, or one more for requests with tools."""

    def __init__(self, default: ChatTemplate, with_tools: ChatTemplate | None) -> None:
        self._default = default
        self._with_tools = with_tools

    def of(self, prompt: ChatPrompt) -> ChatTemplate:
        return self._with_tools if prompt.tools and self._with_tools is not None else self._default


def read_templates(
    directory: Path, bytes_max: int, *, is_for_sglang: bool = False, renderers: Renderers | None = None
) -> Templates | None:
    config = _json(directory / "tokenizer_config.json")
    special: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    file = directory / "chat_template.jinja"
    found: Any = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if found is None:
        found = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
    else:
        named = {"default": found}
    made = {
        name: ChatTemplate(source, special, bytes_max=bytes_max, is_for_sglang=is_for_sglang, renderers=renderers)
        for name, source in named.items()
        if name in ("default", "tool_use") and isinstance(source, str)
    }
    return Templates(made["default"], made.get("tool_use")) if "default" in made else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # thousands of lists in each other
        raise InvalidValue(f"{path} is not JSON: {error}; mend it", reason="no_tokenizer", field="model") from None
    return found if isinstance(found, dict) else {}
