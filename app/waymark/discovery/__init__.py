"""Where engines come from: their own description, Kubernetes, a file; and what keeps their registrations up to date."""
