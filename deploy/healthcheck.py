"""The image's HEALTHCHECK: exits with 0 if the Waymark in this container answers ``/health``, else with 1 and a
sentence.

It does not know the role of the container, so it tries the ports on which a query replica and an ingest worker would
answer, according to the settings; one answer is enough. It imports only a little of the standard library, because it
starts every few seconds.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException

SECONDS = 2.0
# Addresses that mean "listen everywhere" -> an address to which a request can be sent.
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
