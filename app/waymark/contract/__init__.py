"""The published answers: what handlers return, what OpenAPI describes, and what the client and the commands read."""
