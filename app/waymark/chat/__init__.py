"""The contents of a chat request, as far as routing needs them. Pure."""
