"""Where a registration may point to, by globs and CIDRs."""

from __future__ import annotations

import pytest

from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue


@pytest.mark.parametrize(
    ("allowed", "endpoint"),
    [
        ([], "tcp://anywhere:1"),
        (["10.0.0.0/8"], "tcp://10.1.2.3:5557"),
        (["10.1.2.3"], "tcp://10.1.2.3:5557"),
        (["fd00::/8"], "tcp://[fd00::1]:5557"),
        (["10.0.0.0/8"], "tcp://[::ffff:10.1.2.3]:5557"),
        (["*.engines.svc"], "tcp://pod-1.engines.svc:5557"),
        (["*.Engines.svc"], "tcp://POD.engines.SVC:5557"),
        (["tcp://*:5557"], "tcp://anywhere:5557"),
        (["ipc:///run/Engines/*"], "ipc:///run/Engines/a.sock"),
        (["192.168.0.0/16", "ipc://*"], "ipc://x"),
        (["10.0.0.0/8"], "http://10.1.2.3:8000/metrics"),
        (["10.0.0.0/8"], "https://10.1.2.3"),
        (["fd00::/8"], "http://[fd00::1]/v1"),
        (["*.engines.svc"], "http://Pod-1.engines.svc:8000/a?b=c"),
        (["http://*:8000"], "http://anywhere:8000/metrics"),
        (["https://*.svc:443"], "https://a.svc/metrics"),
    ],
)
def test_allowed(allowed: list[str], endpoint: str) -> None:
    AllowedEndpoints(allowed).check(endpoint, "endpoint")


@pytest.mark.parametrize(
    ("allowed", "endpoint"),
    [
        (["10.0.0.0/8"], "tcp://11.0.0.1:5557"),
        (["10.0.0.0/8"], "tcp://10.0.0.1.evil.com:5557"),
        (["10.0.0.0/8"], "tcp://localhost:5557"),
        (["10.0.0.0/8"], "tcp://[:::::::]:5557"),
        (["10.0.0.0/8"], "tcp://10.1:5557"),
        (["10.0.0.0/8"], "ipc://10.0.0.1"),
        (["10.0.0.0/33"], "tcp://10.0.0.1:5557"),
        (["*"], "ipc:///etc/passwd"),
        (["*.engines.svc"], "tcp://engines.svc.evil.com:5557"),
        (["tcp://*:5557"], "tcp://anywhere:22"),
        (["ipc:///run/engines/*"], "ipc:///run/Engines/a.sock"),
        (["10.0.0.0/8"], "http://10.0.0.1@evil.com/"),
        (["10.0.0.0/8"], "http://evil.com/10.0.0.1"),
        (["http://*.svc:8000"], "http://evil.com/x.svc:8000"),
        (["http://*.svc:8000"], "http://evil.com?x.svc:8000"),
        (["http://*:8000"], "https://a:8000"),
        (["*"], "http://a:99999"),
    ],
)
def test_refused(allowed: list[str], endpoint: str) -> None:
    with pytest.raises(InvalidValue, match="WAYMARK_ALLOWED_ENDPOINTS") as caught:
        AllowedEndpoints(allowed).check(endpoint, "replay_endpoint")
    assert caught.value.field == "replay_endpoint"


def test_an_endpoint_that_is_absent_points_nowhere() -> None:
    AllowedEndpoints(["10.0.0.0/8"]).check(None, "endpoint")
