"""Patch paths and classes of Determined in each Python process of a task.

Python imports this module at its start because the module's directory is first on PYTHONPATH. The module then
imports the ``sitecustomize`` that it shadows. The patches are applied when ``determined`` is imported.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.realpath(os.path.dirname(__file__))
_ALLOCATION = os.environ.get("DSTRIAL_ALLOCATION_DIR", "")


def _load(name):
    """Load a module of dstrial from its file: dstrial may not be installed here."""
    path = os.path.join(_HERE, *[os.pardir] * 3, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_dstrial_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_hidden():
    elsewhere = [path for path in sys.path if os.path.realpath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _ALLOCATION:
    _paths = _load("harness_paths")
    _storage = _load("storage_guard")
    _guard = _storage.guard_of_environment(_ALLOCATION)
    _paths.install(_paths.patches_of_allocation(_ALLOCATION, _guard, _storage.StorageGuard("", _ALLOCATION)))
if os.environ.get("DSTRIAL_DETERMINED_IMPORTS", "0") != "0":
    _load("determined_imports").install_if_asked()
_import_hidden()
