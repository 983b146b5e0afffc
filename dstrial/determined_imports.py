"""Gives old trial files dstrial's classes under Determined's names.

In processes that dstrial starts, and only there: a finder answers for three modules of Determined with files of
``dstrial/stand_ins``, each of which is a module of its own. Python loads this file at its start, through ``sitecustomize``, by
its path: it may have no dstrial, and then nothing is changed. So it imports the standard library only, and of that little.
"""

# pathlib would take 5 ms of each start.
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
"""Environment variable: ``1`` in what dstrial starts, ``0`` for Determined's own modules."""

SETTING = "determined_imports"
"""The key of ``data.dstrial`` that says the same in an experiment config."""

_ON, _OFF, _ANNOUNCED = "1", "0", "told"
_HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(_HERE, "master", "backends", "site")
"""Directory that is put before PYTHONPATH for its ``sitecustomize``; it has nothing else."""
_FILES = {
    "determined.launch.deepspeed": os.path.join(_HERE, "stand_ins", "launch_deepspeed.py"),
    "determined.pytorch.deepspeed": os.path.join(_HERE, "stand_ins", "deepspeed", "__init__.py"),
    # Determined 0.38 has no such module any more.
    "determined.pytorch.dsat": os.path.join(_HERE, "stand_ins", "dsat", "__init__.py"),
}
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def variables(environ: Mapping[str, str], config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return what makes a new process and its children use the stand-ins, unless off.

    Args:
        environ: what else the process will see; its own ``DSTRIAL_DETERMINED_IMPORTS`` is kept.
        config: the experiment config, whose ``data.dstrial.determined_imports`` may be false.
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
    """Answer for Determined's modules, if this process was started so. Idempotent."""
    if os.environ.get(VARIABLE) in (_ON, _ANNOUNCED) and not any(
        isinstance(one, _Finder) for one in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


def announce(module: str) -> None:
    """Say once, on the first rank and for its children, whose module this is."""
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
    """Finds the stand-ins; Python finds their submodules by the package's path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        file = _FILES.get(fullname)
        if file is None or not _has_dstrial():
            return None
        # A source file of its own and not a module of dstrial under a second name: the import system would write the second
        # name's spec over the first's. Its loader has get_code, by which ``python -m`` runs a module.
        loader = importlib.machinery.SourceFileLoader(fullname, file)
        is_package = os.path.basename(file) == "__init__.py"
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=file, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(file)]
        return spec


def _has_dstrial() -> bool:
    """Say whether this Python has dstrial; an experiment's may have Determined only."""
    if "dstrial" in sys.modules:
        return True
    import importlib.util

    try:
        return importlib.util.find_spec("dstrial") is not None
    except (ImportError, ValueError):
        return False
