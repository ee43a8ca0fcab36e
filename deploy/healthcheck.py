"""Exit 0 if the Waymark in this container answers ``/health``, else 1 and a sentence: the image's HEALTHCHECK.

It cannot know the container's role, so it asks where a query replica and where an ingest worker would answer, as the
settings say; one answer will do. Standard library only, and little of it: it starts every few seconds.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException

SECONDS = 2.0
# Listening everywhere is not an address one can ask; the ones that are.
ASKED = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def is_healthy(host: str, port: int) -> bool:
    connection = HTTPConnection(host, port, timeout=SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    given = os.environ.get("WAYMARK_HOST", "")
    address = ASKED.get(given, given)
    numbers = (os.environ.get("WAYMARK_PORT") or "13333", os.environ.get("WAYMARK_PROBE_PORT") or "0")
    ports = sorted({int(number) for number in numbers if number.isdecimal() and int(number)})
    if not any(is_healthy(address, port) for port in ports):
        sys.exit(f"nothing answers /health on {address}, port {' or '.join(map(str, ports))}")
