"""Runs first in a task with hooks: gets the overlay, becomes the hooks' shell.

An overlay that does not exist yet is made: a virtual environment with its own ``bin``, and with an empty ``site-packages``
before those of the base.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from . import base
from .pip_guard import TASK_VARIABLE, TIMEOUT_VARIABLE
from .store import Overlay, WaitedTooLongError, acquire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from overlay import start; sys.path.pop(0); start.main(sys.argv[2])"
"""What a base's Python runs, with the directory of this package and the path of ``overlay.json``."""

GUARD = "_dstrial_overlay"
CONSTRAINTS = "dstrial-constraints.txt"
# Sorted behind what hooks install; its own packages come first on the path anyway.
_PTH = "zz_dstrial_overlay.pth"
_COPIED = ("__init__.py", "base.py", "pip_guard.py", "store.py")
_MAX_SCRIPT_BYTES = 1 << 20
_MAX_SHEBANG_BYTES = 127
_PIP = "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
_MANAGERS = {
    "conda": "install|create|update|upgrade|remove|uninstall|env",
    "mamba": "install|create|update|upgrade|remove|uninstall|env",
    "micromamba": "install|create|update|upgrade|remove|uninstall|env",
    "uv": "install|sync|add",
    "apt": "install|update|upgrade|full-upgrade|remove|purge|autoremove",
    "apt-get": "install|update|upgrade|dist-upgrade|remove|purge|autoremove|build-dep",
}


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
            _print_line,
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
        _print_line(f"environment {overlay.name}: shared, made by {record['made_by']}")
    for note in record["notes"]:
        _print_line(note)
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


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def make(overlay: Overlay, staging: Path, constraints: dict[str, str]) -> None:
    """Make an overlay over the running Python.

    Args:
        overlay: where it is going to be; what is written names these paths.
        staging: where it is made.
        constraints: requirement -> why, for pip.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    builder = venv.EnvBuilder(symlinks=True, with_pip=not has_pip)
    builder.create(staging)
    (site_packages,) = staging.glob("lib/python*/site-packages")
    guard = site_packages / GUARD
    guard.mkdir()
    for name in _COPIED:
        shutil.copyfile(Path(__file__).with_name(name), guard / name)
    # `--system-site-packages` would lead to those of the Python that the base itself was made of.
    lines = [f"import site; site.addsitedir({path!r})" for path in base.site_directories()]
    lines.append(f"import {GUARD}; {GUARD}.guard_pip()")
    (site_packages / _PTH).write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "".join(f"{line}  # {why}\n" for line, why in constraints.items())
    (staging / CONSTRAINTS).write_text(text, encoding="utf-8")
    _move_scripts(staging, overlay)
    _copy_scripts(Path(sys.executable).parent, staging / "bin", overlay)
    # Also where the base has none: PATH goes on with other Pythons' pip.
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for name in ("pip", "pip3", f"pip{version}"):
        _write_script(staging / "bin" / name, shebang(str(overlay.python)) + _PIP)
    for manager, commands in _MANAGERS.items():
        _write_script(staging / "bin" / manager, _refusal(manager, commands))


def _move_scripts(staging: Path, overlay: Overlay) -> None:
    """Have the scripts of the new environment name the place where it is going to be."""
    for path in (staging / "bin").iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        path.write_text(
            text.replace(str(staging), str(overlay.path)), encoding="utf-8", errors="surrogateescape"
        )


def _copy_scripts(source: Path, target: Path, overlay: Overlay) -> None:
    """Copy the base's commands (``torchrun``, ``pip``) for the overlay's Python."""
    for path in sorted(source.iterdir()):
        copy = target / path.name
        if copy.exists() or not path.is_file() or path.stat().st_size > _MAX_SCRIPT_BYTES:
            continue
        first, _, rest = path.read_bytes().partition(b"\n")
        if not first.startswith(b"#!") or b"python" not in first or b"\0" in rest[:1024]:
            if first.startswith(b"#!/bin/sh") and str(source).encode() + b"/python" in rest[:512]:
                # The form of pip and distlib where the path is long or has spaces: '''exec' "python" "$0" "$@".
                rest = rest.partition(b"\n' '''\n")[2]
            else:
                continue
        elif not _is_of(first[2:].strip().decode("utf-8", "replace").split()[0], source):
            continue
        _write_script(copy, shebang(str(overlay.python)).encode() + rest)


def _is_of(interpreter: str, source: Path) -> bool:
    """Say whether a script's interpreter is the base's, by whichever of its names."""
    path = Path(interpreter)
    return path.parent == source or (path.parent.exists() and path.parent.samefile(source))


def shebang(python: str) -> str:
    """Return the first lines of a script for a Python, whatever its path is.

    Source: pip 23.2.1 ``_vendor/distlib/scripts.py``, ``_build_shebang``.
    """
    if " " not in python and len(python) + 3 <= _MAX_SHEBANG_BYTES:
        return f"#!{python}\n"
    return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"


def _refusal(manager: str, commands: str) -> str:
    return f"""#!/bin/sh
# `{manager}` of a task with an environment of its own: what would change this machine, or a shared environment, is refused.
for word in "$@"; do
    case $word in
        {commands})
            echo "{manager} $word is not supported in a startup hook; expected pip. This machine is shared by all tasks: \
install it once by hand, and remove the line." >&2
            exit 1 ;;
    esac
done
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PATH=$(printf %s "$PATH" | tr : '\\n' | grep -vxF "$here" | paste -sd : -)
export PATH
exec {manager} "$@"
"""


def _write_script(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o755)
