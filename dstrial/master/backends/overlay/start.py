"""Runs first in a task with hooks: gets the overlay, becomes the hooks' shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from . import base
from .make import CONSTRAINTS, make
from .pip_guard import TASK_VARIABLE, TIMEOUT_VARIABLE
from .store import Overlay, WaitedTooLongError, acquire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from overlay import start; sys.path.pop(0); start.main(sys.argv[2])"
"""What a base's Python runs, with the directory of this package and the path of ``overlay.json``."""


def main(path: str) -> None:
    """Run a task in its overlay; does not return.

    Args:
        path: of a JSON object: ``root`` (of the overlays), ``task`` (its name), ``hooks`` (paths of shell scripts),
            ``requirements`` (a path in ``files``, or null), ``files`` (the model definition), ``is_installing`` (the command
            installs, too), ``install_timeout_s``, ``shell``, ``command``.
    """
    spec: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    found = base.packages([*sys.path, *base.site_directories()])
    constraints = base.constraints(found)
    texts = [Path(hook).read_text(encoding="utf-8", errors="replace") for hook in spec["hooks"]]
    requirements = [spec["requirements"]] if spec["requirements"] else []
    if spec["is_installing"]:
        texts.append(shlex.join(spec["command"]))
    digest = base.digest_of([*texts, *requirements], requirements, Path(spec["files"]), found)
    try:
        overlay = acquire(
            Path(spec["root"]),
            digest,
            lambda overlay, staging: make(overlay, staging, constraints),
            spec["task"],
            _tell,
            float(spec["install_timeout_s"]) + 60.0,
        )
    except WaitedTooLongError as error:
        sys.exit(f"error: {error}")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"error: an environment over {sys.executable} cannot be made in {spec['root']} ({error}); expected a Python "
            "with venv, and room on the disk. Install python3-venv, or make room."
        )
    _take_part(overlay, spec)
    for name in requirements:
        done = subprocess.run(
            [str(overlay.python), "-m", "pip", "install", "-r", str(Path(spec["files"]) / name)],
            check=False,
            cwd=spec["files"],
        )
        if done.returncode != 0:
            sys.exit(done.returncode)
    command = list(spec["command"])
    if command[0] == sys.executable:
        command[0] = str(overlay.python)
    steps = ["set -e", *(f". {shlex.quote(hook)}" for hook in spec["hooks"]), "set +e"]
    # Only redirections of the shell itself: what a hook exports may have left no other command on PATH.
    steps += [f": > {shlex.quote(str(overlay.beside('complete')))}", 'exec "$@"']
    words = [spec["shell"], "-c", "; ".join(steps), "startup-hook", *command]
    sys.stdout.flush()
    os.execvpe(words[0], words, os.environ)  # noqa: S606 - the shell of the hooks


def _take_part(overlay: Overlay, spec: dict[str, Any]) -> None:
    """Put the overlay first in this process's environment; print what it hides."""
    record = overlay.read_record()
    if record["made_by"] != spec["task"]:
        _tell(f"environment {overlay.name}: shared, made by {record['made_by']}")
    for note in record["notes"]:
        _tell(note)
    own, theirs = str(overlay.path / "bin"), str(Path(sys.executable).parent)
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    entries.insert(entries.index(theirs) if theirs in entries else 0, own)
    os.environ.update(
        {
            "PATH": os.pathsep.join(entries),
            "VIRTUAL_ENV": str(overlay.path),
            "DET_PYTHON_EXECUTABLE": str(overlay.python),
            "PIP_CONSTRAINT": " ".join(
                [*os.environ.get("PIP_CONSTRAINT", "").split(), (overlay.path / CONSTRAINTS).as_uri()]
            ),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            TASK_VARIABLE: spec["task"],
            TIMEOUT_VARIABLE: str(spec["install_timeout_s"]),
        }
    )
    for name in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONHOME"):
        os.environ.pop(name, None)


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
