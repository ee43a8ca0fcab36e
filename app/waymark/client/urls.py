"""The URLs of the replicas that a client knows. Any replica answers any request, so a failed one costs one try."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

import httpx

from waymark.base.shown import shown

#: For how long a replica that failed comes last.
_AWAY_SECONDS = 5.0
#: Answers after which another replica may do better: a proxy's, or those of a process that ends.
_ELSEWHERE = frozenset({500, 502, 503, 504})
_URL = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)


class UrlOrder:
    """URLs, in the order in which they are tried."""

    def __init__(self, urls: str | Iterable[str]) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls:
            raise ValueError("a client needs at least one URL")
        for url in self._urls:
            if not (isinstance(url, str) and _URL.match(url)):
                raise ValueError(f"url is {shown(url)}; it must be a URL such as http://127.0.0.1:13333")
        self._away: dict[str, float] = {}

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    def order(self) -> Iterator[tuple[str, bool]]:
        """Yield each URL, and whether it is the last; those that failed a moment ago come last."""
        now = time.monotonic()
        urls = sorted(self._urls, key=lambda url: self._away.get(url, 0.0) > now)
        for number, url in enumerate(urls, start=1):
            yield url, number == len(urls)

    def failed(self, url: str) -> None:
        self._away[url] = time.monotonic() + _AWAY_SECONDS

    def answered(self, url: str, answer: httpx.Response) -> bool:
        """Return whether the answer is one that no other replica would give."""
        if answer.status_code in _ELSEWHERE:
            self.failed(url)
            return False
        self._away.pop(url, None)
        return True
