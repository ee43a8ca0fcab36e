"""The published answers: handlers return them, OpenAPI describes them, and the client and the commands read them."""
