"""Load checkpoint files written by torch without running code in them.

Before a checkpoint is restored, ``unlisted_in`` scans all of its files. Then dstrial and DeepSpeed's checkpoint engine load
files with torch's ``weights_only`` unpickler and the classes of ``LISTED``. From a trusted checkpoint (signed by this account,
or trusted by the user) unlisted classes are loaded as well.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import _weights_only_unpickler

from dstrial.checkpoint.pickle_scan import PickleContents, read_pickle
from dstrial.engine.deepspeed_internals.optimizers import (
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
)
from dstrial.engine.parameter_names import with_names_of
from dstrial.errors import CheckpointDamagedError, UntrustedCheckpointError

_NUMPY_NAMES = frozenset(
    {
        "numpy.dtype",
        "numpy.ndarray",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.dtypes.UInt32DType",
    }
)
"""NumPy names that transformers and accelerate allow torch to load, for random states; see ``PickleContents.has_odd_dtype``."""

_PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})

_NEVER_READ = frozenset({"training_args.bin"})
"""Files that transformers' Trainer writes for information; neither the Trainer (4.56, 5.23) nor dstrial reads them."""

_OTHER_FORM = "a pickle of another form than torch writes"
_TORCHSCRIPT = "a TorchScript archive"
# Texts that an error message shows instead of names of classes.

_MAX_SHOWN = 5  # maximum number of class names in an error message

_ARCHIVE = b"PK\x03\x04"
"""First bytes of torch's format since 1.6 (``torch.serialization._is_zipfile``)."""

_lock = threading.Lock()  # torch's list of classes is global


def load(
    path: pathlib.Path,
    *,
    map_location: Any = "cpu",
    mmap: bool = False,
    trusts_code: bool = False,
) -> Any:
    """Load a file that ``torch.save`` has written; by default without running code.

    Args:
        path: the file.
        map_location: as for ``torch.load``.
        mmap: whether tensors are memory-mapped instead of read.
        trusts_code: whether classes outside ``LISTED`` may be loaded, which can run code.

    Raises:
        UntrustedCheckpointError: the file contains classes or functions outside ``LISTED``, and ``trusts_code`` is False.
        RuntimeError, EOFError, OSError, pickle.UnpicklingError: the file cannot be read.
    """
    unlisted = unlisted_names(contents_of(path))
    if not unlisted:
        try:
            with _torch_listed():
                return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
        except pickle.UnpicklingError:
            # All names are listed, but torch's unpickler cannot read the format, for example because of the pickle protocol.
            unlisted = (_OTHER_FORM,)
    if not trusts_code:
        raise untrusted({str(path): unlisted})
    return torch.load(path, map_location=map_location, mmap=mmap, weights_only=False)


def load_mapped(path: pathlib.Path, *, holds: str, trusts_code: bool = False) -> dict[str, Any]:
    """Load a file of ``torch.save`` on the CPU, with memory-mapped tensors.

    ``holds`` describes the file's content for error messages. If ``trusts_code``, classes outside ``LISTED`` may be loaded,
    which can run code.

    Raises:
        CheckpointDamagedError: the file is missing or cannot be read.
        UntrustedCheckpointError: the file contains classes outside ``LISTED``, and ``trusts_code`` is False.
        ImportError, AttributeError: ``trusts_code`` is True, but a class in the file cannot be imported in this process.
    """
    try:
        loaded: dict[str, Any] = load(path, mmap=True, trusts_code=trusts_code)
    except FileNotFoundError:
        raise CheckpointDamagedError(
            f"{path} is missing; expected {holds}. Restore it, or use another checkpoint."
        ) from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointDamagedError(
            f"{path} cannot be read ({error}); expected {holds}, as torch has written it. Use another checkpoint."
        ) from error
    return loaded


def untrusted(
    found: Mapping[str, Iterable[str]], fix: str = "Add --trust-code if you trust who wrote it."
) -> UntrustedCheckpointError:
    """Return the exception to raise for files whose loading could run code.

    ``found`` maps each file to its classes and functions outside ``LISTED``; the message names them. ``fix`` is the message's
    last sentence.
    """
    files = "; ".join(f"{name} holds {_shown(list(names))}" for name, names in found.items())
    return UntrustedCheckpointError(
        f"{files}; expected values, tensors and the classes that DeepSpeed and dstrial write into checkpoints, for anything "
        f"else could run code when it is loaded. {fix}"
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (
        f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    )


def contents_of(path: pathlib.Path) -> PickleContents:
    """Return the classes and functions that a file's pickles name; import nothing.

    If the file is not a pickle, the result is empty. If the scan of a pickle fails, the names before the failure are returned.
    """
    if _head(path) == _ARCHIVE:  # torch distinguishes its two formats in the same way
        try:
            # Use torch's own reader, because an archive can be crafted to show two readers different contents.
            reader = torch._C.PyTorchFileReader(str(path))
            if "constants.pkl" in reader.get_all_records():  # torch.load runs it unless weights_only is true
                return PickleContents((_TORCHSCRIPT,))
            content = reader.get_record("data.pkl")
        except RuntimeError:
            return PickleContents(())
        return read_pickle(io.BytesIO(content))
    if _is_torch_tar(path):
        return PickleContents((_OTHER_FORM,))
    found = []
    with path.open("rb") as stream:
        # torch's old format: a number, a version, a description, the value, the storages' keys; then bytes.
        for _ in range(5):
            at = stream.tell()
            found.append(read_pickle(stream))
            if stream.tell() == at:
                break
    return PickleContents(
        tuple(sorted({name for one in found for name in one.names})),
        any(one.makes_objects for one in found),
        any(one.has_odd_dtype for one in found),
    )


def unlisted_names(contents: PickleContents, *, may_hold_arrays: bool = False) -> tuple[str, ...]:
    """Return the classes and functions of a file that could run code when loaded.

    These are the names in ``contents`` that neither torch's ``weights_only`` unpickler nor ``LISTED`` allows. If
    ``may_hold_arrays``, the names that plain numeric NumPy arrays need are allowed too.
    """
    known = _weights_only_unpickler._get_allowed_globals()
    unlisted = [name for name in contents.names if name not in known and name not in LISTED]
    if may_hold_arrays and not contents.has_odd_dtype:
        unlisted = [name for name in unlisted if name not in _NUMPY_NAMES]
    return tuple(unlisted)


def unlisted_in(root: pathlib.Path, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return file -> its classes and functions outside ``LISTED``; omit safe files.

    ``names`` are files relative to ``root``. Files that a resume never unpickles (see ``may_be_unpickled``) are skipped.

    A trial may load pickles with any file name. Pickles are therefore also recognised by content: by a pickle or torch header,
    or, without a header (protocols 0 and 1), by objects that the pickle creates.
    """
    found = {}
    for name in names:
        if not may_be_unpickled(name):
            continue
        with contextlib.suppress(OSError):
            contents = contents_of(root / name)
            is_pickle = contents.makes_objects or pathlib.PurePosixPath(name).suffix in _PICKLE_SUFFIXES
            if not (is_pickle or _has_pickle_header(root / name)):
                continue
            # A file that dstrial does not load itself may contain a library's random states, which are NumPy arrays.
            is_ours = name.startswith("dstrial_rank")
            unlisted = unlisted_names(contents, may_hold_arrays=not is_ours)
            if unlisted:
                found[name] = unlisted
    return found


def may_be_unpickled(name: str) -> bool:
    """Return whether a resume might unpickle a file; ``name`` is its path.

    The path is relative to the checkpoint. False for the copy of the trial's code, and for files that no library reads.
    """
    return pathlib.PurePosixPath(name).name not in _NEVER_READ and not name.startswith("code/")


def _head(path: pathlib.Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(4)


def _has_pickle_header(path: pathlib.Path) -> bool:
    """Return whether a file is a torch archive or .tar, or a pickle of protocol >= 2."""
    head = _head(path)
    is_plain = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL
    return head == _ARCHIVE or is_plain or _is_torch_tar(path)


def _is_torch_tar(path: pathlib.Path) -> bool:
    """Return whether a file is a .tar of pickles, torch's format before 0.1.10."""
    with contextlib.suppress(tarfile.TarError), tarfile.open(path, "r:") as tar:
        return "storages" in tar.getnames()
    return False


@contextlib.contextmanager
def _torch_listed() -> Iterator[None]:
    with _lock:
        known: set[Any] = set(torch.serialization.get_safe_globals())
        added: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
            (used, name) for name, used in LISTED.items() if (used, name) not in known
        ]
        with torch.serialization.safe_globals(added):
            yield


def bind_checkpoint_engine(engine: Any) -> None:
    """Make a DeepSpeed engine read checkpoint files with ``load`` of this module.

    ``load`` rejects classes outside ``LISTED``, except inside ``vouched_for(..., trusts_code=True)``. DeepSpeed 0.19.8 itself
    would load any class (``weights_only=False``, ``torch_checkpoint_engine.py:37``). ``torch.compile``'s prefix is added to or
    removed from loaded parameter names to match the engine's module. Only the method ``load`` is replaced, because DeepSpeed
    depends on the class of the checkpoint engine.
    """
    own = engine.checkpoint_engine
    if own is None:
        return

    def load_listed(path: str, map_location: Any = None) -> Any:
        trusts_code = getattr(own, _VOUCHED, False)
        loaded = load(pathlib.Path(path), map_location=map_location, trusts_code=trusts_code)
        return with_names_of(engine.module, loaded)

    own.load = load_listed


_VOUCHED = "dstrial_trusts_code"  # attribute of a bound checkpoint engine


@contextlib.contextmanager
def vouched_for(engines: Sequence[Any], *, trusts_code: bool) -> Iterator[None]:
    """Let engines load any class inside the block, if ``trusts_code`` is True.

    If False, the block changes nothing: engines load only the classes of ``LISTED``.
    """
    owns = [engine.checkpoint_engine for engine in engines if engine.checkpoint_engine is not None]
    for own in owns:
        setattr(own, _VOUCHED, trusts_code)
    try:
        yield
    finally:
        for own in owns:
            setattr(own, _VOUCHED, False)


def make_plain_config(engine: Any) -> None:
    """Replace an engine's config object by plain dictionaries, which load safely.

    DeepSpeed saves the config object in checkpoints (``ds_config``). A user's class such as ``AttrDict`` would then be in every
    checkpoint. The user's object is not changed.
    Source: DeepSpeed 0.19.8 ``DeepSpeedEngine._save_checkpoint``.
    """
    if isinstance(engine.config, Mapping):
        engine.config = _plain(engine.config)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _zero_stage(value: Any) -> ZeroStageEnum:
    return ZeroStageEnum(int(value))


LISTED: Mapping[str, Any] = {
    # Objects with plain numbers in attributes. Their constructors only store arguments; they have neither __setstate__ nor
    # property setters. ZeRO and BF16_Optimizer save the object itself (stage_1_and_2.py:3551, stage3.py:3439).
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    # A function instead of the class, because a pickled state could change the class's members, which are global.
    "deepspeed.runtime.zero.config.ZeroStageEnum": _zero_stage,
    # A dataclass of two numbers, without __post_init__ (param_slice_mappings of ZeRO's and BF16_Optimizer's files).
    "deepspeed.utils.tensor_fragment.fragment_address": fragment_address,
}
"""Full name in a pickle -> class or function that the unpickler uses for this name.

torch's ``weights_only`` unpickler lets a file do three things with a listed class: call it with any arguments, make an instance
without calling it, and give an instance any state (``torch/_weights_only_unpickler.py``: REDUCE, NEWOBJ, BUILD, torch 2.13). A
class is listed only if all three are harmless; otherwise a function or class of this module replaces the class.
"""
