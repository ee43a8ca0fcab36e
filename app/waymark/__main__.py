"""``python -m waymark`` and the ``waymark`` command. It has a handler of SIGTERM before it imports anything else.

The kernel discards a SIGTERM without a handler if it is for process 1 of a container. The imports of a role take up to
some seconds, so a container that is stopped meanwhile would be killed after its grace period.
"""

import os
import signal
import sys

if os.getpid() == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

# pydantic would look for plugins of its own in the metadata of all installed packages, which takes a twentieth of the
# time to a replica's first answer. An empty variable lets it look.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from waymark.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
