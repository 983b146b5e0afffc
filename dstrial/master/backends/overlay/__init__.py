"""Tasks' environments over the base's: shared by digest, unchanged while in use.

``backends.local`` starts ``start.main`` with the base's Python, which may have no dstrial: these modules need only the standard
library and import each other by relative names. A copy of ``__init__``, ``base``, ``store`` and ``pip_guard`` lies in every
overlay as ``_dstrial_overlay``, where a ``.pth`` file calls :func:`guard_pip` at each start of its Python.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PIP_MAIN = "pip._internal.cli.main"


class _Finder:
    """Wraps pip's ``main``, through which every pip command goes, when it is imported.

    Source: pip 21 to 25, ``pip/__main__.py`` and the console script ``pip``.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del target
        if fullname != _PIP_MAIN:
            return None
        import importlib.machinery

        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                from .pip_guard import guarded

                execute(module)
                module.main = guarded(module.main)

            loader.exec_module = exec_module
        return spec


def guard_pip() -> None:
    """Guard this Python's ``pip install``; costs nothing until pip is imported."""
    sys.meta_path.insert(0, _Finder())
