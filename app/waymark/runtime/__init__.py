"""One module for each role: it connects the parts of a process, and adds no logic."""
