"""Run a task in its own virtual environment over the base Python.

The base Python, which may lack dstrial, runs this file. Requirements, startup hooks and any later ``pip install`` install into
``venv`` in the allocation's directory, which is deleted with the allocation.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import json
import os
import shlex
import site
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT = ("torch", "deepspeed", "determined", "dstrial")
"""Packages that must keep the base Python's versions."""

# Valid as sh and as Python: an interpreter line allows no spaces and 127 bytes (pip 23.2.1 _vendor/distlib/scripts.py).
_PIP = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from pip._internal.cli.main import main
sys.exit(main())
"""


def main(spec_path: str) -> None:
    """Create the task's environment, install its requirements, run hooks and command.

    Args:
        spec_path: a JSON file: ``task`` (its name), ``directory`` (of the allocation), ``files`` (the model definition),
            ``hooks`` (paths of shell scripts), ``requirements`` (a path in ``files``, or null), ``shell``, ``command``.
    """
    spec: dict[str, Any] = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    # `python -I` excludes the user's site-packages, which the task itself sees.
    sys.path += [path for path in site_directories() if path not in sys.path]
    own = Path(spec["directory"], "venv")
    try:
        _set_variables(Path(spec["directory"]))
        make(own)
        _enter(own)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"error: an environment over {sys.executable} cannot be made for {spec['task']} ({error}); expected a Python with "
            f"venv, and room on the disk of {own}. Install python3-venv, or make room."
        )
    if spec["requirements"]:
        _install(spec, own)
    command = list(spec["command"])
    if command[0] == sys.executable:
        command[0] = str(own / "bin" / "python3")
    steps = ["set -e", *(f". {shlex.quote(hook)}" for hook in spec["hooks"]), "set +e", 'exec "$@"']
    words = [spec["shell"], "-c", "; ".join(steps), "startup-hook", *command]
    sys.stdout.flush()
    os.execvpe(words[0], words, os.environ)  # noqa: S606 - the shell of the hooks


def site_directories() -> list[str]:
    """Return the running Python's site-packages directories, the user's last."""
    found = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # A virtual environment excludes the user's (site.py, venv()).
    if sys.prefix == sys.base_prefix and not os.environ.get("PYTHONNOUSERSITE"):
        found += [path for path in (site.getusersitepackages(),) if Path(path).is_dir()]
    return found


def make(environment: Path) -> None:
    """Create a venv that sees the packages of the running Python.

    The venv gets wrappers for the running Python's commands (for example ``torchrun``), which run them with the venv's Python.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # `--system-site-packages` would show the packages of the Python from which a base venv was created.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site_directories()]
    # This name sorts after .pth files of installed packages.
    (packages / "zz_dstrial.pth").write_text("".join(lines), encoding="utf-8")
    python = environment / "bin" / "python3"
    for name in ("pip", "pip3", f"pip{sys.version_info[0]}.{sys.version_info[1]}"):
        # Written even if the base has no pip, as later entries of PATH may have another Python's pip.
        _write_script(environment / "bin" / name, _PIP.format(python=python))
    _wrap_commands(Path(sys.executable).parent, python)


def _wrap_commands(source: Path, python: Path) -> None:
    for path in sorted(source.iterdir()):
        wrapper = python.with_name(path.name)
        if wrapper.exists() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(512)
        if head.startswith(b"#!") and os.fsencode(source / "python") in head:
            _write_script(wrapper, f'#!/bin/sh\nexec {shlex.join([str(python), str(path)])} "$@"\n')


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o755)


def _constraints() -> str:
    """Return pip constraints that keep the base Python's packages working."""
    try:
        requirements = importlib.import_module("packaging.requirements")
    except ImportError:
        requirements = importlib.import_module("pip._vendor.packaging.requirements")
    lines = []
    for kept in KEPT:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{kept}=={metadata.version(kept)}  # the environment of the master")
            for text in metadata.requires(kept) or ():
                with contextlib.suppress(metadata.PackageNotFoundError, requirements.InvalidRequirement):
                    needed = requirements.Requirement(text)
                    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                        continue
                    is_met = needed.specifier.contains(metadata.version(needed.name), prereleases=True)
                    if needed.specifier and is_met and needed.name not in KEPT:
                        lines.append(f"{needed.name}{needed.specifier}  # {kept}")
    return "".join(f"{line}\n" for line in lines)


def _set_variables(directory: Path) -> None:
    constraints = directory / "constraints.txt"
    constraints.write_text(_constraints(), encoding="utf-8")
    given = os.environ.get("PIP_CONSTRAINT", "").split()
    os.environ.update(
        {
            # As a URL: pip splits the variable at spaces.
            "PIP_CONSTRAINT": " ".join([*given, constraints.as_uri()]),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_PROGRESS_BAR": "off",
        }
    )
    for name in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONHOME"):
        os.environ.pop(name, None)


def _enter(environment: Path) -> None:
    """Activate an environment: set PATH, VIRTUAL_ENV and DET_PYTHON_EXECUTABLE."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    base = str(Path(sys.executable).parent)
    entries.insert(entries.index(base) if base in entries else 0, str(environment / "bin"))
    os.environ["PATH"] = os.pathsep.join(entries)
    os.environ["VIRTUAL_ENV"] = str(environment)
    os.environ["DET_PYTHON_EXECUTABLE"] = str(environment / "bin" / "python3")


def _install(spec: dict[str, Any], environment: Path) -> None:
    """Install a task's requirements; exit with pip's last lines on an error."""
    words = [str(environment / "bin" / "pip"), "install", "-r", spec["requirements"]]
    last: collections.deque[str] = collections.deque(maxlen=8)
    with subprocess.Popen(words, cwd=spec["files"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            _print_line(text)
            last.append(f"    {text}\n")
    if pip.returncode:
        sys.exit(
            f"error: {spec['requirements']} cannot be installed; pip ends with exit code {pip.returncode}:\n{''.join(last)}"
            "Correct the requirement. If pip finds no version, see whether the package index answers: set PIP_INDEX_URL, or "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS=/directory/of/wheels, in environment_variables. If it contradicts a "
            "(constraint), that is a package of the master's environment: agree with it, or name another Python by "
            "DET_PYTHON_EXECUTABLE."
        )


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
