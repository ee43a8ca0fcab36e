"""The gateway: a reverse proxy for OpenAI's and Anthropic's APIs that sends each request to the engine it is best at.

``application`` has the paths, ``security`` says who may call and which headers pass, ``bodies`` reads them,
``selection.requests`` decides, ``upstream`` and ``proxy`` move the bytes, ``shapes`` is how errors look. Engines come
from registrations, discovery, or ``engines``.
"""
