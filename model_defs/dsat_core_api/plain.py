"""Classify handwritten digits with a wide multilayer network: a plain DeepSpeed script."""

import deepspeed
from digits import build_model, init_ranks, load_training_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

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
    model = build_model(width=256, depth=4)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config="ds_config.json",
    )
    train(engine)


if __name__ == "__main__":
    main()
