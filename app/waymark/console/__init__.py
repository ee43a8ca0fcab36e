"""The output of Waymark in a terminal.

``service`` is the connection to a Waymark that runs, for the commands that take ``--url``; ``ask``, ``decisions``,
``doctor``, ``drain``, ``events``, ``publishers``, ``inspections`` and ``top`` are such commands, and ``prompts`` reads
their prompts. They need neither Redis nor a package of the server.

``waymark status`` and ``waymark inspect`` ask it, too; with only a URL of Redis, ``LocalService`` calls the same
handlers in the process, so they show the truth even if no replica runs. ``screen`` prints (colours and boxes on a
terminal, plain lines elsewhere), ``views`` draws, ``arguments`` has all flags.
"""
