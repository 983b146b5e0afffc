"""Redirect imports of Determined's trial modules to dstrial's classes.

In processes that dstrial starts, an import finder loads three modules of Determined from files in ``dstrial/stand_ins``.
``sitecustomize`` loads this file by path at every start of Python, so the file imports only fast modules of the standard
library. In a Python environment without dstrial, imports are not redirected.
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

_ON, _OFF, _ANNOUNCED = (
    "1",
    "0",
    "told",
)  # values of VARIABLE; the last one: redirected, and already announced
_HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(_HERE, "master", "backends", "site")
"""Directory that is prepended to PYTHONPATH; it only contains ``sitecustomize``."""
# Module of Determined -> the file that is loaded in its place.
_FILES = {
    "determined.launch.deepspeed": os.path.join(_HERE, "stand_ins", "launch_deepspeed.py"),
    "determined.pytorch.deepspeed": os.path.join(_HERE, "stand_ins", "deepspeed", "__init__.py"),
    # Determined 0.38 no longer has this module.
    "determined.pytorch.dsat": os.path.join(_HERE, "stand_ins", "dsat", "__init__.py"),
}
# Environment variables in which launchers give a process its rank.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def variables(environ: Mapping[str, str], config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return environment variables that redirect imports in a new process.

    Args:
        environ: other variables of the new process. The result keeps a ``DSTRIAL_DETERMINED_IMPORTS`` that is set there, and
            extends ``PYTHONPATH``.
        config: the experiment config; ``data.dstrial.determined_imports: false`` disables the redirection.
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
    """Redirect imports if ``DSTRIAL_DETERMINED_IMPORTS`` enables it. Idempotent."""
    if os.environ.get(VARIABLE) in (_ON, _ANNOUNCED) and not any(
        isinstance(one, _Finder) for one in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


def announce(module: str) -> None:
    """Print on rank 0 that dstrial replaces Determined's module ``module``.

    Only the first call prints, also counting calls in the processes from which this one was started.
    """
    if os.environ.get(VARIABLE) == _ANNOUNCED:
        return
    os.environ[VARIABLE] = _ANNOUNCED
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank != "0":
        return
    sys.stderr.write(
        f"dstrial: imports of {module} give dstrial's classes; set data.dstrial.{SETTING}: false ({VARIABLE}=0) for "
        "Determined's own\n"
    )
    sys.stderr.flush()


class _Finder:
    """Import finder that loads dstrial's files in place of Determined's trial modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        file = _FILES.get(fullname)
        if file is None or not _has_dstrial():
            return None
        # A separate source file: if a module of dstrial were imported under a second name, the import system would overwrite
        # its spec. SourceFileLoader has get_code, which ``python -m`` needs.
        loader = importlib.machinery.SourceFileLoader(fullname, file)
        is_package = os.path.basename(file) == "__init__.py"
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=file, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(file)]
        return spec


def _has_dstrial() -> bool:
    if "dstrial" in sys.modules:
        return True
    import importlib.util

    try:
        return importlib.util.find_spec("dstrial") is not None
    except (ImportError, ValueError):
        return False
