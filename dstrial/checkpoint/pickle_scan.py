"""What a pickle would import and call, found out without doing so.

The standard library's own unpickler runs, but every class and function that the pickle names is replaced by a stand-in that
does nothing. So all protocols are understood, and nothing is imported.
"""

from __future__ import annotations

import _compat_pickle
import contextlib
import dataclasses
import pickle
import re
from typing import Any, BinaryIO

_DTYPE = "numpy.dtype"

_PLAIN_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""Numbers: neither objects, nor records, nor raw bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PickleContents:
    """What a pickle needs to be loaded.

    Attributes:
        names: of every class and function, as ``module.name``, sorted.
        has_odd_dtype: whether it makes a NumPy type that is no plain number, or changes one in a way that NumPy's own pickles
            do not: an array of it reads its elements as addresses, which is a way into the process.
    """

    names: tuple[str, ...]
    has_odd_dtype: bool = False


def read_pickle(stream: BinaryIO) -> PickleContents:
    """Read a pickle up to its end or the first invalid place."""
    machine = _Inert(stream)
    with contextlib.suppress(
        Exception
    ):  # hostile bytes raise anything; what was named before it is what counts
        machine.load()
    return PickleContents(tuple(sorted(machine.named)), any(map(_is_odd, machine.dtypes)))


class _StandIn:
    """Stands in for whatever a pickle names: it can be made, called, filled, set."""

    name = ""
    made: list[_StandIn] | None = None

    def __new__(cls, *args: Any, **_options: Any) -> _StandIn:
        made = super().__new__(cls)
        made.args, made.states = args, []
        if cls.made is not None:
            cls.made.append(made)
        return made

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.args: tuple[Any, ...]
        self.states: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __call__(self, *_args: Any, **_options: Any) -> _StandIn:
        return self

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


# The machine in Python, for that in C allocates as much as a pickle says that its memo is long.
class _Inert(pickle._Unpickler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, encoding="latin-1")
        self.named: set[str] = set()
        self.dtypes: list[_StandIn] = []

    def find_class(self, module: str, name: str) -> type[_StandIn]:
        # torch writes protocol 2, in which pickle gives Python 3's modules their names of Python 2.
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        elif module in _compat_pickle.IMPORT_MAPPING:
            module = _compat_pickle.IMPORT_MAPPING[module]
        full = f"{module}.{name}"
        self.named.add(full)
        return type("StandIn", (_StandIn,), {"name": full, "made": self.dtypes if full == _DTYPE else None})

    def persistent_load(self, pid: Any) -> _StandIn:
        """Return a stand-in for a storage, which torch keeps beside the pickle."""
        del pid
        return _StandIn()

    def get_extension(self, code: int) -> None:
        """Refuse classes registered by number: no checkpoint's writer registers any."""
        self.named.add(f"copyreg extension {code}")
        raise pickle.UnpicklingError("an extension code")


def _is_odd(dtype: _StandIn) -> bool:
    kind = dtype.args[0] if dtype.args else None
    if not isinstance(kind, str) or _PLAIN_DTYPE.fullmatch(kind) is None:
        return True
    return any(not _is_plain_state(state) for state in dtype.states)


def _is_plain_state(state: Any) -> bool:
    """Return whether a state is a plain NumPy number type's: version 3 and byte order."""
    if not isinstance(state, tuple) or len(state) != 8:
        return False
    version, order, subtype, names, fields, size, alignment, flags = state
    is_number = isinstance(order, str) and order in "<>|=" and len(order) == 1
    return bool(
        is_number
        and (subtype, names, fields) == (None, None, None)
        and (version, size, alignment, flags) == (3, -1, -1, 0)
    )
