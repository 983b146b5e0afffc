"""Run a task in a virtual environment over the base Python; cache installs.

The base Python, which may lack dstrial, runs this file. Two environments extend it:

- The shared one, ``<root>/DIGEST``, has the packages that requirements and startup hooks install. DIGEST is a hash of these
  and of the base packages (``digest_of``). The first task fills the environment under an exclusive lock on ``DIGEST.lock``.
  Once ``DIGEST/complete`` exists, the environment never changes; tasks use it under shared locks.
- The task's own, ``venv`` in the allocation's directory, extends the shared one. A ``pip install`` during training installs
  there, and so do the hooks, which run again in each later task.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

KEPT = ("torch", "deepspeed", "determined", "dstrial")
"""Packages that must keep the base Python's versions."""
UNUSED_S = 14 * 24 * 3600.0
"""Seconds after the last start of a task in a shared environment at which the environment is deleted."""

_COMPLETE = "complete"  # file in a shared environment that marks it as filled
_POLL_S = 0.1  # interval of attempts to lock an environment
_LOG_PERIOD_S = 30.0  # interval of log lines of a task that waits for an environment
_MIN_DESCRIPTOR = 64  # hooks may use lower descriptors for redirections
# Suffixes of files that may affect which packages are installed, and so are part of the digest.
_SUFFIXES = (".txt", ".in", ".toml", ".cfg", ".lock", ".sh", ".whl", ".gz", ".zip", ".bz2", "setup.py")
# Requirements that name a local directory or another requirements file.
_LOCAL_REQUIREMENT = re.compile(
    r"^\s*(-[er]|--editable\b|--requirement\b|\.|(\S+\s*@\s*)?file:|(?!.*://)[^#\n]*/)", re.MULTILINE
)
# Valid as sh and as Python: an interpreter line allows no spaces and 127 bytes (pip 23.2.1 _vendor/distlib/scripts.py).
_PIP = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from pip._internal.cli.main import main
sys.exit(main())
"""


def main(spec_path: str, filled: str = "", lock: str = "") -> None:
    """Prepare the task's environments, run its hooks and command.

    To fill a shared environment, hooks run in a shell that then executes this file again, with ``filled`` and ``lock``.

    Args:
        spec_path: a JSON file: ``root`` (of shared environments), ``task`` (its name), ``directory`` (of the allocation),
            ``files`` (the model definition), ``hooks`` (paths of shell scripts), ``requirements`` (a path in ``files``, or
            null), ``shell``, ``command``.
        filled: the shared environment that the hooks have just filled.
        lock: the descriptor of the exclusive lock on ``filled``.
    """
    spec: dict[str, Any] = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    # `python -I` excludes the user's site-packages, which the task itself sees.
    sys.path += [path for path in site_directories() if path not in sys.path]
    try:
        if lock:
            _mark_complete(Path(filled), int(lock))
            _run_in_own(spec, Path(filled), has_filled=True)
        _set_variables(Path(spec["directory"]))
        if not spec["hooks"] and not spec["requirements"]:
            _run_in_own(spec, None, has_filled=True)
        shared = Path(spec["root"], digest_of(spec["hooks"], spec["requirements"], Path(spec["files"])))
        descriptor, is_complete = acquire(shared, spec["task"])
        _print_line(
            f"environment {shared.name}: {'shared with' if is_complete else 'created for'} other tasks"
        )
        if not is_complete:
            shutil.rmtree(shared, ignore_errors=True)
            make(shared)
            _enter(shared)
            if spec["requirements"]:
                _install(spec, shared)
            if spec["hooks"]:
                then = [sys.executable, "-I", __file__, spec_path, str(shared), str(descriptor)]
                _run(spec, spec["hooks"], then)
            _mark_complete(shared, descriptor)
        _run_in_own(spec, shared, has_filled=not is_complete)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"error: an environment over {sys.executable} cannot be made for {spec['task']} ({error}); expected a Python with "
            f"venv, and room on the disk of {spec['root']}. Install python3-venv, or make room."
        )


def site_directories() -> list[str]:
    """Return the running Python's site-packages directories, the user's last."""
    found = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # A virtual environment excludes the user's (site.py, venv()).
    if sys.prefix == sys.base_prefix and not os.environ.get("PYTHONNOUSERSITE"):
        found += [path for path in (site.getusersitepackages(),) if Path(path).is_dir()]
    return found


def digest_of(hooks: Iterable[str], requirements: str | None, files: Path) -> str:
    """Return a shared environment's name.

    The name is a hash of the base Python, its packages, ``requirements``, and the contents of the hooks. Files under ``files``
    that may affect which packages are installed are hashed, too.
    """
    found = (one.name for path in sys.path if Path(path).is_dir() for one in Path(path).iterdir())
    base = sorted(name for name in found if name.endswith((".dist-info", ".egg-info", ".egg-link")))
    digest = hashlib.sha256(json.dumps([sys.executable, sys.version, base, requirements]).encode())
    for hook in hooks:
        digest.update(hashlib.sha256(Path(hook).read_bytes()).digest())
    for parent, directories, names in os.walk(files):
        directories[:] = sorted(name for name in directories if name not in (".git", "__pycache__"))
        for path in (Path(parent, name) for name in sorted(names) if name.endswith(_SUFFIXES)):
            if path.is_file():
                digest.update(os.fsencode(path.relative_to(files)) + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def acquire(environment: Path, task: str) -> tuple[int, bool]:
    """Lock a shared environment; wait while another task has an exclusive lock.

    The lock is shared if the environment is complete. Otherwise the lock is exclusive, and the caller must fill the
    environment. ``task`` is the name under which the logs of waiting tasks mention this task.

    Returns:
        (descriptor of the lock, whether the environment is complete). The task's processes inherit the descriptor.
    """
    environment.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    complete, path = environment / _COMPLETE, environment.with_name(f"{environment.name}.lock")
    began_s = time.monotonic()
    log_s = began_s + _POLL_S
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD, _MIN_DESCRIPTOR)
        os.close(opened)
        is_complete = complete.exists()
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_complete else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Check again: `collect` may have deleted the lock file, or another task completed the environment.
            if path.stat().st_ino == os.fstat(descriptor).st_ino and complete.exists() == is_complete:
                os.utime(descriptor)
                if not is_complete:
                    os.ftruncate(descriptor, os.pwrite(descriptor, task.encode(), 0))
                return descriptor, is_complete
        os.close(descriptor)
        if time.monotonic() > log_s:
            log_s = time.monotonic() + _LOG_PERIOD_S
            with contextlib.suppress(FileNotFoundError):
                holder = path.read_text(encoding="utf-8", errors="replace") or "another task"
                waited_s = time.monotonic() - began_s
                _print_line(
                    f"waiting for environment {environment.name}, which {holder} fills ({waited_s:.0f} s)"
                )
        time.sleep(_POLL_S)


def collect(root: Path, unused_s: float) -> list[str]:
    """Delete incomplete and unused environments that no task has locked.

    Args:
        root: directory of all shared environments.
        unused_s: delete a complete environment if no task has started in it for this many seconds.

    Returns:
        Names of the deleted environments.
    """
    from dstrial.file_writes import remove_tree

    deleted = []
    for lock in sorted(root.glob("*.lock")):
        environment = lock.with_suffix("")
        descriptor = os.open(lock, os.O_RDWR)
        # BlockingIOError: the environment is in use. After any error, go on with the next environment.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age_s = time.time() - os.fstat(descriptor).st_mtime
            if age_s > unused_s or not (environment / _COMPLETE).exists():
                (environment / _COMPLETE).unlink(missing_ok=True)
                remove_tree(environment)
                lock.unlink()
                deleted.append(environment.name)
        os.close(descriptor)
    return deleted


def make(environment: Path, shared: Path | None = None, *, has_commands: bool = False) -> None:
    """Create a venv that sees the packages of the running Python and of a shared venv.

    With ``has_commands``, the new venv gets wrappers for the Python scripts in ``bin`` of both, for example ``torchrun``. A
    wrapper runs the script with the new venv's Python.
    """
    has_pip = shared is not None or importlib.util.find_spec("pip") is not None
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # `--system-site-packages` would show the packages of the Python from which a base venv was created.
    visible = [] if shared is None else [str(path) for path in shared.glob("lib/python*/site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in [*visible, *site_directories()]]
    # This name sorts after .pth files of installed packages.
    (packages / "zz_dstrial.pth").write_text("".join(lines), encoding="utf-8")
    python = environment / "bin" / "python3"
    for name in ("pip", "pip3", f"pip{sys.version_info[0]}.{sys.version_info[1]}"):
        # Written even if the base has no pip, as later entries of PATH may have another Python's pip.
        _write_script(environment / "bin" / name, _PIP.format(python=python))
    if has_commands:
        for source in ([] if shared is None else [shared / "bin"]) + [Path(sys.executable).parent]:
            _wrap_commands(source, python)


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
    """Return pip constraints: the versions of ``KEPT`` and what these require.

    Requirements that the base Python does not meet are omitted.
    """
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


def _enter(environment: Path, shared: Path | None = None) -> None:
    """Activate an environment: set PATH, VIRTUAL_ENV and DET_PYTHON_EXECUTABLE.

    In PATH, the environment precedes the base Python and ``shared``.
    """
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    seen = [str(Path(sys.executable).parent), *([] if shared is None else [str(shared / "bin")])]
    places = [place for place, entry in enumerate(entries) if entry in seen]
    entries.insert(min(places, default=0), str(environment / "bin"))
    os.environ["PATH"] = os.pathsep.join(entries)
    os.environ["VIRTUAL_ENV"] = str(environment)
    os.environ["DET_PYTHON_EXECUTABLE"] = str(environment / "bin" / "python3")


def _install(spec: dict[str, Any], environment: Path) -> None:
    """Install a task's requirements; if pip fails, exit with its last lines."""
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


def _mark_complete(environment: Path, lock: int) -> None:
    (environment / _COMPLETE).touch()
    fcntl.flock(lock, fcntl.LOCK_SH)


def _run_in_own(spec: dict[str, Any], shared: Path | None, *, has_filled: bool) -> NoReturn:
    """Create the task's own environment; execute the hooks and the command there.

    With ``has_filled``, no hooks run and no requirements are installed: either the task has just done so to fill the shared
    environment, or it has none. Otherwise requirements that name local paths are installed again.
    """
    own = Path(spec["directory"], "venv")
    make(own, shared, has_commands=True)
    _enter(own, shared)
    if spec["requirements"] and not has_filled:
        text = Path(spec["files"], spec["requirements"]).read_text(encoding="utf-8", errors="replace")
        # Local directories are installed for each task: they may have changed, or link to files of an ended task.
        if _LOCAL_REQUIREMENT.search(text):
            _install(spec, own)
    command = list(spec["command"])
    if command[0] == sys.executable:
        command[0] = str(own / "bin" / "python3")
    _run(spec, () if has_filled else spec["hooks"], command)


def hook_command(shell: str, hooks: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that sources shell scripts, then executes ``command``.

    If a command in one of the scripts (``hooks``) fails, ``command`` is not executed.
    """
    steps = ["set -e", *(f". {shlex.quote(hook)}" for hook in hooks), "set +e", 'exec "$@"']
    return [shell, "-c", "; ".join(steps), "startup-hook", *command]


def _run(spec: dict[str, Any], hooks: Sequence[str], command: Sequence[str]) -> NoReturn:
    words = hook_command(spec["shell"], hooks, command)
    sys.stdout.flush()
    os.execvpe(words[0], words, os.environ)  # noqa: S606 - the shell of the hooks


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
