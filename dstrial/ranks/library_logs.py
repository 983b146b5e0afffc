"""Drop lines of libraries that every run would print and that tell nobody anything."""

from __future__ import annotations

import logging

# DeepSpeed 0.19 runtime/lr_schedules.py, get_lr: DeepSpeed itself asks, when it builds an engine with a scheduler.
_OF_DEEPSPEED = ("Attempting to get learning rate from scheduler before it has started",)


def quieten_libraries() -> None:
    """Keep such lines out of the log from now on; may be called again.

    Ranks: each its own; no communication.
    """
    logger = logging.getLogger("DeepSpeed")
    if _tells_something not in logger.filters:
        logger.addFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_OF_DEEPSPEED)
