"""The index's view of a prompt, and the reasons why it is no longer: for people, in the shell and over HTTP."""
