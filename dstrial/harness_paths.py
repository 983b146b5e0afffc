"""Replace fixed paths in Determined's harness by private directories.

An allocation is the set of processes that the master starts for one attempt of a trial or task. In these processes,
``sitecustomize`` loads this file by path, because their Python environment may lack dstrial. The file therefore imports only
modules of the standard library that load quickly. In all other processes, importing dstrial only changes the path of
TensorBoard files.
"""

# Importing pathlib would cost another 5 ms.
# ruff: noqa: PTH103, PTH118, PTH120

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any, TypeAlias

    from dstrial.storage_guard import StorageGuard

    Patch: TypeAlias = Callable[[ModuleType], None]

ENDING_NAME = "ending.json"
"""Name of the file in an allocation's directory that says whether a rank on another host failed first."""
ALLOCATION_DIR_VARIABLE = "DSTRIAL_ALLOCATION_DIR"
"""Environment variable: path of the allocation's private directory."""
BASE_PYTHON_VARIABLE = "DSTRIAL_BASE_PYTHON"
"""Environment variable: path of the Python interpreter of the master's environment."""
WARM_VARIABLE = "DSTRIAL_WARM"
"""Environment variable: 0 starts all ranks as new processes instead of forks."""


def patches_of_allocation(
    allocation: str, guard: StorageGuard | None = None, notes: StorageGuard | None = None
) -> dict[str, Patch]:
    """Return the patches for a process of an allocation: module name -> function.

    ``install`` calls each function with the module as the argument.

    Args:
        allocation: path of the allocation's private directory.
        guard: checks that the checkpoint storage is present; None if the storage has no marker file.
        notes: records checkpoints while they are being saved to object storage; None to record nothing.
    """
    python = os.environ.get(BASE_PYTHON_VARIABLE, "")
    is_base = os.path.dirname(os.path.dirname(python)) == sys.prefix
    return {
        # Patch pip only if this process uses the master's Python environment.
        **({"pip._internal.cli.main": _patch_pip} if is_base else {}),
        "determined._info": lambda module: _patch_info(module, allocation),
        "determined.constants": lambda module: _patch_constants(module, allocation),
        "determined.ipc": lambda module: _patch_ipc(module, allocation),
        "determined.tensorboard.build": lambda module: _move_tensorboard(
            module, lambda: os.path.join(allocation, "tensorboard")
        ),
        "determined.tensorboard.shared": lambda module: _patch_tensorboard_shared(module, guard),
        "determined.common.storage.base": lambda module: _patch_storage_base(module, guard, notes),
        "determined.core._checkpoint": lambda module: _patch_checkpoint(module, guard, notes),
        "determined.common.storage.shared": lambda module: _patch_storage_shared(module, guard),
    }


def _checked(guard: StorageGuard | None, base_path: object) -> StorageGuard | None:
    """Check that the storage with path ``base_path`` is present; return ``guard``.

    None, without a check, if ``guard`` is None or guards another path.

    Raises:
        StorageGoneError: the storage is missing.
    """
    if guard is None or not isinstance(base_path, str) or not guard.covers(base_path):
        return None
    guard.check()
    return guard


def _patch_info(module: ModuleType, allocation: str) -> None:
    info = os.path.join(allocation, "info")
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


def _patch_constants(module: Any, allocation: str) -> None:
    logs = os.path.join(allocation, "logs")
    module.CONTAINER_STDOUT = os.path.join(logs, "stdout.log")
    module.CONTAINER_STDERR = os.path.join(logs, "stderr.log")
    module.MANAGED_TRAINING_MODEL_COPY = os.path.join(allocation, "model")


def _patch_ipc(module: Any, allocation: str) -> None:
    """Move the socket of Determined's launchers from /tmp to the temporary directory.

    In 0.38.1, ``launch/torch_distributed.py:61`` hard-codes /tmp, and ``ipc.PIDServer.close`` never deletes the socket.
    """
    read = module.read_pid_server_addr

    def read_pid_server_addr(addr: str) -> Any:
        if addr.startswith("/tmp/pid_server-"):  # noqa: S108 - the replaced path
            # A short name, because a socket path is limited to 107 bytes.
            addr = os.path.join(os.environ.get("TMPDIR") or allocation, "pid_server")
        return read(addr)

    module.read_pid_server_addr = read_pid_server_addr


def _patch_tensorboard_shared(module: Any, guard: StorageGuard | None) -> None:
    """Apply the umask to TensorBoard directories that Determined creates.

    In 0.38.1, ``tensorboard/shared.py:26`` creates them with mode 0777. If ``guard`` is not None, the storage is checked first.
    """
    cls = module.SharedFSTensorboardManager
    original, original_sync = cls.__init__, cls._sync_impl

    def __init__(self: Any, storage_path: str, base_path: Any, sync_path: Any, **options: Any) -> None:  # noqa: N807
        _checked(guard, str(storage_path))
        os.makedirs(os.path.join(storage_path, sync_path), exist_ok=True)
        original(self, storage_path, base_path, sync_path, **options)

    def _sync_impl(self: Any, path_info_list: Any) -> None:
        _checked(guard, str(self.storage_path))
        original_sync(self, path_info_list)

    cls.__init__, cls._sync_impl = __init__, _sync_impl


def _patch_storage_base(module: Any, guard: StorageGuard | None, notes: StorageGuard | None) -> None:
    """Apply the umask to storages that Determined creates; record checkpoint saves.

    In 0.38.1, ``common/storage/base.py:70`` creates storages with mode 0777. ``guard`` and ``notes`` are those of
    ``patches_of_allocation``.
    """
    cls = module.StorageManager
    original = cls.pre_store_path

    def pre_store_path(self: Any, dst: str) -> Any:
        if covering := _checked(guard, self._base_path):
            covering.note(dst)
        else:
            os.makedirs(self._base_path, exist_ok=True)
            if notes is not None and not self.store_path_is_direct_access():
                notes.note(dst)
        return original(self, dst)

    cls.pre_store_path = pre_store_path


def _patch_storage_shared(module: Any, guard: StorageGuard | None) -> None:
    """Make Determined's uploads and deletions fail if the storage is missing.

    In 0.38.1, ``common/storage/shared.py`` creates a missing storage at an upload, and ignores it at a deletion.
    """
    cls = module.SharedFSStorageManager
    original, original_delete = cls.upload, cls.delete

    def upload(self: Any, src: Any, dst: str, paths: Any = None) -> None:
        if covering := _checked(guard, self._base_path):
            covering.note(dst)
        original(self, src, dst, paths)

    def delete(self: Any, tgt: str, globs: list[str]) -> Any:
        _checked(guard, self._base_path)
        return original_delete(self, tgt, globs)

    cls.upload, cls.delete = upload, delete


def _patch_checkpoint(module: Any, guard: StorageGuard | None, notes: StorageGuard | None) -> None:
    """Check the storage before Determined reports a checkpoint to the master.

    After the report, delete the record that the checkpoint is being saved.
    """
    cls = module.CheckpointContext
    original = cls._report_checkpoint

    def _report_checkpoint(self: Any, storage_id: str, *args: Any, **options: Any) -> None:
        begun = _checked(guard, getattr(self._storage_manager, "_base_path", None)) or notes
        original(self, storage_id, *args, **options)
        if begun is not None:
            begun.forget(storage_id)

    cls._report_checkpoint = _report_checkpoint


def _patch_pip(module: Any) -> None:
    """Make ``pip install`` and ``pip uninstall`` fail in the master's environment.

    Commands with another target, such as ``--target``, are allowed.
    """
    original = module.main

    def main(args: list[str] | None = None) -> Any:
        words = sys.argv[1:] if args is None else args
        command = next((word for word in words if word in ("install", "uninstall", "download", "wheel")), "")
        elsewhere = ("--target", "-t", "--prefix", "--root", "--dry-run", "--python", "--help", "-h")
        goes_elsewhere = any(word.partition("=")[0] in elsewhere for word in words)
        if command not in ("install", "uninstall") or goes_elsewhere:
            return original(args)
        sys.stderr.write(
            f"error: pip {command} runs in {sys.prefix}, the environment of the master; expected an environment of the "
            "task's own. Put it into startup-hook.sh beside the model definition, or name a file of requirements "
            "in data.dstrial.requirements.\n"
        )
        return 1

    module.main = main


def _move_tensorboard(module: Any, directory: Callable[[], str]) -> None:
    """Make Determined put TensorBoard event files below ``directory()``, not /tmp.

    A configured ``base_path`` is not changed. ``module`` is ``determined.tensorboard.build``, which hard-codes /tmp (0.38.1,
    line 37): without a master, all accounts and runs of a machine share ``/tmp/tensorboard--0``.
    """
    original = module.get_base_path

    def get_base_path(checkpoint_config: dict[str, Any]) -> Any:
        if not checkpoint_config.get("base_path"):
            checkpoint_config = {**checkpoint_config, "base_path": directory()}
        return original(checkpoint_config)

    module.get_base_path = get_base_path


_private_directories: dict[int, str] = {}  # by process id, because a fork gets a directory of its own


def _private_directory() -> str:
    """Return this process's own temporary directory; create it at the first call.

    The directory is deleted when the process exits.
    """
    pid = os.getpid()
    if pid not in _private_directories:
        import atexit
        import shutil
        import tempfile

        _private_directories[pid] = path = tempfile.mkdtemp(prefix="dstrial-tensorboard-")

        def remove() -> None:
            if os.getpid() == pid:  # a forked child must not remove its parent's directory
                shutil.rmtree(path, ignore_errors=True)

        atexit.register(remove)
    return _private_directories[pid]


class _Finder:
    """Import finder that calls a module's patch right after the module's import."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, patch)  # type: ignore[assignment]  # duck-typed loader
        return spec


class _Loader:
    def __init__(self, loader: Any, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def install(patches: dict[str, Patch]) -> None:
    """Patch modules: imported ones immediately, others as soon as they are imported.

    ``patches`` maps a module's name to the function that patches the module.
    """
    for name, patch in patches.items():
        module = sys.modules.get(name)
        if module is not None:
            patch(module)
    sys.meta_path.insert(0, _Finder(patches))


def install_outside_of_allocations() -> None:
    """Move TensorBoard files out of /tmp, unless this process is in an allocation."""
    if not os.environ.get(ALLOCATION_DIR_VARIABLE):
        install(
            {"determined.tensorboard.build": lambda module: _move_tensorboard(module, _private_directory)}
        )
