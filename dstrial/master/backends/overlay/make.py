"""Make an overlay's environment: its own ``bin`` and ``site-packages`` come first."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import venv
from pathlib import Path

from . import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .store import Overlay

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
