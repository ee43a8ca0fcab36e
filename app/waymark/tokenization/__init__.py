"""Turns text or messages for a model into the token ids that its engines would produce.

``tokenizers.Tokenizers`` is the one entry point. Whatever needs an optional package is imported when it is first used.
"""
