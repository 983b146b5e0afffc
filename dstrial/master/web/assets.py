"""Static files of the web page: modules, styles and vendored libraries."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.http.router import PUBLIC, ApiRequest, route

STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
LIBRARIES = ("preact.js", "uplot.js", "uplot.css")  # installed into ``vendor/`` by `tools/page_libraries.sh`
MISSING = (
    "This installation of dstrial was made without the libraries of its page. In a checkout, `make venv` fetches them "
    "(tools/page_libraries.sh); a wheel that was built afterwards has them. The `det` command works without."
)
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def are_there() -> bool:
    return all((VENDOR / name).is_file() for name in LIBRARIES)


def names() -> list[str]:
    """Return the URL paths of all static files."""
    own = (path.relative_to(STATIC) for path in STATIC.rglob("*") if path.suffix in _TYPES)
    return sorted(str(path) for path in own) + [f"vendor/{name}" for name in LIBRARIES]


def _read(name: str) -> tuple[bytes, str] | None:
    """Return a static file's content and media type; None if there is no such file."""
    directory = VENDOR if name.startswith("vendor/") else STATIC
    try:
        path = (directory / name.removeprefix("vendor/")).resolve()
        if path.is_relative_to(directory.resolve()) and path.suffix in _TYPES:
            return path.read_bytes(), _TYPES[path.suffix]
    except (OSError, ValueError):
        pass
    return None


async def get_asset(request: ApiRequest) -> Response:
    """Serve a static file with an ETag; browsers revalidate it each time."""
    name = "/".join(str(part) for part in request.path_params.values())
    found = await request.services.run(functools.partial(_read, name))
    if found is None:
        raise RequestError(404, f"{name!r} is no file of the page; expected one that it names.")
    content, media_type = found
    headers = {
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


_DEPTH = 3
routes = [
    route(
        "GET",
        "//page/assets" + "".join(f"/{{part_{idx}}}" for idx in range(depth)),
        get_asset,
        access=PUBLIC,
    )
    for depth in range(1, _DEPTH + 1)
]
