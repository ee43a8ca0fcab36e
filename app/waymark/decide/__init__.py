"""The decision: the target of a prompt, by the cache and the load of each.

``policies`` has the rules: presets, scorers, filters, pickers, and the file that combines them.
"""
