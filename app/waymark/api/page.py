"""``GET /ui``: the page of a replica, written by us and served as it is.

The files are independent of the installation, so every client may load them. Their contents come from the other paths,
which check the token. The content security policy lets the page load nothing from elsewhere, run no inline script, and
be in no frame.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import NotFound
from waymark.base.shown import shown

_FOLDER: Final = Path(__file__).parent / "ui"
_MEDIA_TYPES: Final = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8"}
_HTML: Final = b"text/html; charset=utf-8"

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """Handlers of ``/``, ``/ui`` and the files of the page, which are read once."""

    def __init__(self, *, is_shown: bool) -> None:
        """``is_shown=False``: there is no page."""
        self._index = (_FOLDER / "index.html").read_bytes() if is_shown else b""
        self._files = {
            path.name: (path.read_bytes(), _MEDIA_TYPES[path.suffix])
            for path in (sorted(_FOLDER.iterdir()) if is_shown else ())
            if path.suffix in _MEDIA_TYPES
        }

    async def index(self, _: Body) -> Answer:
        if not self._index:
            raise NotFound("this Waymark shows no page; set WAYMARK_UI to true")
        return Answer(self._index, media_type=_HTML, headers=dict(HEADERS))

    async def file(self, body: Body) -> Answer:
        name = body.path["name"]
        page_file = self._files.get(name)
        if page_file is None:
            raise NotFound(f"the page has no file {shown(name)}")
        return Answer(page_file[0], media_type=page_file[1], headers=dict(HEADERS))

    async def root(self, _: Body) -> Answer:
        """Redirect to the page."""
        return Answer(b"", 307, {"Location": "ui"})
