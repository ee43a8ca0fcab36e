"""Small tokenizers, trained here, of each kind that models have, and the directories they come in."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Kind = Literal["byte-level", "metaspace", "metaspace-first", "wordpiece", "unigram"]
KINDS: tuple[Kind, ...] = get_args(Kind)

BOS, EOS = "<|begin|>", "<|end|>"
SPECIAL = [BOS, EOS, "<|im_start|>", "<|im_end|>", "<|im", "[UNK]"]

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"

_CORPUS = [
    "The quick brown fox jumps over the lazy dog and does not look back.",
    "user assistant system What is the weather in Paris today? It is sunny, 21 degrees.",
    "été naïve façade 中文字 тест 🙂 don't can't won't 12345 3.14159 { } [ ] ( ) \" ' `",
    "def main():\n    return 1\n\n\nfor x in range(10):\n\tprint(x)\n",
]


@cache
def trained(kind: Kind) -> str:
    """A tokenizer of this kind as the text of its ``tokenizer.json``."""
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind.startswith("metaspace"):
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        scheme = "first" if kind == "metaspace-first" else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL)
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
        )
    trainer.show_progress = False
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return str(tokenizer.to_str())


def tokenizer(kind: Kind = "byte-level") -> Tokenizer:
    return Tokenizer.from_str(trained(kind))


def directory(
    path: Path, kind: Kind = "byte-level", *, template: str | None = None, added: tuple[AddedToken, ...] = ()
) -> Path:
    """``path`` with the files of a model: its tokenizer, its configuration, and a chat template where one is given."""
    path.mkdir(parents=True, exist_ok=True)
    made = tokenizer(kind)
    made.add_tokens(list(added))
    made.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
