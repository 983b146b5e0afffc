"""Let DeepSpeed's forward, backward and step on this rank tell a listener.

The only place where DeepSpeed's classes are replaced for measuring; everything is put back at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from deepspeed import DeepSpeedEngine, PipelineEngine


class EngineListener(Protocol):
    """Hears of the engines. All ranks with an engine call every method."""

    def run(self, phase: str, engine: Any, call: Callable[[], Any]) -> Any:
        """Make one call of an engine and return what it returns.

        Args:
            phase: ``forward``, ``backward``, ``step``, or ``train_batch`` of a pipeline.
            engine: which.
            call: DeepSpeed's own method with its arguments.
        """

    def stepped(self, engine: Any) -> None:
        """Take that an engine has finished an optimizer step, or skipped it for overflow."""


@contextlib.contextmanager
def observe_engines(listener: EngineListener) -> Iterator[None]:
    """Let a listener hear of every engine of this process while the block lasts.

    Ranks: any; no communication.
    Source: DeepSpeed 0.19.8 ``runtime/engine.py`` and ``runtime/pipe/engine.py``; both count ``global_steps``.
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
