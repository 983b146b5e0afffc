"""A search's random numbers: NumPy's legacy MT19937, as in Determined's searchers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

_MAX_TRIAL_SEED = 2**31


class SearchRandom:
    """The random generator of a search; seeds are 0 to 2^32 - 1."""

    def __init__(self, seed: int) -> None:
        # Imported here: a master starts 20% faster without numpy.
        import numpy as np

        self._state = np.random.RandomState(seed)

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> SearchRandom:
        import numpy as np

        random = cls(0)
        key = np.array(snapshot["key"], dtype=np.uint32)
        random._state.set_state(("MT19937", key, int(snapshot["position"]), 0, 0.0))
        return random

    def snapshot(self) -> dict[str, Any]:
        state: Any = self._state.get_state(legacy=True)
        return {"key": [int(word) for word in state[1]], "position": int(state[2])}

    def integer_below(self, bound: int) -> int:
        """Return a random integer from 0 to ``bound - 1``; ``bound`` 1 draws no number."""
        # Rejection sampling with the smallest bit mask that covers the bound.
        highest = bound - 1
        if highest <= 0:
            return 0
        mask = (1 << highest.bit_length()) - 1
        num_words = (highest.bit_length() + 31) // 32
        while True:
            drawn = int.from_bytes(self._state.bytes(4 * num_words), "little") & mask
            if drawn <= highest:
                return drawn

    def uniform(self, low: float, high: float) -> float:
        """Return a random float in ``[low, high)`` with 53 random bits."""
        return low + (high - low) * float(self._state.random_sample())

    def request_id(self) -> str:
        return str(uuid.UUID(bytes=self._state.bytes(16), version=4))

    def trial_seed(self) -> int:
        return self.integer_below(_MAX_TRIAL_SEED)
