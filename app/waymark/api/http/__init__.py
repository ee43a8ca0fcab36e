"""What HTTP needs of any API: bodies, formats, fields, access, errors and the docs page."""
