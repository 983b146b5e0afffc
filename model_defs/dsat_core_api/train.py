"""Classify handwritten digits with a wide multilayer network: a Core API script that dsat tunes."""

import deepspeed
import determined as det
from determined import core
from digits import build_model, init_ranks, load_training_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from dstrial import dsat

NUM_EPOCHS = 3


def train(engine: deepspeed.DeepSpeedEngine) -> float:
    """Train for ``NUM_EPOCHS``; return the loss of the last micro batch."""
    training_set = load_training_set()
    sampler = DistributedSampler(training_set)
    size = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(training_set, batch_size=size, sampler=sampler, drop_last=True)
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(engine.device), labels.to(engine.device)
            loss = nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    return loss.item()


def main() -> None:
    init_ranks()
    hparams = det.get_cluster_info().trial.hparams
    model = build_model(width=256, depth=4)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=dsat.get_ds_config_from_hparams(hparams),
    )
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed) as core_context:
        for op in core_context.searcher.operations():
            with dsat.dsat_reporting_context(core_context, op):
                loss = train(engine)
            if core_context.distributed.rank == 0:
                core_context.train.report_validation_metrics(engine.global_steps, {"loss": loss})
                op.report_completed(loss)


if __name__ == "__main__":
    main()
