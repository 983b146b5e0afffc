"""Store the results of launched trials in a checkpoint.

``python3 -m dstrial.dsat.keep_results`` is the entrypoint of an experiment without slots, whose context holds the result files.
"""

from __future__ import annotations

import shutil

from determined import core

from dstrial.dsat.backends.trial_spec import RESULTS_DIRECTORY


def main() -> None:
    with (
        core.init(distributed=core.DummyDistributedContext()) as context,
        context.checkpoint.store_path({"steps_completed": 0, "dsat": True}) as (path, _uuid),
    ):
        shutil.copytree(RESULTS_DIRECTORY, path, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
