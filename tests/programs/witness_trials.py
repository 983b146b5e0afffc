"""The small trials, whose ranks write down how they were started, and whose loaders start workers in any way."""

import multiprocessing
import os
import pathlib

import small_trials
from small_records import Records

from dstrial import DataLoader


def note_start():
    """Write into a directory of the test whether this rank's process executed its program, or is a fork that became it.

    /proc/PID/environ shows the variables of the program that was executed; a rank's own has RANK.
    """
    variables = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    was_executed = any(variable.startswith(b"RANK=") for variable in variables)
    path = pathlib.Path(os.environ["WITNESS_DIR"]) / f"rank{os.environ['RANK']}"
    path.write_text("executed" if was_executed else "forked")


class Witness:
    def __init__(self, context):
        note_start()
        super().__init__(context)

    def build_training_data_loader(self):
        start_method = self.hparams.get("start_method")
        return DataLoader(
            Records(self.hparams.get("num_records", 64), 1, self.hparams.get("noise", 0.0)),
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
            num_workers=self.hparams.get("num_workers", 2) if start_method else 0,
            multiprocessing_context=multiprocessing.get_context(start_method) if start_method else None,
        )


class WitnessTrial(Witness, small_trials.DataParallelTrial):
    pass


class WitnessPipeline(Witness, small_trials.PipelineTrial):
    pass
