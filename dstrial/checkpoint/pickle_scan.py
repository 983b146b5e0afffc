"""List the classes and functions that a pickle would import, without importing.

The standard library's unpickler is run with an inert stub in place of every class and function that the pickle names.
"""

from __future__ import annotations

import _compat_pickle
import contextlib
import dataclasses
import pickle
import re
from typing import Any, BinaryIO, ClassVar

_DTYPE = "numpy.dtype"
_SHARED_INSTANCES = {
    "deepspeed.runtime.zero.config.ZeroStageEnum"
}  # enumerations, whose members the process shares

_PLAIN_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""Names of numeric NumPy dtypes; excludes objects, records and raw bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PickleContents:
    """The classes and functions that a pickle imports when it is loaded.

    Attributes:
        names: every class and function that the pickle names, as ``module.name``, sorted.
        makes_objects: whether the pickle calls any of ``names``. False for other data that only by chance parses as a pickle.
        has_odd_dtype: whether the pickle makes a NumPy dtype that is not a plain number, or sets a dtype's state in an unusual
            way. Arrays of such a dtype can treat data as addresses, which allows code execution.
    """

    names: tuple[str, ...]
    makes_objects: bool = False
    has_odd_dtype: bool = False


def read_pickle(stream: BinaryIO) -> PickleContents:
    """Return the contents of a pickle, up to its end or the first invalid opcode."""
    machine = _Inert(stream)
    # An invalid pickle may raise any error; the names before the error are returned.
    with contextlib.suppress(Exception):
        machine.load()
    dtypes = (stub for stub in machine.made if stub.name == _DTYPE)
    return PickleContents(tuple(sorted(machine.named)), bool(machine.made), any(map(_is_odd, dtypes)))


class _Stub:
    """Stub for any class or function; supports all operations of pickles as no-ops."""

    name = ""
    made: ClassVar[list[_Stub]] = []

    def __new__(cls, *args: Any, **_options: Any) -> _Stub:
        made = super().__new__(cls)
        made.args, made.states = args, []
        cls.made.append(made)
        return made

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.args: tuple[Any, ...]
        self.states: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __call__(self, *_args: Any, **_options: Any) -> _Stub:
        return self

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


# The base is the unpickler written in Python: the one in C allocates as much memory for its memo as the pickle requests.
class _Inert(pickle._Unpickler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, encoding="latin-1")
        self.named: set[str] = set()
        self.made: list[_Stub] = []

    def find_class(self, module: str, name: str) -> type[_Stub]:
        # torch writes pickle protocol 2, which has module names of Python 2.
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        elif module in _compat_pickle.IMPORT_MAPPING:
            module = _compat_pickle.IMPORT_MAPPING[module]
        full = f"{module}.{name}"
        self.named.add(full)
        return type("Stub", (_Stub,), {"name": full, "made": self.made})

    def load_build(self) -> None:
        """Record a pickle's change to a shared object (a class or enumeration member)."""
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(changed, type) or getattr(changed, "name", "") in _SHARED_INSTANCES:
            self.named.add(f"a new state of {getattr(changed, 'name', changed)}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}

    def persistent_load(self, pid: Any) -> _Stub:
        """Return a stub for a tensor's storage, which torch stores outside the pickle."""
        del pid
        return _Stub()

    def get_extension(self, code: int) -> None:
        """Reject codes of ``copyreg``'s extension registry, which no checkpoint uses."""
        self.named.add(f"copyreg extension {code}")
        raise pickle.UnpicklingError("an extension code")


def _is_odd(dtype: _Stub) -> bool:
    kind = dtype.args[0] if dtype.args else None
    if not isinstance(kind, str) or _PLAIN_DTYPE.fullmatch(kind) is None:
        return True
    return any(not _is_plain_state(state) for state in dtype.states)


def _is_plain_state(state: Any) -> bool:
    """Return whether the state of a pickled NumPy dtype only sets a byte order."""
    if not isinstance(state, tuple) or len(state) != 8:
        return False
    version, order, subtype, names, fields, size, alignment, flags = state
    is_number = isinstance(order, str) and order in "<>|=" and len(order) == 1
    return bool(
        is_number
        and (subtype, names, fields) == (None, None, None)
        and (version, size, alignment, flags) == (3, -1, -1, 0)
    )
