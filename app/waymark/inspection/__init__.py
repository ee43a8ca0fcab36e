"""What the index has of a prompt, and why it has no more: for people, in the shell and over HTTP."""
