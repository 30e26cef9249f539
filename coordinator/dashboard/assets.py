"""What the page loads besides data: its own files, and plotly.js; routed by ``dashboard.app``.

plotly.js comes out of the installed ``plotly`` package, so that a hub without internet access has
its charts and no viewer's browser asks a third party for anything.
"""

import gzip
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from plotly.offline import get_plotlyjs
from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
"""Directory of the page's own files."""

_STYLE_GUARD = re.compile(rb'if\(!document\.getElementById\("[0-9a-f]{64}"\)\)')
"""Where plotly.js asks whether its map library's sheet was added before.

Answering yes keeps it from adding an inline sheet, which the content security policy would refuse
with an error in the console. No chart here is a map.
"""


class Script(NamedTuple):
    """A script in both codings and the tags that name its contents."""

    plain: bytes
    gzipped: bytes
    etag: str


@cache
def plotly_script() -> Script:
    """plotly.js, read and compressed once for the life of the process."""
    plain = _STYLE_GUARD.sub(b"if(false)", get_plotlyjs().encode())
    return Script(plain, gzip.compress(plain, 6, mtime=0), hashlib.sha256(plain).hexdigest()[:32])


def plotly(request: Request) -> Response:
    """Answer with plotly.js; 304 when the browser holds this very build."""
    script = plotly_script()
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    # The two codings are different bytes, and a strong tag may name only one of them.
    etag = f'"{script.etag}-gzip"' if zipped else f'"{script.etag}"'
    headers = {"etag": etag, "cache-control": "public, max-age=86400", "vary": "accept-encoding"}
    known = request.headers.get("if-none-match", "")
    if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    if zipped:
        headers["content-encoding"] = "gzip"
    body = script.gzipped if zipped else script.plain
    return Response(body, media_type="text/javascript", headers=headers)
