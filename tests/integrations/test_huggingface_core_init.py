"""DetCallback with Determined's own ``det.core.init()`` under a real master, as older scripts use it."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.testing.master import MasterForTest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.process, pytest.mark.timeout(290)]

DEADLINE_S = 130.0
STEPS = 40
SCRIPT = f"""
import time
import determined as det
from dstrial.integrations import huggingface
from trainer_program import Records, model
from transformers import Trainer, TrainerCallback, TrainingArguments

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.2 if det.get_cluster_info().latest_checkpoint is None else 0.0)

with det.core.init() as core_context:
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
"""


def wait_for(client: Any, experiment_id: int, *states: str) -> None:
    give_up_at_s = time.monotonic() + DEADLINE_S
    while (found := client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"]) not in states:
        assert time.monotonic() < give_up_at_s, f"the experiment is {found}"
        time.sleep(0.1)


def test_a_plain_trainer_is_paused_and_goes_on(shared_master: MasterForTest) -> None:
    client = shared_master.client()
    config = {
        "name": "plain-trainer",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "eval_loss", "max_length": {"batches": STEPS}},
        "resources": {"slots_per_trial": 1},
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
        assert time.monotonic() < give_up_at_s, trial
        time.sleep(0.1)
        found = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
        trial = found[0] if found else {}
    client.post(f"/api/v1/experiments/{experiment_id}/pause")
    wait_for(client, experiment_id, "STATE_PAUSED")

    client.post(f"/api/v1/experiments/{experiment_id}/activate")
    wait_for(client, experiment_id, "STATE_COMPLETED", "STATE_ERROR")

    (trial,) = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
    log = client.get(f"/api/v1/trials/{trial['id']}/logs") if trial["state"] != "STATE_COMPLETED" else ""
    assert trial["state"] == "STATE_COMPLETED", log
    assert trial["totalBatchesProcessed"] == STEPS
    answer = client.get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    steps = sorted(int(one["metadata"]["steps_completed"]) for one in answer)
    assert len(steps) == 2
    assert 0 < steps[0] < STEPS
    assert steps[1] == STEPS
    assert any(path.endswith("/my_data.json") for path in answer[0]["resources"])
