"""The search methods of dsat, by name."""

from __future__ import annotations

from dstrial.dsat.methods.base import ConfigSearch, MethodEntry, MethodOptions
from dstrial.dsat.methods.predict import PREDICT
from dstrial.dsat.methods.random_structures import ASHA, BINARY, RANDOM
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.space.filters import Filters
from dstrial.dsat.space.space import Space
from dstrial.errors import SearchError

METHODS: dict[str, MethodEntry] = {entry.name: entry for entry in (PREDICT, ASHA, BINARY, RANDOM)}
"""Name -> method; the first one is the default."""
METHOD_NAMES = tuple(METHODS)


def search_method(
    name: str, space: Space, options: MethodOptions, filters: Filters, inputs: PredictInputs | None = None
) -> ConfigSearch:
    """Create a search method; ``asha`` replaces ``predict`` if there are no dry runs."""
    if name not in METHODS:
        raise SearchError(
            f"the search method is {name!r}; expected one of {', '.join(METHOD_NAMES)}, the methods of this release. "
            "Choose one of them."
        )
    is_blind = METHODS[name].predicts and not (inputs and inputs.runs)
    return (ASHA if is_blind else METHODS[name]).make(space, options, filters, inputs)
