"""Text or messages of a model to the token ids that its engines would produce.

``tokenizers.Tokenizers`` is the one entry point. Whatever needs an optional package is imported when it is first used.
"""
