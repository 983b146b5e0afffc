"""Old module paths of dstrial, importable for one release after a move.

``old_paths.json`` is the one table: old dotted path to new; what lies in a package of the table goes with it. Both paths give
the same module object, and so the same classes: pickles and submitted configs that name the old path go on working, as does
``python -m`` with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
_PREFIX = f"{__package__}."


def table() -> Mapping[str, str]:
    """Return the new path of each old one."""
    found: dict[str, str] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def install() -> None:
    """Let old paths be imported from now on. Idempotent."""
    # Before the finder of files: an old package has the new one's __path__, where that finder would load a second copy.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def new_path(old: str, moved: Mapping[str, str]) -> str | None:
    """Return where a module is now; None if it has not moved."""
    if old in moved:
        return moved[old]
    package, _, name = old.rpartition(".")
    new_package = new_path(package, moved) if package else None
    return None if new_package is None else f"{new_package}.{name}"


class _Finder(MetaPathFinder):
    _table: Mapping[str, str] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith(_PREFIX):
            return None
        if self._table is None:
            self._table = table()
        found = new_path(fullname, self._table)
        new = None if found is None else importlib.util.find_spec(found)
        if new is None:
            return None
        warnings.warn(
            f"{fullname} is {found} now, and the old path goes with the next release; import {found}",
            DeprecationWarning,
            stacklevel=2,
        )
        spec = ModuleSpec(
            fullname, _Loader(new), origin=new.origin, is_package=new.submodule_search_locations is not None
        )
        if new.submodule_search_locations is not None:
            spec.submodule_search_locations = list(new.submodule_search_locations)
        return spec


class _Loader(Loader):
    """Gives the module of the new path under the old one."""

    def __init__(self, new: ModuleSpec) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        del spec
        module = importlib.import_module(self._new.name)
        # The import system writes the old path's spec over this module's own; exec_module puts it back.
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> Any:
        """Return the code of the new path's file; ``python -m`` asks for it."""
        del fullname
        loader: Any = self._new.loader
        return loader.get_code(self._new.name)
