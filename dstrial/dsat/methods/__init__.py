"""The search methods of dsat, by name."""

from __future__ import annotations

from dstrial.dsat.methods.base import ConfigSearch, MethodOptions
from dstrial.dsat.methods.predict import PredictSearch
from dstrial.dsat.methods.random_structures import AshaSearch, BinarySearch, RandomConfigSearch
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.space import Space

PREDICT = "predict"  # the default method, which needs dry runs and a benchmark of the machine
_RANDOM = {"asha": AshaSearch, "binary": BinarySearch, "random": RandomConfigSearch}
METHOD_NAMES = (PREDICT, *_RANDOM)


def search_method(
    name: str, space: Space, options: MethodOptions, inputs: PredictInputs | None = None
) -> ConfigSearch:
    """Return a new search method; without dry runs, ``asha`` replaces ``predict``."""
    if name == PREDICT and inputs is not None and inputs.runs:
        return PredictSearch(space, options, inputs)
    return _RANDOM["asha" if name == PREDICT else name](space, options)
