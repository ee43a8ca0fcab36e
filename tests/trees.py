"""Syntax trees of sources, parsed once in a test process: several tests read those of the whole package."""

from __future__ import annotations

import ast
from functools import cache


@cache
def tree_of(source: str) -> ast.Module:
    """The syntax tree of a source. Nobody changes it."""
    return ast.parse(source)
