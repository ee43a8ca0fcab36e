"""The match of a prompt in the index, and why it is not longer: for people, in the shell and over HTTP."""
