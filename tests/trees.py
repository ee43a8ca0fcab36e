"""Syntax trees of sources, parsed once per test process, because several tests read those of the whole package."""

from __future__ import annotations

import ast
from functools import cache


@cache
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree of a source. Callers must not change it."""
    return ast.parse(source)
