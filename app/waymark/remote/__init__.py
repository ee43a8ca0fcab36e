"""What a person does with a Waymark that runs, over its HTTP API: the commands that take ``--url``.

``service`` is the connection, ``prompts`` makes token ids of what was typed; each other module is a command. They need
neither Redis nor a package of the server.
"""
