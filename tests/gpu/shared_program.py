"""Train on two ranks with one device; require equal parameters, falling losses.

Arguments: ZeRO stages, or ``pipeline``.
"""

import math
import os
import sys

import torch

from dstrial.ranks.control_channel import ControlChannel
from dstrial.ranks.identity import identify
from dstrial.ranks.process_group import device, init_process_group, prepare_accelerator, shutdown

prepare_accelerator()
identity = identify(os.environ)
init_process_group(identity, timeout_s=60)

import deepspeed  # noqa: E402  # after the accelerator is chosen
import torch.distributed as dist  # noqa: E402

channel = ControlChannel(identity, timeout_s=60)
DEVICE = device(identity)
assert dist.get_backend() == "gloo", dist.get_backend()
assert torch.device("cuda", 0) == DEVICE, DEVICE
assert dist.get_world_size() == 2


def records(step):
    generator = torch.Generator().manual_seed(100 * step + identity.rank)
    return torch.randn(8, 32, generator=generator).to(DEVICE)


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }


def zero(stage):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
    assert next(engine.module.parameters()).device == DEVICE
    losses = []
    for step in range(20):
        batch = records(step % 2)
        loss = (engine(batch) - batch).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        total = sum(parameter.double().sum().item() for parameter in engine.module.parameters())
    return losses, total


def pipeline():
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(7)
    layers = [
        LayerSpec(torch.nn.Linear, 32, 64),
        LayerSpec(torch.nn.Tanh),
        LayerSpec(torch.nn.Linear, 64, 32),
    ]
    module = PipelineModule(
        layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
    )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config(0))

    def forever():
        step = 0
        while True:
            generator = torch.Generator().manual_seed(step % 2)
            batch = torch.randn(8, 32, generator=generator)
            yield batch, batch
            step += 1

    source = forever()
    losses = [float(engine.train_batch(source)) for _ in range(20)]
    return losses, losses[-1]


last_losses = {}
for name in sys.argv[1:]:
    losses, total = pipeline() if name == "pipeline" else zero(int(name))
    totals = channel.allgather(total)
    assert abs(totals[0] - totals[1]) <= 1e-9 * max(1.0, abs(totals[0])), (name, totals)
    assert all(map(math.isfinite, losses)), (name, losses)
    assert losses[-1] < 0.9 * losses[0], (name, losses)
    if name != "pipeline":
        # A wrong collective may leave the ranks equal; the losses of the stages must agree, too.
        last_losses[name] = losses[-1]
        assert max(last_losses.values()) - min(last_losses.values()) < 1e-3, last_losses
    if identity.rank == 0:
        print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
channel.close()
shutdown()
