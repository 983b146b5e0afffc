"""The files of the page: our modules and style, and the libraries beside them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.http.router import PUBLIC, ApiRequest, route

STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
LIBRARIES = ("preact.js", "uplot.js", "uplot.css")  # What `tools/page_libraries.sh` puts into ``vendor/``
MISSING = (
    "This installation of dstrial was made without the libraries of its page. In a checkout, `make venv` fetches them "
    "(tools/page_libraries.sh); a wheel that was built afterwards has them. The `det` command works without."
)

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def are_there() -> bool:
    return all((VENDOR / name).is_file() for name in LIBRARIES)


def names() -> list[str]:
    """Return the paths of all files of the page, as the page asks for them."""
    own = (path.relative_to(STATIC) for path in STATIC.rglob("*") if path.suffix in _TYPES)
    return sorted(str(path) for path in own) + [f"vendor/{name}" for name in LIBRARIES]


# What `names` said last: a page asks for dozens of files, and to list them takes longer than to read one.
_names: frozenset[str] = frozenset()


def find(name: str) -> Asset | None:
    global _names
    if name not in _names:
        _names = frozenset(names())
    if name not in _names:
        return None
    path = VENDOR / name.removeprefix("vendor/") if name.startswith("vendor/") else STATIC / name
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=128)
def _read(path: Path, _mtime_ns: int) -> Asset:
    content = path.read_bytes()
    return Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


async def get_asset(request: ApiRequest) -> Response:
    """Answer with a file; the browser asks each time whether it has changed."""
    name = "/".join(str(part) for part in request.path_params.values())
    asset = await request.services.run(functools.partial(find, name))
    if asset is None:
        raise RequestError(404, f"{name!r} is no file of the page; expected one that it names.")
    headers = {
        "ETag": asset.etag,
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


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
