"""The files of a model definition, as the page shows them.

These are a list, and the text of one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from dstrial.master.backends.model_definition import list_files, read_start

MAX_FILES = 20_000
"""Most files that are listed."""
MAX_TEXT_BYTES = 2**20
"""Most bytes that are shown of one file."""

Json: TypeAlias = dict[str, Any]


def listed(tgz: bytes) -> Json:
    """Return path, size and digest of every file by path.

    ``more`` if there are more than are told.

    Raises:
        RequestError: it cannot be read.
    """
    files = list_files(tgz)
    return {
        "files": [
            {"path": file.path, "bytes": file.size, "digest": file.digest} for file in files[:MAX_FILES]
        ],
        "more": len(files) > MAX_FILES,
    }


def shown_file(tgz: bytes, path: str) -> Json:
    """Return the text of a file, its beginning if it is long; no text if it is none.

    Raises:
        RequestError: as for ``read_start``.
    """
    content, size = read_start(tgz, path, MAX_TEXT_BYTES)
    is_binary = b"\0" in content
    text = "" if is_binary else content.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "text": text, "isBinary": is_binary, "isCut": size > len(content)}
