"""``waymark.asgi:app``: a query replica for any ASGI server, such as ``uvicorn waymark.asgi:app``."""

from waymark.runtime.asgi import app

__all__ = ["app"]
