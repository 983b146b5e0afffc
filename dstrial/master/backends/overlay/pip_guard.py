"""Runs ``pip install`` in an overlay: one at a time, each once, base kept intact.

A copy of this module lies in every overlay. What a hook installs is recorded under a digest of the command and of the files
that it names; whoever asks for the same afterwards, in the same overlay, is told so and goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from . import base
from .store import Overlay, WaitedTooLongError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TASK_VARIABLE = "DSTRIAL_TASK"
TIMEOUT_VARIABLE = "DSTRIAL_INSTALL_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 1800.0
_INSIDE_VARIABLE = "DSTRIAL_INSIDE_PIP"
_ELSEWHERE = ("--user", "--target", "--prefix", "--root", "--python")
_NO_INDEX_SIGNS = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionError",
    "ProtocolError",
    "ProxyError",
    "Temporary failure in name resolution",
)


def guarded(main: Callable[..., int]) -> Callable[..., int]:
    """Return pip's ``main`` with installs guarded, except those pip starts itself."""

    def guarded_main(args: list[str] | None = None) -> int:
        words = sys.argv[1:] if args is None else list(args)
        command = next((word for word in words if word in ("install", "uninstall", "download", "wheel")), "")
        if (
            command not in ("install", "uninstall")
            or os.environ.get(_INSIDE_VARIABLE)
            or "--dry-run" in words
            or not {"-h", "--help"}.isdisjoint(words)
        ):
            return main(args)
        return _Install(words).run()

    return guarded_main


class _Install:
    """One ``pip install`` or ``uninstall`` of a task.

    Args:
        words: behind ``pip``.
    """

    def __init__(self, words: Sequence[str]) -> None:
        path = Path(sys.prefix)
        self._overlay = Overlay(path.parent, path.name)
        self._task = os.environ.get(TASK_VARIABLE) or f"process {os.getpid()}"
        try:
            self._timeout_s = float(os.environ.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT_S)
        except ValueError:
            self._timeout_s = DEFAULT_TIMEOUT_S
        self._shown = "pip " + " ".join(words)
        self._words = list(words)

    def run(self) -> int:
        """Run the install, or say why not; return the exit code."""
        refused = next((word for word in self._words if _is_elsewhere(word)), None)
        if refused is not None:
            return _fail(
                f"{self._shown} has {refused.partition('=')[0]}, which is not supported; expected a plain pip install, which "
                "goes into an environment of this task's own. Remove the option."
            )
        self._words = self._without_editable(self._words)
        key = _key(self._words)
        try:
            with self._overlay.locked(
                f"{self._task} ({self._shown})", _print_line, timeout_s=self._timeout_s + 60.0
            ):
                record = self._overlay.read_record()
                known = record["installs"].get(key)
                if known is not None:
                    _print_line(f"{self._shown}: done by {known['task']} in environment {self._overlay.name}")
                    return 0
                return self._install(key)
        except WaitedTooLongError as error:
            return _fail(str(error))

    def _without_editable(self, words: list[str]) -> list[str]:
        """Install copies of the task's files, which are deleted before the overlay is."""
        task_files = os.environ.get("DSTRIAL_ALLOCATION_DIR")
        kept: list[str] = []
        for word in words:
            path = Path(word.partition("[")[0] or ".")
            is_ours = bool(task_files) and path.exists() and _is_below(path, Path(str(task_files)))
            if kept and kept[-1] in ("-e", "--editable") and is_ours:
                kept[-1] = word
                _print_line(
                    f"{self._shown}: {word} is copied, not linked: the environment lives longer than it"
                )
            else:
                kept.append(word)
        return kept

    def _install(self, key: str) -> int:
        overlay = self._overlay
        broken = overlay.beside("broken")
        before = self._own()
        broken.write_text(f"{self._task}: {self._shown}\n", encoding="utf-8")
        code, lines = self._run_pip()
        after = self._own()
        if code != 0:
            if after == before:
                broken.unlink()
            return _fail(self._explained(lines, code), code)
        record = overlay.read_record()
        record["installs"][key] = {"words": self._shown, "task": self._task}
        for note in self._shadowed(before, after):
            if note not in record["notes"]:
                record["notes"].append(note)
                _print_line(note)
        overlay.write_record(record)
        broken.unlink()
        return 0

    def _own(self) -> dict[str, str]:
        own = [str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages")]
        return {name: package.version for name, package in base.packages(own).items()}

    def _shadowed(self, before: dict[str, str], after: dict[str, str]) -> list[str]:
        """Return which base packages have another version here, of those just installed."""
        paths = [path for path in sys.path if not path.startswith(sys.prefix + os.sep)]
        theirs = base.packages(paths)
        return [
            f"note: {name} {version} of this environment hides {theirs[name].version} of its base"
            for name, version in sorted(after.items())
            if before.get(name) != version and name in theirs and theirs[name].version != version
        ]

    def _run_pip(self) -> tuple[int, list[str]]:
        """Run the real pip, print what it prints, and return its exit code and lines."""
        environment = {
            **os.environ,
            _INSIDE_VARIABLE: "1",
            "PIP_CONSTRAINT": " ".join(self._constraints()),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_USER": "0",
            "PIP_PROGRESS_BAR": "off",
            "PIP_RETRIES": os.environ.get("PIP_RETRIES", "2"),
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *self._words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, end)
        timer.daemon = True
        timer.start()
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            target = sys.stderr if line.startswith(("ERROR", "WARNING")) else sys.stdout
            target.write(line)
            target.flush()
            if is_late.is_set():
                break
        code = process.wait()
        timer.cancel()
        if is_late.is_set():
            lines.append(_LATE)
            return 124, lines
        return code, lines

    def _constraints(self) -> list[str]:
        """Return constraint files as URLs, since pip splits the variable at spaces."""
        paths = [Path(sys.prefix) / "dstrial-constraints.txt"]
        if self._overlay.beside("complete").exists():
            # Tasks train with what is there: from here on packages are added, and none is changed.
            present = Path(sys.prefix) / "dstrial-present.txt"
            present.write_text("".join(f"{name}=={version}\n" for name, version in self._own().items()))
            paths.append(present)
        given = [word for word in os.environ.get("PIP_CONSTRAINT", "").split() if "dstrial-" not in word]
        return [*given, *(path.as_uri() for path in paths)]

    def _explained(self, lines: list[str], code: int) -> str:
        if lines and lines[-1] == _LATE:
            return (
                f"{self._shown} has run for {self._timeout_s:.0f} s; expected it to end within that. See whether its index "
                "answers, or raise data.dstrial.install_timeout_s."
            )
        conflict = _conflict(lines) or _kept_and_missing(lines, Path(sys.prefix) / "dstrial-constraints.txt")
        if conflict is not None:
            asked, kept = conflict
            return (
                f"{self._shown} asks for {asked}; expected what agrees with {kept}, which the environment of the master, or "
                "other tasks in this one, need as it is. Change the requirement, or name another Python by "
                "DET_PYTHON_EXECUTABLE in environment_variables."
            )
        text = "\n".join(lines)
        missing = re.search(r"No matching distribution found for (.+)", text)
        if any(sign in text for sign in _NO_INDEX_SIGNS):
            return (
                f"{self._shown} reaches no package index; expected one that answers. Set PIP_INDEX_URL in "
                "environment_variables, or PIP_NO_INDEX=1 and PIP_FIND_LINKS=/directory/of/wheels."
            )
        if missing is not None:
            return (
                f"{self._shown} finds no {missing.group(1).strip()}; expected a package index that has it. See whether the "
                "index answers (PIP_INDEX_URL, PIP_FIND_LINKS in environment_variables), and correct the name or version."
            )
        return f"{self._shown} ends with exit code {code}; expected 0. Pip's own words are above."


_LATE = "\0late"


def _conflict(lines: list[str]) -> tuple[str, str] | None:
    """Return what is asked for and what is kept, from pip's own list of causes.

    Source: pip 23.2.1 to 25 ``_internal/resolution/resolvelib/factory.py``, ``get_installation_error``.
    """
    asked: list[str] = []
    kept: list[str] = []
    is_list = False
    for line in lines:
        if "The conflict is caused by:" in line:
            is_list = True
        elif is_list and not line.startswith("    "):
            is_list = False
        elif is_list:
            text = line.strip()
            constraint = re.match(r"The user requested \(constraint\) (.+)", text)
            request = re.match(r"The user requested (.+)", text)
            found = constraint.group(1) if constraint else request.group(1) if request else text
            into = kept if constraint else asked
            if found not in into:
                into.append(found)
    return (" and ".join(asked), " and ".join(kept)) if asked and kept else None


def _kept_and_missing(lines: list[str], path: Path) -> tuple[str, str] | None:
    """Return the same pair where pip only says that no index has the version."""
    found = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)(.*)", "\n".join(lines))
    if found is None or not found.group(2).strip():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None and base.canonical(name.group()) == base.canonical(found.group(1)):
            return f"{found.group(1)}{found.group(2)}".strip(), requirement
    return None


def _key(words: list[str]) -> str:
    """Return a command's digest; files that it names count by their content."""
    parts = []
    for word in words:
        path = Path(re.sub(r"^(-r|-c|--requirement=|--constraint=)", "", word).partition("[")[0] or "/")
        is_file = path.name and (path.is_file() or (path.is_dir() and ("/" in word or word.startswith("."))))
        is_file = is_file or word == "."
        parts.append(base.content_digest(Path(word) if word == "." else path) if is_file else word)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _is_elsewhere(word: str) -> bool:
    return word.partition("=")[0] in _ELSEWHERE or (word.startswith("-t") and not word.startswith("--"))


def _is_below(path: Path, directory: Path) -> bool:
    real = path.resolve()
    return directory.resolve() in (real, *real.parents)


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(text: str, code: int = 1) -> int:
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    return code
