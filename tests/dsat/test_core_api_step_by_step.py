"""A search of a Core API script that opens ``dsat_reporting_context`` for every micro batch, as Determined's example does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from searching import ROOT, command, require_measured, run

# The shape of main() in Determined's examples/deepspeed_autotune/torchvision/core_api/script.py.
SCRIPT = """
import deepspeed
import determined as det
import numpy as np
from digits import build_model, init_ranks, load_training_set
from torch import nn

from dstrial import dsat


def main(core_context, hparams):
    is_chief = core_context.distributed.rank == 0
    init_ranks()
    model = build_model(width=64, depth=2)
    engine, _, trainloader, _ = deepspeed.initialize(
        model=model,
        model_parameters=filter(lambda p: p.requires_grad, model.parameters()),
        training_data=load_training_set(),
        config=dsat.get_ds_config_from_hparams(hparams),
    )
    steps_completed = 0
    losses = []
    for op in core_context.searcher.operations():
        while steps_completed < op.length:
            for data in trainloader:
                with dsat.dsat_reporting_context(core_context, op):
                    inputs, labels = data
                    inputs, labels = inputs.to(engine.device), labels.to(engine.device)
                    loss = nn.functional.cross_entropy(engine(inputs), labels)
                    losses.append(loss.item())
                    engine.backward(loss)
                    engine.step()
                if engine.is_gradient_accumulation_boundary():
                    steps_completed += 1
                    if not steps_completed % 10:
                        gathered = core_context.distributed.gather(np.array(losses).mean())
                        losses = []
                        if is_chief:
                            mean = np.array(gathered).mean()
                            core_context.train.report_training_metrics(steps_completed, {"loss": mean})
                    if steps_completed == op.length:
                        if is_chief:
                            op.report_completed(mean)
                        return


if __name__ == "__main__":
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as core_context:
        main(core_context, det.get_cluster_info().trial.hparams)
"""


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_core_api_search_measures_every_trial(tmp_path: Path) -> None:
    model_def = tmp_path / "model"
    model_def.mkdir()
    for name in ("digits.py", "ds_config.json"):
        shutil.copy(ROOT / "model_defs" / "dsat_core_api" / name, model_def)
    (model_def / "train.py").write_text(SCRIPT)
    config = yaml.safe_load((ROOT / "experiment_configs" / "dsat_core_api.yaml").read_text())
    config["searcher"]["max_length"] = {"batches": 2000}
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(config))
    output = tmp_path / "out"
    flags = ("--metric", "throughput", "--max-trials", "2", "--measure-seconds", "0.1", "--local", "-z", "1")
    words = command("asha", output, *flags, config=Path("exp.yaml"), model_dir=Path(model_def.name))
    ended = run(words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    require_measured(output, 2)
