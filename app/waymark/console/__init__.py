"""The output of Waymark in a terminal.

``service`` is the connection to a Waymark that runs, for the commands that take ``--url``; ``ask``, ``select``,
``doctor``, ``drain``, ``publishers``, ``inspections`` and ``top`` are such commands, and ``prompt_flags`` reads their
prompts. They need neither Redis nor a package of the server.

``waymark status`` and ``waymark inspect`` read Redis itself, so they show the truth even if no replica runs, and they
never write. ``open_inspector`` opens Redis, ``screen`` prints (colours and boxes on a terminal, plain lines elsewhere);
``status`` gathers and ``status_view`` draws; ``prompts``, ``holding``, ``cells`` and ``why`` are ``inspect prompt``;
``lookups`` the other inspections; ``redis_cli`` the commands that show the same by hand; ``arguments`` has all flags,
and ``run_status`` and ``run_inspect`` run the commands.
"""
