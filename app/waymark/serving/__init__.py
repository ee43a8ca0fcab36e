"""The only package that talks HTTP: uvicorn's protocol, bounded, and with less between a request and its answer."""
