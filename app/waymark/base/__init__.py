"""Parts that every package needs; this package imports no other package of Waymark."""
