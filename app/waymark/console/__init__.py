"""What an operator looks at from a shell: ``waymark status`` and ``waymark inspect``.

It reads Redis itself, so it shows the truth even if no replica runs, and it never writes. ``open_inspector`` opens
Redis, ``screen`` is where text goes (colours and boxes on a terminal, plain lines elsewhere); ``status`` gathers and
``status_view`` draws; ``prompts``, ``holding``, ``cells`` and ``why`` are ``inspect prompt``; ``lookups`` the other
inspections; ``redis_cli`` the commands that show the same by hand; ``arguments`` the flags of all of it, and
``run_status`` and ``run_inspect`` what they do.
"""
