"""Small trials whose ranks record whether they were executed or forked."""

import multiprocessing
import os
import pathlib

import small_trials
from small_records import Records

from dstrial import DataLoader


def note_start():
    """Write into WITNESS_DIR whether this rank's process was executed or forked.

    /proc/PID/environ has the variables of the last exec; they contain RANK only if the rank itself was executed.
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
