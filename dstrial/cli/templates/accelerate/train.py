"""Train a classifier of points with Accelerate. Replace model and data."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrial.integrations.accelerate import Reporter


def points(number: int, seed: int) -> TensorDataset:
    xy = 2 * torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(xy, (xy.norm(dim=1) < 0.8).long())  # label 1: inside the circle


@torch.no_grad()
def validate(accelerator, model, loader):
    right = [
        accelerator.gather_for_metrics((model(xy).argmax(dim=1) == labels).float()) for xy, labels in loader
    ]
    return {"accuracy": torch.cat(right).mean()}


def main() -> None:
    # The seedable sampler gives an order of records that a resume can repeat.
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    )
    with Reporter(accelerator) as reporter:
        width = reporter.hparams["width"]
        model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=reporter.hparams["learning_rate"])
        batch_size = reporter.micro_batch_size(64)
        loader = DataLoader(points(4096, seed=1), batch_size=batch_size, shuffle=True, drop_last=True)
        validation_loader = DataLoader(points(1024, seed=2), batch_size=batch_size)
        model, optimizer, loader, validation_loader = accelerator.prepare(
            model, optimizer, loader, validation_loader
        )
        reporter.resume()
        for xy, labels in reporter.batches(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(xy), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            reporter.step({"loss": loss})
            if reporter.should_validate:
                reporter.report_validation(validate(accelerator, model, validation_loader))


if __name__ == "__main__":
    main()
