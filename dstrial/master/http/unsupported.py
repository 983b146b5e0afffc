"""Error responses for requests of Determined's client that are not implemented."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from dstrial.errors import RequestError

INSTEAD = {
    "notebooks": "Run `jupyter lab` on this machine; the SDK and detached runs work from any notebook",
    "shells": "Use a shell of this machine, where trials are plain processes; `det command run` runs one with slots and a log",
}
"""First path segment -> the alternative on a single machine; the default alternative is a Determined cluster."""

_ROOT_NOUNS = ("oauth2",)
_REQUEST = re.compile(r'method="([A-Z]+)",\s*path=f?"([^"]+)"')
_PARAMETER = re.compile(r"\{\w+\}")


def refusal(method: str, path: str) -> RequestError:
    """Return 501 for a request of Determined's client without a route, 404 for others."""
    segments = [segment for segment in path.split("/") if segment]
    if segments[:2] == ["api", "v1"]:
        noun = segments[2] if len(segments) > 2 else ""
        is_known = any(known == method and pattern.fullmatch(path) for known, pattern in _client_requests())
    else:
        noun = segments[0] if segments else ""
        is_known = noun in _ROOT_NOUNS
    shown = f"{method} {path[:120]}"
    if is_known:
        instead = INSTEAD.get(noun, "Use a Determined cluster for it")
        return RequestError(
            501,
            f"{shown} is not offered by the embedded master. {instead}; the README lists what is offered.",
        )
    return RequestError(
        404, f"{shown} does not exist; expected a request of Determined 0.38.1. Check the path."
    )


def is_fixed_path(method: str, path: str) -> bool:
    """Return whether Determined's client has this path without a path parameter.

    For example, ``users/setting`` must not match a route ``users/{user_id}``.
    """
    return (method, path) in client_templates()


@functools.lru_cache(maxsize=1)
def _client_requests() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple(
        (method, re.compile("[^/]+".join(map(re.escape, _PARAMETER.split(template)))))
        for method, template in client_templates()
    )


@functools.lru_cache(maxsize=1)
def client_templates() -> frozenset[tuple[str, str]]:
    spec = importlib.util.find_spec("determined.common.api.bindings")
    assert spec is not None
    assert spec.origin is not None
    return frozenset(_REQUEST.findall(Path(spec.origin).read_text(encoding="utf-8")))
