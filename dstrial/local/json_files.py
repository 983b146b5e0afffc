"""JSON files that survive a killed process: atomic documents, append-only lines.

All files are strict JSON. NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``;
``metric_number`` reads them back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.errors import DstrialError, TrialContractError
from dstrial.file_writes import replace_file


def to_strict_json(value: Any, where: str) -> Any:
    """Convert a value to strict JSON: dict, list, str, int, float, bool and None.

    Args:
        value: numbers, strings, None, mappings, sequences, NumPy scalars and arrays, CPU tensors, in any nesting; not mutated.
        where: the value's name in an error, for example ``metrics['loss']``.

    Raises:
        TrialContractError: the value contains an object without a JSON form.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _strict_float(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_strict_json(item, f"{where}[{item_idx}]") for item_idx, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return to_strict_json(value.tolist(), where)
    raise TrialContractError(
        f"{where} is {value!r} of type {type(value).__name__}; expected a number, a string, an array, or a "
        "list or dict of these. Convert it before you report it."
    )


def _strict_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def metric_number(value: Any) -> float | None:
    """Return a metric from a JSON file as a float; None if it is not a number.

    The strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` are numbers.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


def write_json_atomically(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write a JSON document atomically; with ``sync``, flush the file to disk."""
    text = json.dumps(to_strict_json(value, path.name), indent=2, allow_nan=False) + "\n"
    replace_file(path, text, sync=sync)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if the file does not exist.

    Raises:
        DstrialError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DstrialError(
            f"{path} is not JSON ({error}); expected a document written by dstrial. Restore the file or remove it."
        ) from error


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row to a file of JSON lines with a single write.

    If the write fails, the written part of the row is removed. If the process is killed during the write, a later call of
    ``repair_json_lines`` removes the part.

    Raises:
        OSError: the row could not be written completely.
    """
    line = (json.dumps(to_strict_json(row, path.name), allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size_before_bytes = os.fstat(descriptor).st_size
        try:
            num_written = 0
            while num_written < len(line):
                num_written += os.write(descriptor, line[num_written:])
        except OSError as error:
            os.ftruncate(descriptor, size_before_bytes)
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def repair_json_lines(path: Path) -> bool:
    """Repair a last line without line break; return whether the file was changed.

    If the line is a complete JSON object, a line break is appended; otherwise the line is removed. False without a file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if not content or content.endswith(b"\n"):
        return False
    start = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _object_of(content[start:]) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)
        file.flush()
        os.fsync(file.fileno())
    return True


def read_json_lines(path: Path, *, containing: bytes = b"") -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; [] if the file does not exist.

    Only lines with the bytes ``containing`` are parsed. A last line without line break, which may be incomplete, is left out.

    Raises:
        DstrialError: a complete line is no JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for line_idx, line in enumerate(content.split(b"\n")[:-1]):
        if containing not in line:
            continue
        row = _object_of(line)
        if row is None:
            shown = line[:60].decode(errors="replace")
            raise DstrialError(
                f"{path}:{line_idx + 1} is {shown!r}; expected a JSON object. Remove the line to go on."
            )
        rows.append(row)
    return rows


class JsonLinesTail:
    """Reads new rows of a growing file of JSON lines, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0
        self._inode: int | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call; all rows if the file was replaced.

        Lines that are no JSON object are left out.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset_bytes:
                    self._offset_bytes, self._inode = 0, status.st_ino
                file.seek(self._offset_bytes)
                content = file.read()
        except FileNotFoundError:
            return []
        end = content.rfind(b"\n") + 1
        self._offset_bytes += end
        return [row for line in content[:end].splitlines() if (row := _object_of(line)) is not None]


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
