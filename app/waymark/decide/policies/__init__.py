"""Rules that order targets. Pure: no I/O, no clock, and no randomness except by arguments."""
