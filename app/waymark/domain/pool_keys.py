"""The keys of a prompt's blocks in an object store, computed from its tokens without any event.

Engines put each block under keys that contain its hash: SHA-256 over the hash of the block before it and the tokens. A
form is a list of such keys, with a placeholder for the hash. The placeholder names the way of hashing:

- ``{page}``: SGLang. Its hash covers neither adapter nor salt, so prompts with either are not looked up.
- ``{sha256}``, ``{sha256_cbor}``: vLLM with this ``--prefix-caching-hash-algo``. ``{sha256:7}`` is for engines that
  were started with ``PYTHONHASHSEED=7``. The salt of a prompt is part of the hash of its first block.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from waymark.domain.hashing import namespace

_TOKEN_BYTES = 4
#: vLLM hashes this as the parent of the first block, unless PYTHONHASHSEED is set.
_VLLM_SEED = "vllm-none-hash"
_PAGE = "page"
_PLACEHOLDER = re.compile(r"\{(page|sha256|sha256_cbor)(?::([0-9]{1,10}))?\}", re.ASCII)
_TEXT = re.compile(r"[!-+\--~]+(?:,[!-+\--~]+)*", re.ASCII)

FORMS_MAX = 16
FORMS_CHARACTERS_MAX = 8192
_KEY_CHARACTERS_MAX = 256
#: The most keys in one request to a master. A key has about 70 to 150 characters.
KEYS_MAX = 512
FORMS = (
    f"a list of at most {FORMS_MAX} texts, at most {FORMS_CHARACTERS_MAX} characters in all, each of keys with commas "
    "between them; a key has one placeholder, the same in all: {page}, {sha256} or {sha256_cbor}"
)
"""What ``are_forms`` requires, in the words of an error."""


class PromptIds(NamedTuple):
    """The token ids of a prompt without images."""

    tokens: bytes
    """Little-endian u32."""
    space: int
    """The namespace of its adapter and its salts."""


class AskedPrompt(NamedTuple):
    """A prompt whose blocks are looked up in a store."""

    ids: PromptIds
    block_size: int
    model: str
    salt: str | None = None

    @property
    def blocks(self) -> int:
        return len(self.ids.tokens) // (_TOKEN_BYTES * self.block_size)


class KeyForms(NamedTuple):
    """The forms of a block's keys. The store has the block if it has all keys of one form."""

    scheme: str
    seed: str
    forms: tuple[tuple[str, ...], ...]
    """For each form, its keys, with ``{}`` for the hash."""

    @property
    def size(self) -> int:
        """The number of keys of a block."""
        return sum(map(len, self.forms))

    def keys(self, block_hash: str) -> list[list[str]]:
        """Return the keys of a block, by form."""
        return [[key.replace("{}", block_hash) for key in form] for form in self.forms]

    def can_name(self, prompt: AskedPrompt) -> bool:
        """Return whether the engine's hashes of the prompt's blocks can be computed, and identify its namespace."""
        return prompt.ids.space == namespace(None, [prompt.salt] if prompt.salt and self.scheme != _PAGE else [])

    def hashes(self, prompt: AskedPrompt) -> Iterator[str]:
        """Yield the hash of each complete block, as hex digits."""
        if self.scheme == _PAGE:
            return page_hashes(prompt.ids.tokens, prompt.block_size)
        return _vllm_hashes(prompt, self.scheme, self.seed)


def are_forms(texts: Sequence[str]) -> bool:
    """Return whether a registration may have the forms."""
    return (
        len(texts) <= FORMS_MAX and sum(map(len, texts)) <= FORMS_CHARACTERS_MAX and key_forms(tuple(texts)) is not None
    )


@lru_cache(maxsize=64)
def key_forms(texts: tuple[str, ...]) -> KeyForms | None:
    """Read forms; None if they cannot be read, or if a block has more keys than fit into a request."""
    schemes: set[tuple[str, str]] = set()
    forms = []
    for text in texts:
        if not _TEXT.fullmatch(text):
            return None
        keys = text.split(",")
        for key in keys:
            fields = _PLACEHOLDER.findall(key)
            rest = _PLACEHOLDER.sub("", key)
            if len(fields) != 1 or "{" in rest or "}" in rest or len(key) > _KEY_CHARACTERS_MAX:
                return None
            schemes.add(fields[0])
        forms.append(tuple(_PLACEHOLDER.sub("{}", key) for key in keys))
    if len(schemes) != 1:
        return None
    ((scheme, seed),) = schemes
    parsed = KeyForms(scheme, seed, tuple(forms))
    is_seeded_page = scheme == _PAGE and seed
    return None if is_seeded_page or parsed.size > KEYS_MAX else parsed


def sglang_forms(model: str, parts: int, tag: str = "") -> tuple[str, ...]:
    """Return the forms of SGLang's keys. Newer releases put the model before the key, and ``extra_backend_tag`` before
    the model.

    ``parts`` is the number of objects that make up a page: one with latent attention, otherwise keys and values of each
    rank. If it is unknown (0), either of the two objects of the first rank is enough.
    """
    names = ["_".join(filter(None, (tag, model.replace("/", "-")))), tag]
    starts = [name and f"{name}_" for name in names if _TEXT.fullmatch(name or "x") and not set(",{}") & set(name)]
    if parts == 0:
        return tuple(f"{start}{{page}}_{end}" for start in starts for end in ("0_k", "_k"))
    ends = ["_k"] if parts == 1 else [f"{rank}_{half}" for rank in range(parts // 2) for half in "kv"]
    return tuple(",".join(f"{start}{{page}}_{end}" for end in ends) for start in starts)


def page_hashes(tokens: bytes, block_size: int) -> Iterator[str]:
    """Yield the hashes by which SGLang names the pages of a prompt, as hex digits."""
    step, digest = _TOKEN_BYTES * block_size, b""
    for start in range(0, len(tokens) - step + 1, step):
        digest = sha256(digest + tokens[start : start + step]).digest()
        yield digest.hex()


def _vllm_hashes(prompt: AskedPrompt, scheme: str, seed: str) -> Iterator[str]:
    packed = _pickled if scheme == "sha256" else _cbor
    ids = array("I", prompt.ids.tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    size = prompt.block_size
    digest = sha256(packed(seed or _VLLM_SEED)).digest()
    more = (("cache_salt", prompt.salt),) if prompt.salt else None
    for start in range(0, len(ids) - size + 1, size):
        digest = sha256(packed((digest, tuple(ids[start : start + size]), more))).digest()
        more = None
        yield digest.hex()


def _pickled(value: Any) -> bytes:
    import pickle  # few pools need it

    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    """Encode a value as CBOR in its shortest form, which is what vLLM hashes."""
    match value:
        case None:
            return b"\xf6"
        case bytes():
            return _head(0x40, len(value)) + value
        case str():
            text = value.encode()
            return _head(0x60, len(text)) + text
    parts = map(_number if value and isinstance(value[0], int) else _cbor, value)
    return _head(0x80, len(value)) + b"".join(parts)


#: Most tokens of a prompt are common ones; a miss takes four times as long.
@lru_cache(maxsize=2**15)
def _number(number: int) -> bytes:
    return _head(0x00, number)


def _head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes((kind | number,))
    if number < 2**8:
        return bytes((kind | 24, number))
    if number < 2**16:
        return struct.pack(">BH", kind | 25, number)
    return struct.pack(">BI", kind | 26, number)
