"""Call the user's callbacks in the order of ``build_callbacks``."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from determined import pytorch, util

logger = logging.getLogger("dstrial.loop")


class Callbacks:
    """Calls a method of all user callbacks, in the order of ``build_callbacks``.

    Args:
        callbacks: name -> callback; the names are the keys of the callbacks' states in checkpoints.
    """

    def __init__(self, callbacks: Mapping[str, pytorch.PyTorchCallback]) -> None:
        self._callbacks = dict(callbacks)
        self._epoch_start_takes_idx = {
            name: bool(inspect.signature(callback.on_training_epoch_start).parameters)
            for name, callback in self._callbacks.items()
        }
        if self.overrides("on_checkpoint_end"):
            warnings.warn(
                "the on_checkpoint_end callback is deprecated; use on_checkpoint_write_end",
                FutureWarning,
                stacklevel=2,
            )

    @property
    def is_empty(self) -> bool:
        return not self._callbacks

    def overrides(self, method: str) -> bool:
        """Return whether the class of any callback overrides ``method``."""
        return any(
            util.is_overridden(getattr(callback, method), pytorch.PyTorchCallback)
            for callback in self._callbacks.values()
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        for callback in self._callbacks.values():
            getattr(callback, method)(*args, **kwargs)

    def epoch_start(self, epoch_idx: int) -> None:
        """Call ``on_training_epoch_start``, with ``epoch_idx`` if the method takes it."""
        for name, callback in self._callbacks.items():
            if self._epoch_start_takes_idx[name]:
                callback.on_training_epoch_start(epoch_idx)
            else:
                callback.on_training_epoch_start()

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
            elif util.is_overridden(callback.load_state_dict, pytorch.PyTorchCallback):
                logger.warning("the checkpoint holds no state for the callback %r, which starts anew", name)
