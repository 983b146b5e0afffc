"""Checks that an experiment's Python interpreter can run its entrypoint."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.config.experiment_config.environment import INTERPRETER_VARIABLE
from dstrial.errors import ConfigError, ConfigProblem

_TIMEOUT_S = 30.0
_WHERE = f"environment.environment_variables: {INTERPRETER_VARIABLE}"


def check_interpreter(interpreter: str, entrypoint: str | Sequence[str]) -> None:
    if not Path(interpreter).is_absolute() or shutil.which(interpreter) is None:
        raise _error(interpreter, "the absolute path of a Python", "Take the output of `which python3`.")
    packages = _needed(entrypoint)
    code = f"import importlib.util as u; print(*(p for p in {packages!r} if u.find_spec(p) is None))"
    try:
        done = subprocess.run(
            [interpreter, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _error(
            f"{interpreter}, which does not run ({error})", "a Python that runs", "Correct it."
        ) from error
    missing = done.stdout.split()
    if missing:
        fix = f"Run {interpreter} -m pip install {' '.join(missing)}, or choose another."
        has = f"{interpreter}, which has no {' and '.join(missing)}"
        raise _error(has, "a Python with what the entrypoint needs", fix)


def _error(found: str, expected: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(_WHERE, found, expected, fix)])


def _needed(entrypoint: str | Sequence[str]) -> list[str]:
    text = entrypoint if isinstance(entrypoint, str) else " ".join(entrypoint)
    needed = []
    if trial_spec(entrypoint) is not None or "dstrial." in text:
        needed.append("dstrial")
    if "determined." in text:
        needed.append("determined")
    return needed
