"""Reports before ``PendingReports.wait`` are stored even if the trial then dies."""

from __future__ import annotations

import pytest
from submitting import config, steps_of, submit, trials, wait_until

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

SCRIPT = """
import os
import determined as det
from dstrial.loop.background_save import PendingReports

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    core.train.report_training_metrics(1, {"loss": 1.0})
    reports = PendingReports(core.train)
    for step in range(2, 201):
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
    print("waited", reports.wait())
    os._exit(9)
"""


def test_wait_flushes_pending_reports_before_crash(shared_master: MasterForTest) -> None:
    experiment_id = submit(shared_master, config(), SCRIPT)

    wait_until(shared_master, experiment_id, "ERROR")

    (trial,) = trials(shared_master, experiment_id)
    assert steps_of(shared_master, trial["id"]) == list(range(1, 201))
