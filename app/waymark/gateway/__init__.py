"""The gateway: a reverse proxy for OpenAI's and Anthropic's APIs that sends each request to the best engine.

``application`` has the paths, ``security`` says who may call and which headers pass, ``shapes`` reads bodies and
writes errors, ``decide.requests`` decides, and ``upstream`` and ``proxy`` move the bytes. Engines come from
registrations, discovery, or ``discovery.engines``.
"""
