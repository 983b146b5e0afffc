"""An Accelerate script as a user writes it, small enough for tests; ``--stop-at N`` asks for a stop after N batches."""

import argparse
import os
import signal

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from dstrial.errors import TrialContractError
from dstrial.integrations.accelerate import Reporter


class Counter:
    """An object of the script's own whose state is saved with everything else."""

    def __init__(self) -> None:
        self.records = 0

    def state_dict(self) -> dict[str, int]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.records = state["records"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-at", type=int, default=-1)
    options = parser.parse_args()
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        step_scheduler_with_optimizer=True,
    )
    with Reporter(accelerator) as reporter:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=reporter.hparams.get("lr", 0.01))
        data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
        micro = accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"]
        loader = torch.utils.data.DataLoader(data, batch_size=micro, shuffle=True)
        # Accelerate steps a scheduler once per process.
        processes = accelerator.num_processes
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + 0.1 * step / processes)
        )
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        try:
            reporter.step()
        except TrialContractError as error:
            print(f"before resume(): {error}")
        reporter.resume()
        print(f"ranks={accelerator.num_processes} kind={accelerator.distributed_type.value}")
        for inputs, targets in reporter.batches(loader):
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.records += len(inputs) * accelerator.num_processes
            reporter.step({"loss": loss})
            if reporter.should_validate:
                rate = optimizer.param_groups[0]["lr"]
                reporter.report_validation(
                    {"validation_loss": loss, "rate": rate, "records": counter.records}
                )
            if reporter.batches_trained == options.stop_at and accelerator.sync_gradients:
                os.kill(os.getpid(), signal.SIGTERM)
    print(f"stopped={reporter.stopped} at {reporter.batches_trained} of {reporter.batches_total}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
