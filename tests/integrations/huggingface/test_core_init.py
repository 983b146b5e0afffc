"""``DetCallback`` with ``det.core.init(distributed=...)`` under a real master.

All ranks must call this core context's ``should_preempt`` equally often (``WorkersAskChief``).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

DEADLINE_S = 280.0
STEPS = 40
SCRIPT = f"""
import time
import determined as det
import torch.distributed
from dstrial.integrations import huggingface
from trainer_program import Records, model
from transformers import Trainer, TrainerCallback, TrainingArguments

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.2 if det.get_cluster_info().latest_checkpoint is None else 0.0)

torch.distributed.init_process_group("gloo")
with det.core.init(distributed=det.core.DistributedContext.from_torch_distributed()) as core_context:
    args = TrainingArguments(
        output_dir="output", max_steps={STEPS}, per_device_train_batch_size=2, logging_steps=1, report_to=[], disable_tqdm=True,
        eval_strategy="steps", eval_steps=20, save_strategy="no",
    )
    callback = huggingface.DetCallback(core_context, args, user_data={{"note": "kept"}})
    trainer = Trainer(
        model=model(), args=args, train_dataset=Records(200), eval_dataset=Records(4), callbacks=[Slow(), callback]
    )
    trainer.train(resume_from_checkpoint=callback.checkpoint_path)
    assert callback.current_op.length == {STEPS}
    assert core_context.distributed.size == args.world_size == 2
"""


def log_of(client: Any, trial: dict[str, Any]) -> str:
    return "".join(line["message"] for line in client.stream(f"/api/v1/trials/{trial['id']}/logs"))


def test_plain_trainer_on_two_slots_pauses_and_resumes(shared_master: MasterForTest, tmp_path: Path) -> None:
    client = shared_master.client()
    config = {
        "name": "plain-trainer",
        "entrypoint": "python3 -m dstrial.launch train.py",
        "searcher": {"name": "single", "metric": "eval_loss", "max_length": {"batches": STEPS}},
        "resources": {"slots_per_trial": 2},
        "environment": {"environment_variables": ["HF_HUB_OFFLINE=1"]},
        "max_restarts": 0,
    }
    (tmp_path / "train.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).with_name("trainer_program.py"), tmp_path)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    created = shared_master.det("experiment", "create", str(tmp_path / "experiment.yaml"), str(tmp_path))
    found = re.search(r"Created experiment (\d+)", created.stdout)
    assert found is not None, created.stdout + created.stderr
    path = f"/api/v1/experiments/{found[1]}"

    def state() -> str:
        return str(client.get(path)["experiment"]["state"])

    def has_begun() -> bool:
        trials = client.get(f"{path}/trials")["trials"]
        assert not trials or trials[0]["state"] != "STATE_ERROR", log_of(client, trials[0])
        return bool(trials) and int(trials[0].get("totalBatchesProcessed", 0)) > 0

    wait_for(has_begun, deadline_s=DEADLINE_S)
    client.post(f"{path}/pause")
    wait_for(lambda: state() == "STATE_PAUSED", deadline_s=DEADLINE_S)

    client.post(f"{path}/activate")
    wait_for(lambda: state() in ("STATE_COMPLETED", "STATE_ERROR"), deadline_s=DEADLINE_S)

    (trial,) = client.get(f"{path}/trials")["trials"]
    assert trial["state"] == "STATE_COMPLETED", log_of(client, trial)
    assert trial["totalBatchesProcessed"] == STEPS
    answer = client.get(f"{path}/checkpoints")["checkpoints"]
    # The older checkpoint may be deleted by now: only the newest and the best are kept.
    first, last = sorted(answer, key=lambda one: int(one["metadata"]["steps_completed"]))
    assert 0 < int(first["metadata"]["steps_completed"]) < STEPS
    assert int(last["metadata"]["steps_completed"]) == STEPS
    assert any(path.endswith("/my_data.json") for path in last["resources"])
