"""A Core API script as users write it; a dry run never reaches its end."""

import argparse

import deepspeed
import determined as det
import torch
from determined import core
from torch import nn

from dstrial import dsat


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))

    def forward(self, images):
        return self.layers(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--config-file")
    arguments = parser.parse_args()
    records = arguments.records
    hparams = det.get_cluster_info().trial.hparams
    model = Net(hparams["width"]).to("cpu")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=arguments.config_file or dsat.get_ds_config_from_hparams(hparams),
    )
    images, labels = torch.randn(records, 16), torch.randint(0, 4, (records,))
    size = engine.train_micro_batch_size_per_gpu()
    distributed = core.DistributedContext.from_deepspeed()
    with core.init(distributed=distributed) as core_context, dsat.dsat_reporting_context(core_context, None):
        for start in range(0, records, size):
            outputs = engine(images[start : start + size])
            loss = nn.functional.cross_entropy(outputs, labels[start : start + size])
            engine.backward(loss)
            engine.step()
    raise AssertionError("nobody trains to the end")


if __name__ == "__main__":
    main()
