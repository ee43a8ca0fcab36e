"""The parts of HTTP that any API needs: bodies, formats, fields, access, errors and the docs page."""
