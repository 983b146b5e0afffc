"""An Accelerate loop of two ranks: ``stalling_reporter.py silent|slow``.

``silent``: the data loader of rank 1 blocks after four batches. ``slow``: the script sleeps between batches.
"""

import sys
import time

import torch
from accelerate import Accelerator

from dstrial.integrations.accelerate import Reporter

STALL_AFTER = 4
MICRO = 2
FOREVER_S = 600
SLOW_S = 5.0


class Records(torch.utils.data.Dataset):
    """Records whose reading blocks after ``silent_after`` reads; -1 for never."""

    def __init__(self, count: int, silent_after: int) -> None:
        self.inputs = torch.randn(count, 4)
        self.left = silent_after

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, idx: int) -> torch.Tensor:
        if self.left == 0:
            self.read_from_storage()
        self.left -= 1
        return self.inputs[idx]

    def read_from_storage(self) -> None:
        time.sleep(FOREVER_S)


def main(attack: str) -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    with Reporter(accelerator) as reporter:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # The loader prefetches one micro batch.
        silent_after = MICRO * (STALL_AFTER + 1) if attack == "silent" and rank == 1 else -1
        loader = torch.utils.data.DataLoader(Records(80, silent_after), batch_size=MICRO)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        reporter.resume()
        for inputs in reporter.batches(loader):
            done = reporter.batches_trained
            with accelerator.accumulate(model):
                loss = model(inputs).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            reporter.step({"loss": loss})
            if attack == "slow" and done == 7:
                time.sleep(SLOW_S)
            if attack == "slow" and done == 9 and rank == 1:
                time.sleep(2 * SLOW_S)  # meanwhile rank 0 waits for rank 1 in its next batch
            if reporter.should_validate:
                time.sleep(SLOW_S / 2 if attack == "slow" and done < 6 else 0)
                reporter.report_validation({"validation_loss": loss})
    print(f"rank {rank} is at batch {reporter.batches_trained}")


if __name__ == "__main__":
    main(sys.argv[1])
