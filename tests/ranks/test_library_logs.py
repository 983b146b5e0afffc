"""Filtering of log lines that libraries print in every run."""

from __future__ import annotations

import logging

import pytest

from dstrial.runtime import quieten_libraries


def test_log_filter_drops_only_deepspeed_scheduler_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("DeepSpeed")
    filters = list(logger.filters)
    propagates, logger.propagate = logger.propagate, True
    try:
        logger.filters[:] = []
        quieten_libraries()
        quieten_libraries()
        assert len(logger.filters) == 1
        with caplog.at_level(logging.WARNING, logger="DeepSpeed"):
            logger.warning("Attempting to get learning rate from scheduler before it has started")
            logger.warning("total_num_steps 1 is less than warmup_num_steps 2")
    finally:
        logger.filters[:] = filters
        logger.propagate = propagates
    # Some releases of pytest capture a record twice: at the logger and at the root logger.
    assert {record.getMessage() for record in caplog.records} == {
        "total_num_steps 1 is less than warmup_num_steps 2"
    }
