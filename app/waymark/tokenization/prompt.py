"""Prompts before they have tokens, and the interface of a source of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, Protocol, TypeAlias

from waymark.base.record import record
from waymark.chat.requests import Truncation
from waymark.domain.multimodal import PromptItems


@record(frozen=True, slots=True)
class TextPrompt:
    """A text, as the completion form of an engine takes it."""

    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as the BOS of the model."""
    truncation: Truncation | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """All fields, as plain values."""
        return self.text, self.add_special_tokens, _plain(self.truncation)


@record(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI's form, as it came: it has not been checked."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens; mostly the template writes them itself."""
    system: Any = None
    """A text or a list of blocks that stands before the messages, as in Anthropic's form."""
    truncation: Truncation | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """All fields, as plain values."""
        return (
            self.messages,
            self.system,
            self.tools,
            dict(self.template_kwargs),
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
            _plain(self.truncation),
        )


Prompt: TypeAlias = TextPrompt | ChatPrompt


def is_cut(prompt: Prompt) -> bool:
    """Return whether ids of the prompt may be removed."""
    return prompt.truncation is not None and prompt.truncation.keep >= 0


def _plain(truncation: Truncation | None) -> tuple[Any, ...] | None:
    return None if truncation is None else tuple(truncation)


class TokenizedPrompt(NamedTuple):
    """The ids of a prompt as little-endian u32, and the images and other items among them."""

    ids: bytes
    items: PromptItems = ()


class SourcedTokens(NamedTuple):
    """The tokens of a prompt, and the kind of their source: ``local`` or ``remote``."""

    ids: bytes
    source: str
    items: PromptItems = ()


class Forgetful:
    """The part of a source that remembers no tokens: it may come back with another tokenizer."""

    def key(self, prompt: Prompt) -> bytes | None:
        """Return None: nothing determines the tokens for long."""

    def known(self, key: bytes) -> TokenizedPrompt | None:
        """Return None: answers are not remembered."""


class Source(Protocol):
    """The source of the tokens of one model.

    A prompt that does not fit raises ``InvalidValue``, a source that cannot answer ``TokenizerUnavailable``.
    """

    kind: str
    name: str
    """The URL of the source, for a sentence."""
    encodes_whole: bool
    """Each text costs all of its tokens again, because its pieces cannot be encoded one by one."""

    def key(self, prompt: Prompt) -> bytes | None:
        """Return a key for everything that determines the tokens; None if the source does not know it, or it costs too
        much.
        """

    def known(self, key: bytes) -> TokenizedPrompt | None:
        """Return the remembered tokens of a prompt, by its key."""

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the tokens of a prompt; ``key`` is its key, if the caller has it already."""

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    async def close(self) -> None:
        """Release its resources."""
