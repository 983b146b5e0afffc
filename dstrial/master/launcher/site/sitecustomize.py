"""Moves the paths that Determined's harness reads into the directory of this process's allocation.

Python imports this module at its start because its directory is first on PYTHONPATH. It imports the
``sitecustomize`` that it hides, and changes ``determined`` only when (and if) that is imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.realpath(os.path.dirname(__file__))
_ALLOCATION = os.environ.get("DSTRIAL_ALLOCATION_DIR", "")


def _patch_info(module):
    info = os.path.join(_ALLOCATION, "info")
    files = {
        "RendezvousInfo": "rendezvous.json",
        "TrialInfo": "trial.json",
        "ResourcesInfo": "resources.json",
        "ClusterInfo": "cluster.json",
    }
    for class_name, file_name in files.items():
        cls = getattr(module, class_name, None)
        for method_name in ("_from_file", "_to_file"):
            method = getattr(cls, method_name, None)
            function = getattr(method, "__func__", method)
            if function is not None and function.__defaults__:
                function.__defaults__ = (os.path.join(info, file_name), *function.__defaults__[1:])


def _patch_constants(module):
    logs = os.path.join(_ALLOCATION, "logs")
    module.CONTAINER_STDOUT = os.path.join(logs, "stdout.log")
    module.CONTAINER_STDERR = os.path.join(logs, "stderr.log")
    module.MANAGED_TRAINING_MODEL_COPY = os.path.join(_ALLOCATION, "workdir")


_PATCHES = {"determined._info": _patch_info, "determined.constants": _patch_constants}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_PATCHES`` as usual and patches each right after it has been executed."""

    def find_spec(self, name, path, target=None):
        patch = _PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, patch)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, patch):
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._patch(module)


def _import_hidden():
    elsewhere = [path for path in sys.path if os.path.realpath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _ALLOCATION:
    sys.meta_path.insert(0, _Finder())
_import_hidden()
