"""Serves HTTP: ``httptools`` parses, asyncio has the sockets, and everything that a client can occupy is bounded.

``request_reader`` parses, ``connection`` dispatches, ``cycle`` is one request and its answer, ``limits`` bounds all
connections of a server, and ``listening`` opens the sockets. The package serves any ASGI application and does not know
its paths. uvicorn takes the sockets over, and closes them: ``uvicorn.Config(http=protocol(connections))``.
"""
