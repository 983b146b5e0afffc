"""A small Accelerate user script with a ``Reporter``.

``--stop-at N`` sends SIGTERM after N batches; ``--without-deepspeed`` creates accelerators that ``Reporter`` rejects;
``--without-accumulate`` omits ``accelerator.accumulate``.
"""

import argparse
import contextlib
import os
import signal

import determined
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

from dstrial.errors import TrialContractError
from dstrial.integrations.accelerate import Reporter


class Counter:
    """A custom object whose state is part of checkpoints."""

    def __init__(self) -> None:
        self.records = 0

    def state_dict(self) -> dict[str, int]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.records = state["records"]


def refuse() -> None:
    """Create three accelerators without DeepSpeed; the third error is not caught."""
    configured = os.environ.pop("ACCELERATE_USE_DEEPSPEED")
    try:
        with Reporter(Accelerator()):
            print("not refused")
    except TrialContractError as error:
        print(f"not configured: {error}")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = configured
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    with Reporter(accelerator) as reporter:
        accelerator.prepare_model(torch.nn.Linear(1, 1))
        try:
            reporter.resume()
        except TrialContractError as error:
            print(f"plain model: {error}")
    AcceleratorState._reset_state(reset_partial_state=True)
    with Reporter(Accelerator(cpu=True)):
        print("not refused")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--without-accumulate", action="store_true")
    options = parser.parse_args()
    if options.without_deepspeed:
        refuse()
        return
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        step_scheduler_with_optimizer=True,
        # Accelerate's automatic checkpoints, which Reporter must neither write nor delete.
        project_config=ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=1),
    )
    with Reporter(accelerator) as reporter:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=reporter.hparams.get("lr", 0.01))
        data = torch.utils.data.TensorDataset(torch.randn(52, 4), torch.randn(52, 1))
        micro = reporter.micro_batch_size(4)
        # 13 micro batches: one rank drops the last (a batch has two), and two ranks cannot split it.
        loader = torch.utils.data.DataLoader(data, batch_size=micro, shuffle=True, drop_last=True)
        # Accelerate steps a scheduler num_processes times per step.
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
            with contextlib.nullcontext() if options.without_accumulate else accelerator.accumulate(model):
                loss = (model(inputs) - targets).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.records += len(inputs) * accelerator.num_processes
            reporter.step({"loss": loss})
            if reporter.should_validate:
                rate = optimizer.param_groups[0]["lr"]
                info = determined.get_cluster_info()
                reporter.report_validation(
                    {
                        "validation_loss": loss,
                        "rate": rate,
                        "records": counter.records,
                        "trial_id": 0 if info is None else info.trial.trial_id,
                    }
                )
            if reporter.batches_trained == options.stop_at and accelerator.sync_gradients:
                os.kill(os.getpid(), signal.SIGTERM)
    print(f"stopped={reporter.stopped} at {reporter.batches_trained} of {reporter.batches_total}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
