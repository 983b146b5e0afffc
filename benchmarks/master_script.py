"""A training script for ``benchmarks/master.py``: the digits trial, which writes down when its first batch begins."""

import json
import os
import pathlib
import time

import determined as det
from model_def import DigitsTrial

import dstrial


class TimedTrial(DigitsTrial):
    """The digits trial; the first batch's time goes into ``$FIRST_BATCH_FILE``."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        marker = pathlib.Path(os.environ["FIRST_BATCH_FILE"])
        if not marker.exists():
            marker.write_text(repr(time.time()))
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def main() -> None:
    hyperparameters = None
    if det.get_cluster_info() is None:
        hyperparameters = json.loads(pathlib.Path("hyperparameters.json").read_text())
    with dstrial.init(hparams=hyperparameters) as context:
        trial = TimedTrial(context)
        dstrial.Trainer(trial, context).fit(max_length=dstrial.Batch(2), checkpoint_policy="none")


if __name__ == "__main__":
    main()
