"""Train tiny models in a process each, with torch's compiler kept out or as torch has it; see ``test_compiler``.

For every line ``CASE kept|usual FILE`` that it reads, a fork of what has imported torch and DeepSpeed, and nothing else, trains
and writes JSON; its exit status is printed.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import traceback
from typing import Any

sys.path.insert(1, str(pathlib.Path(__file__).parents[1] / "programs"))

import small_models
import torch
from torch import nn


def engine_of(config: dict[str, Any], model: nn.Module | None = None) -> Any:
    import deepspeed

    torch.manual_seed(1)
    model = small_models.Classifier(nn.LayerNorm) if model is None else model
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, num_steps: int = 6) -> list[str]:
    losses = []
    for inputs, labels in small_models.training_data(0, num_steps, 0, torch.float32):
        loss = small_models.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def every_stage() -> dict[str, Any]:
    """Train with every kind of engine, save and load; nothing is compiled."""
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        for name, optimizer in {
            "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        }.items():
            engine = engine_of(
                small_models.ds_config(stage, optimizer=optimizer, zero_allow_untested_optimizer=True)
            )
            found[f"{name} {stage}"] = train(engine)
            engine.destroy()
    own = torch.optim.RMSprop(nn.Linear(2, 2).parameters())
    own.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    own.zero_grad()
    own.step()
    own.load_state_dict(own.state_dict())
    return found


def checkpointed() -> dict[str, Any]:
    """Recompute activations by torch's function, and by DeepSpeed's."""
    import deepspeed
    from torch.utils.checkpoint import checkpoint

    class Recomputing(small_models.Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=True)
            return self.last(deepspeed.checkpointing.checkpoint(self.second, x))

    torch.manual_seed(1)
    engine = engine_of(small_models.ds_config(1), Recomputing(nn.LayerNorm))
    return {"losses": train(engine)}


def _loaded() -> list[str]:
    return sorted({"torch._dynamo", "torch._inductor", "networkx"} & sys.modules.keys())


def _counts() -> dict[str, Any]:
    from torch._dynamo.utils import counters

    # By reasons; their texts have line numbers and addresses.
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "calls": counters["stats"]["calls_captured"],
        "breaks": sorted(text.splitlines()[0] for text in counters["graph_break"]),
    }


def compiled_model() -> dict[str, Any]:
    """Train before and after the user compiles; their optimizer's step is compiled, too."""
    engine = engine_of(small_models.ds_config(1))
    found: dict[str, Any] = {"before": train(engine), "loaded before": _loaded()}
    engine.destroy()
    model = small_models.Classifier(nn.LayerNorm)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager")
    step = torch.compile(optimizer.step, backend="aot_eager")
    losses = []
    for inputs, labels in small_models.training_data(0, 6, 0, torch.float32):
        loss = small_models.cross_entropy(compiled(inputs), labels)
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return found | {"losses": losses, **_counts()}


def compiled_engine() -> dict[str, Any]:
    """Train with engines that have trained a while before they are compiled."""
    found: dict[str, Any] = {}
    for stage in (3, 1):
        engine = engine_of(small_models.ds_config(stage))
        found[f"before {stage}"] = train(engine, 2)
        engine.compile(backend="aot_eager")
        found[f"losses {stage}"] = train(engine)
        engine.destroy()
    return found | _counts()


def muon() -> dict[str, Any]:
    """Train with Muon, whose functions DeepSpeed compiles."""

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 9, bias=False), nn.Linear(9, 3, bias=False)
            for parameter in self.parameters():
                parameter.use_muon = (
                    True  # of others DeepSpeed has FusedAdam take care, which it compiles for minutes
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend("aot_eager")  # the usual one takes minutes to make C++ of it
    torch.manual_seed(1)
    config = small_models.ds_config(1, optimizer={"type": "Muon", "params": {"lr": 1e-2}})
    del config["scheduler"]
    config["zero_optimization"]["reduce_scatter"] = False
    return {"losses": train(engine_of(config, Matrices())), **_counts()}


def main(case: str, way: str, file: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"comes_with_deepspeed": "torch._dynamo" in sys.modules}
    if way == "kept":
        from dstrial.engine.deepspeed_internals.compiler import keep_compiler_out

        keep_compiler_out()
        keep_compiler_out()  # as a process that makes several contexts does
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found["case"] = globals()[case]()
    found["loaded"] = _loaded()
    pathlib.Path(file).write_text(json.dumps(found))
    # Threads of gloo that still run when Python ends have ended it with "terminate called".
    torch.distributed.destroy_process_group()


def fork(words: list[str]) -> int:
    """Have it done as a process of its own, and return its exit status."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        main(*words)
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, this process must not go on as its parent
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import deepspeed

    from dstrial.ranks.process_group import without_compiled_collectives

    results = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints, too
    for line in sys.stdin:
        os.write(results, f"{fork(line.split())}\n".encode())
