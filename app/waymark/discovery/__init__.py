"""Sources of engines: their own description, Kubernetes, a file; and the tasks that keep their registrations up to
date.
"""
