"""Report forward, backward and step calls of DeepSpeed engines to a listener.

No other module patches methods of DeepSpeed's classes for measurements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from deepspeed import DeepSpeedEngine, PipelineEngine

from dstrial.engine.deepspeed_internals import optimizers
from dstrial.errors import TrialContractError


class EngineListener(Protocol):
    """Receives every forward, backward and step call of this rank's engines.

    All ranks of an engine make these calls in the same order.
    """

    def run(self, phase: str, engine: Any, call: Callable[[], Any]) -> Any:
        """Execute ``call()`` and return its result.

        ``call()`` is one call of the engine's method ``phase``: ``forward``, ``backward``, ``step``, or a pipeline's
        ``train_batch``.
        """

    def stepped(self, engine: Any) -> None:
        """Handle the end of an optimizer step; also called for steps skipped for overflow."""


@contextlib.contextmanager
def observe_engines(listener: EngineListener) -> Iterator[None]:
    """Report calls of all engines in this process to ``listener`` inside the block.

    The calls are ``forward``, ``backward``, ``step``, and a pipeline's ``train_batch``. The patches of DeepSpeed's classes are
    undone at the end of the block.

    Source: DeepSpeed 0.19.8 ``global_steps`` in ``runtime/engine.py`` and ``runtime/pipe/engine.py``.
    """
    kept = [(DeepSpeedEngine, name) for name in ("forward", "backward", "step")] + [
        (PipelineEngine, "train_batch")
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name in kept]
    try:
        for owner, name, method in before:
            setattr(owner, name, _wrapped(name, method, listener))
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _wrapped(phase: str, method: Callable[..., Any], listener: EngineListener) -> Callable[..., Any]:
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        steps_before = engine.global_steps
        result = listener.run(phase, engine, lambda: method(engine, *args, **kwargs))
        if phase in ("step", "train_batch") and engine.global_steps != steps_before:
            listener.stepped(engine)
        return result

    return call


class LostGradientCheck:
    """Listener that raises ``TrialContractError`` at a step if ZeRO dropped gradients.

    If ``engine.backward`` is called several times before one ``engine.step``, ZeRO may drop gradients. ZeRO 0 and
    ``BF16_Optimizer`` accumulate the gradients instead. Calls of ``loss.backward()`` are not counted, because the loss may
    depend on engines that do not step.
    """

    def __init__(self) -> None:
        self._num_calls: dict[Any, int] = {}
        self._adds: set[Any] = set()

    def run(self, phase: str, engine: Any, call: Callable[[], Any]) -> Any:
        num_calls = self._num_calls.get(engine, 0)
        stage = optimizers.overwriting_stage(engine.optimizer)
        if phase == "backward" and stage and not engine.inside_no_sync_ctxt:
            drops = engine not in self._adds if stage == 3 else engine.is_gradient_accumulation_boundary()
            self._num_calls[engine] = num_calls + drops
        elif phase == "forward" and num_calls:
            self._adds.add(engine)
        elif phase == "step" and num_calls > 1:
            raise TrialContractError(
                f"train_batch called backward {num_calls} times before step of an engine with ZeRO stage "
                f"{engine.zero_optimization_stage()}, which keeps the gradients of the last call only; expected one call. Add "
                "the losses and call backward once. If each loss is of a micro batch of its own, set "
                "gradient_accumulation_steps to their number instead, and call step after each backward."
            )
        return call()

    def stepped(self, engine: Any) -> None:
        self._num_calls.pop(engine, None)
        self._adds.discard(engine)
