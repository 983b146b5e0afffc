"""The table of dsat's search methods, which all else reads."""

from __future__ import annotations

from dstrial.dsat.methods.base import MethodEntry, MethodOptions, SearchMethod
from dstrial.dsat.methods.binary import ASHA, BINARY
from dstrial.dsat.methods.predict import PREDICT
from dstrial.dsat.methods.random import RANDOM
from dstrial.dsat.predictor.profiles import PredictInputs
from dstrial.dsat.space.filters import Gates
from dstrial.dsat.space.space import Space
from dstrial.errors import SearchError

METHODS: dict[str, MethodEntry] = {entry.name: entry for entry in (PREDICT, ASHA, BINARY, RANDOM)}
"""Name -> method, the default one first."""
METHOD_NAMES = tuple(METHODS)


def search_method(
    name: str, space: Space, options: MethodOptions, gates: Gates, inputs: PredictInputs | None = None
) -> SearchMethod:
    """Make a search method.

    Args:
        name: one of ``METHOD_NAMES``.
        space: what is searched.
        options: of the search.
        gates: what need not be measured.
        inputs: what a method that predicts starts from; the others do not need it.

    Raises:
        SearchError: there is none of that name.
    """
    if name not in METHODS:
        raise SearchError(
            f"the search method is {name!r}; expected one of {', '.join(METHOD_NAMES)}, the methods of this release. "
            "Choose one of them."
        )
    return METHODS[name].make(space, options, gates, inputs)
