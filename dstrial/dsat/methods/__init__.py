"""The search methods of dsat, by name."""

from __future__ import annotations

from collections.abc import Callable

from dstrial.dsat.gates import Gates
from dstrial.dsat.methods.asha import AshaSearch
from dstrial.dsat.methods.binary import BinarySearch
from dstrial.dsat.methods.method import MethodOptions, SearchMethod
from dstrial.dsat.methods.random import RandomSearch
from dstrial.dsat.space import Space
from dstrial.errors import SearchError

METHOD_NAMES = ("predict", "asha", "binary", "random")

_METHODS: dict[str, Callable[[Space, MethodOptions, Gates], SearchMethod]] = {
    "asha": AshaSearch,
    "binary": BinarySearch,
    "random": RandomSearch,
}


def search_method(name: str, space: Space, options: MethodOptions, gates: Gates) -> SearchMethod:
    """Make a search method.

    Raises:
        SearchError: there is none of that name.
    """
    if name == "predict":
        raise SearchError(
            "the search method is 'predict', which this release does not have yet; expected one of "
            f"{', '.join(_METHODS)}. Choose one of them."
        )
    if name not in _METHODS:
        raise SearchError(
            f"the search method is {name!r}; expected one of {', '.join(_METHODS)}, the methods of this release. "
            "Choose one of them."
        )
    return _METHODS[name](space, options, gates)
