"""An Accelerate script with token batches and slow validations.

``--draws-itself`` iterates the loader without the reporter; ``--pause-s`` is the delay per record in seconds.
"""

import argparse
import hashlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from dstrial.integrations.accelerate import Reporter

NUM_TOKENS = 16
VALIDATION_S = 0.5


class Records(torch.utils.data.Dataset):
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._ids = torch.randint(0, 32, (64, NUM_TOKENS), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._pause_s)
        return {"input_ids": self._ids[index]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            time.sleep(VALIDATION_S)
        scores = self.head(self.embedding(input_ids))
        return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws-itself", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0)
    options = parser.parse_args()
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    )
    with Reporter(accelerator) as reporter:
        torch.manual_seed(1)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        size = reporter.micro_batch_size()
        loader = torch.utils.data.DataLoader(Records(options.pause_s), batch_size=size, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        reporter.resume()
        for batch in drawn(loader, reporter) if options.draws_itself else reporter.batches(loader):
            with accelerator.accumulate(model):
                loss = model(batch["input_ids"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            reporter.step({"loss": loss})
            if reporter.should_validate:
                with torch.no_grad():
                    model(batch["input_ids"])
                reporter.report_validation({"validation_loss": loss})
        weights = b"".join(value.detach().numpy().tobytes() for value in model.module.parameters())
        print(f"weights: {hashlib.sha256(weights).hexdigest()}")


def drawn(loader, reporter):
    while True:
        for batch in loader:
            if reporter.should_stop:
                return
            yield batch


if __name__ == "__main__":
    main()
