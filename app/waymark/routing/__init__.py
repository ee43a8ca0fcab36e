"""The decision: who takes a prompt. Pure: no I/O, no clock, no randomness but what is passed in."""
