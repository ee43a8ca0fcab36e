"""What every room needs; it imports nothing of the other rooms."""
