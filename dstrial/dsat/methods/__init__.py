"""The search methods of dsat, by name."""

from __future__ import annotations

from collections.abc import Callable

from dstrial.dsat.gates import Gates
from dstrial.dsat.inputs import PredictInputs
from dstrial.dsat.methods.binary import AshaSearch, BinarySearch
from dstrial.dsat.methods.method import MethodOptions, SearchMethod
from dstrial.dsat.methods.predict import PredictSearch
from dstrial.dsat.methods.random import RandomSearch
from dstrial.dsat.space import Space
from dstrial.errors import SearchError

METHOD_NAMES = ("predict", "asha", "binary", "random")

_OTHERS: dict[str, Callable[[Space, MethodOptions, Gates], SearchMethod]] = {
    "asha": AshaSearch,
    "binary": BinarySearch,
    "random": RandomSearch,
}


def search_method(
    name: str, space: Space, options: MethodOptions, gates: Gates, inputs: PredictInputs | None = None
) -> SearchMethod:
    """Make a search method.

    Args:
        name: one of ``METHOD_NAMES``.
        space: what is searched.
        options: of the search.
        gates: what need not be measured.
        inputs: what ``predict`` starts from; the others do not need it.

    Raises:
        SearchError: there is none of that name.
    """
    if name == "predict":
        return PredictSearch(space, options, gates, inputs)
    if name not in _OTHERS:
        raise SearchError(
            f"the search method is {name!r}; expected one of {', '.join(METHOD_NAMES)}, the methods of this release. "
            "Choose one of them."
        )
    return _OTHERS[name](space, options, gates)
