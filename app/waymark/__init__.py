"""Waymark: which engine already holds a prompt's KV cache, kept in Redis."""

__version__ = "0.1.0"
