"""Keep the results of launched trials in a checkpoint.

``python3 -m dstrial.dsat.worker.result_archiver`` is what an experiment without slots runs.

The driver submits it when the search is over, and writes the files into its notes. Not meant to be typed.
"""

from __future__ import annotations

import sys
import time

import determined as det
from determined import core

from dstrial.dsat.worker.transport import ExperimentTransport
from dstrial.errors import DstrialError

_WAIT_S = 900.0


def main() -> int:
    info = det.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        raise DstrialError(
            "python3 -m dstrial.dsat.worker.result_archiver is no trial of a master; expected to be one. Let dsat submit it."
        )
    with core.init(distributed=core.DummyDistributedContext()) as context:
        trial = info.trial
        transport = ExperimentTransport(context, trial.experiment_id, trial.trial_id, trial._trial_run_id)
        give_up_at_s = time.monotonic() + _WAIT_S
        while (results := transport.task_queue().results) is None:
            if time.monotonic() > give_up_at_s:
                raise DstrialError(
                    f"experiment {trial.experiment_id} was given nothing to keep in {_WAIT_S:.0f} s; expected the files of a "
                    "search. Repeat its command."
                )
            time.sleep(transport.poll_s)
        transport.keep(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
