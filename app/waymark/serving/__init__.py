"""The only package that talks HTTP: ``httptools`` parses, asyncio carries, and everything a client can hold is bounded.

``connection`` parses and dispatches, ``cycle`` is one request and its answer, ``limits`` holds all connections of a
server within its bounds. An ASGI application is served; which paths it has is not known here. uvicorn opens the
sockets and ends them: ``uvicorn.Config(http=protocol(connections))``.
"""
