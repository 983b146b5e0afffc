"""DetCallback with Determined's own ``det.core.init(distributed=...)`` under a real master, as older scripts use it.

Its ``should_preempt`` is one that all ranks have to call in step (``WorkersAskChief``); its distributed context is Determined's.
"""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    callback.current_op.report_progress(0)
    trainer.train(resume_from_checkpoint=callback.checkpoint_path)
    assert callback.current_op.length == {STEPS}
    assert core_context.distributed.size == args.world_size == 2
"""


def wait_for(client: Any, experiment_id: int, *states: str) -> None:
    give_up_at_s = time.monotonic() + DEADLINE_S
    while (found := client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"]) not in states:
        assert time.monotonic() < give_up_at_s, f"the experiment is {found}"
        time.sleep(0.1)


def log_of(client: Any, trial: dict[str, Any]) -> str:
    return "".join(line["message"] for line in client.stream(f"/api/v1/trials/{trial['id']}/logs"))


def test_a_plain_trainer_on_two_slots_is_paused_and_goes_on(shared_master: MasterForTest) -> None:
    client = shared_master.client()
    config = {
        "name": "plain-trainer",
        "entrypoint": "python3 -m dstrial.launch train.py",
        "searcher": {"name": "single", "metric": "eval_loss", "max_length": {"batches": STEPS}},
        "resources": {"slots_per_trial": 2},
        "environment": {"environment_variables": ["HF_HUB_OFFLINE=1"]},
        "max_restarts": 0,
    }
    program = Path(__file__).with_name("trainer_program.py").read_text()
    files = [
        {
            "path": name,
            "type": 48,
            "content": base64.b64encode(text.encode()).decode(),
            "mtime": "0",
            "mode": 420,
        }
        for name, text in (("train.py", SCRIPT), ("trainer_program.py", program))
    ]
    body = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": files}
    experiment_id = client.post("/api/v1/experiments", body)["experiment"]["id"]
    give_up_at_s = time.monotonic() + DEADLINE_S
    trial: dict[str, Any] = {}
    while not trial or int(trial.get("totalBatchesProcessed", 0)) == 0:
        assert trial.get("state") != "STATE_ERROR", log_of(client, trial)
        assert time.monotonic() < give_up_at_s, trial
        time.sleep(0.1)
        found = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
        trial = found[0] if found else {}
    client.post(f"/api/v1/experiments/{experiment_id}/pause")
    wait_for(client, experiment_id, "STATE_PAUSED")

    client.post(f"/api/v1/experiments/{experiment_id}/activate")
    wait_for(client, experiment_id, "STATE_COMPLETED", "STATE_ERROR")

    (trial,) = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
    assert trial["state"] == "STATE_COMPLETED", log_of(client, trial)
    assert trial["totalBatchesProcessed"] == STEPS
    answer = client.get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    # The older one may have been deleted by now: only the newest and the best are kept.
    first, last = sorted(answer, key=lambda one: int(one["metadata"]["steps_completed"]))
    assert 0 < int(first["metadata"]["steps_completed"]) < STEPS
    assert int(last["metadata"]["steps_completed"]) == STEPS
    assert any(path.endswith("/my_data.json") for path in last["resources"])
