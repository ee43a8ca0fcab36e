"""Waymark: an index in Redis of which engine already holds a prompt's KV cache."""

__version__ = "0.1.0"
