"""Serves HTTP: ``httptools`` parses, asyncio has the sockets, and everything that a client can occupy is bounded.

``connection`` parses and dispatches, ``heads`` checks heads, ``cycle`` is one request and its answer, and ``limits``
bounds all connections of a server. The package serves any ASGI application and does not know its paths. uvicorn opens
and closes the listening sockets: ``uvicorn.Config(http=protocol(connections))``.
"""
