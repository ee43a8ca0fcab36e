"""Windows of hybrid models: the blocks that a rank must have before a boundary, besides the blocks of full attention.

A layer with a sliding window needs the last blocks before the boundary, a state-space layer the state at the boundary.
An engine has a KV-cache group for each such kind of layer, and its events say which blocks of the group it has. In the
index such a group has its own holders. They count for no prefix; ``match`` finds the boundaries at which a rank can
continue.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """The blocks that a group must have before a boundary, so that a rank can continue there."""

    group: int
    """The KV-cache group."""
    tokens: int
    """The length in tokens; 1 for a state."""
    span: int
    """The number of tokens per block of the group."""

    def blocks(self, block_size: int) -> tuple[int, int]:
        """Return the window as a number of the group's blocks, and how many blocks of the prefix one of these
        covers.
        """
        span = max(self.span, block_size)
        return -(-self.tokens // span), span // block_size

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse the text that ``str`` wrote. Raise ValueError if it is not such a text."""
        group, tokens, span = map(int, text.split(":"))
        return cls(group, tokens, span)

    def __str__(self) -> str:
        return f"{self.group}:{self.tokens}:{self.span}"


class RankWindow(NamedTuple):
    """A window that a rank needs. The instance is an index into ``View.instances``."""

    instance: int
    dp_rank: int
    window: Window
