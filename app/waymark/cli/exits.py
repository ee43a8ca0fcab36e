"""How a command ends."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_PORT = 3
EXIT_NO_REDIS = 4
EXIT_NO_SERVICE = 5
EXIT_INTERRUPTED = 130
"""As shells count it: 128 and the number of SIGINT."""

MEANINGS = {
    EXIT_OK: "the command succeeded",
    EXIT_FAILED: "the command failed, or found nothing",
    EXIT_USAGE: "an argument or a setting is wrong, and nothing was started",
    EXIT_NO_PORT: "the port could not be opened",
    EXIT_NO_REDIS: "a command that asks Redis itself: Redis cannot be reached, does not answer in time, or refuses the "
    "command. If a running Waymark lacks its Redis, it says so, and the code is 1",
    EXIT_NO_SERVICE: "no Waymark answers at the URL",
    EXIT_INTERRUPTED: "Ctrl-C ended the command",
}
