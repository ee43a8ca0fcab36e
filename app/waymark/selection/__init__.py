"""The decision: which target a prompt goes to, by what each has cached and what each has to do."""
