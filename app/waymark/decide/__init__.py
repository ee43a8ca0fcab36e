"""The decision: which target a prompt goes to, by what each has cached and what each has to do.

``policies`` has the rules: presets, scorers, filters, pickers, and the file that combines them.
"""
