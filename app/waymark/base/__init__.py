"""Parts that every room needs; it imports no other room."""
