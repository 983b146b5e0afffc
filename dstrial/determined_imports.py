"""Redirect imports of Determined's trial modules to dstrial's classes.

In processes that dstrial starts, an import finder loads three modules of Determined from files in ``dstrial/stand_ins``.
``sitecustomize`` loads this file by path when Python starts, even if that Python has no dstrial; imports are then not changed.
Therefore this file imports only a little of the standard library.
"""

# Importing pathlib would cost 5 ms per start.
# ruff: noqa: PTH100, PTH118, PTH119, PTH120

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import Any

VARIABLE = "DSTRIAL_DETERMINED_IMPORTS"
"""Environment variable: ``1`` redirects imports to dstrial's classes, ``0`` keeps Determined's modules."""

SETTING = "determined_imports"
"""Key of ``data.dstrial``; false keeps Determined's modules."""

_ON, _OFF, _ANNOUNCED = "1", "0", "told"
_HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(_HERE, "master", "backends", "site")
"""Directory that is prepended to PYTHONPATH; it only contains ``sitecustomize``."""
_FILES = {
    "determined.launch.deepspeed": os.path.join(_HERE, "stand_ins", "launch_deepspeed.py"),
    "determined.pytorch.deepspeed": os.path.join(_HERE, "stand_ins", "deepspeed", "__init__.py"),
    # Determined 0.38 no longer has this module.
    "determined.pytorch.dsat": os.path.join(_HERE, "stand_ins", "dsat", "__init__.py"),
}
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def variables(environ: Mapping[str, str], config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return environment variables that make a new process import dstrial's classes.

    Imports of Determined's trial modules are redirected in the process and its children.

    Args:
        environ: the other variables of the process; an existing ``DSTRIAL_DETERMINED_IMPORTS`` is kept.
        config: the experiment config, in which ``data.dstrial.determined_imports`` may be false.
    """
    data = (config or {}).get("data") or {}
    section = data.get("dstrial") if isinstance(data, dict) else None
    is_off = isinstance(section, dict) and section.get(SETTING) is False
    rest = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != SITE]
    return {
        VARIABLE: environ.get(VARIABLE) or (_OFF if is_off else _ON),
        "PYTHONPATH": os.pathsep.join([SITE, *rest]),
    }


def install_if_asked() -> None:
    """Redirect imports of Determined's trial modules if the environment asks for it.

    Idempotent.
    """
    if os.environ.get(VARIABLE) in (_ON, _ANNOUNCED) and not any(
        isinstance(one, _Finder) for one in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


def announce(module: str) -> None:
    """Print once, on the first rank, that dstrial replaces Determined's ``module``."""
    if os.environ.get(VARIABLE) == _ANNOUNCED:
        return
    os.environ[VARIABLE] = _ANNOUNCED
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank != "0":
        return
    sys.stderr.write(
        f"dstrial: {module} is dstrial's here; data.dstrial.{SETTING}: false ({VARIABLE}=0) gives Determined's own\n"
    )
    sys.stderr.flush()


class _Finder:
    """Import finder that loads dstrial's files for three modules of Determined.

    Python then finds their submodules itself.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        file = _FILES.get(fullname)
        if file is None or not _has_dstrial():
            return None
        # A separate source file, not a module of dstrial under a second name, because the import system would overwrite the
        # first name's spec. Its loader has get_code, which ``python -m`` needs.
        loader = importlib.machinery.SourceFileLoader(fullname, file)
        is_package = os.path.basename(file) == "__init__.py"
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=file, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(file)]
        return spec


def _has_dstrial() -> bool:
    """Return whether this Python has dstrial; it may only have Determined."""
    if "dstrial" in sys.modules:
        return True
    import importlib.util

    try:
        return importlib.util.find_spec("dstrial") is not None
    except (ImportError, ValueError):
        return False
