"""Small Trainer runs for the tests, one after the other in one process: ``python trainer_program.py RUNS.json`` on each rank.

The file holds a list of settings, see ``DEFAULTS``. Metrics and checkpoints are found in the runs' directories, further facts
in ``RUNS.json.<rank>``, one entry for each run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from dstrial.config.saved_run import RESUME_VARIABLE
from dstrial.errors import DstrialError
from dstrial.integrations import huggingface
from dstrial.ranks.process_group import without_compiled_collectives

DEFAULTS: dict[str, Any] = {
    "stage": None,  # ZeRO stage; None for a Trainer without DeepSpeed
    "steps": 6,
    "micro": 2,
    "accumulation": 1,
    "pause_at": None,  # SIGTERM to rank 0 during this step
    "pause_in_evaluation": None,  # the same in the evaluation of this step
    "eval_steps": 4,
    "num_eval_sets": 1,
    "counts_tokens": False,
    "leave_evaluation": False,
    "is_plain": False,  # trainer.train() in place of huggingface.train
    "searcher": {},
    "output": "output",
    "run_dir": None,  # an existing run directory
    "resume": None,  # as DSTRIAL_RESUME
    "options": {},  # more TrainingArguments
    "callback": {},  # more arguments of DetCallback
    "error": False,  # whether the run is to fail, and its error to be noted
}


class Records(torch.utils.data.Dataset):
    """Tokens that differ from record to record, the same on every machine."""

    def __init__(self, num_records: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 64, (num_records, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[idx], "labels": self.tokens[idx]}


class Interruption(TrainerCallback):
    """Sends SIGTERM to this process where a test asks for it, and notes at which step training ended."""

    def __init__(self, asked: dict[str, Any], facts: dict[str, Any]) -> None:
        self.asked = asked
        self.facts = facts
        self.num_prediction_steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.asked["pause_at"] and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_prediction_steps += 1
        if state.global_step == self.asked["pause_in_evaluation"] and args.process_index == 0:
            self.asked["pause_in_evaluation"] = None
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.facts["ended_at"] = state.global_step


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_layer=2, n_head=2, n_embd=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def evaluation_sets(asked: dict[str, Any]) -> Any:
    if not asked["eval_steps"]:
        return None
    if asked["num_eval_sets"] == 1:
        return Records(8)
    return {f"set{idx}": Records(8) for idx in range(asked["num_eval_sets"])}


def run(asked: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    exp_conf = {"name": "trainer", "searcher": asked["searcher"]}
    with huggingface.init(exp_conf=exp_conf, run_dir=asked["run_dir"]) as core_context:
        evaluation = (
            {"eval_strategy": "steps", "eval_steps": asked["eval_steps"]} if asked["eval_steps"] else {}
        )
        args = TrainingArguments(
            output_dir=asked["output"],
            max_steps=asked["steps"],
            per_device_train_batch_size=asked["micro"],
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=asked["accumulation"],
            learning_rate=1e-2,
            logging_steps=1,
            include_num_input_tokens_seen=asked["counts_tokens"],
            report_to=[],
            disable_tqdm=True,
            deepspeed=None if asked["stage"] is None else deepspeed_config(asked["stage"]),
            **{**evaluation, "save_strategy": "no", **asked["options"]},
        )
        callback = huggingface.DetCallback(
            core_context, args, leave_evaluation=asked["leave_evaluation"], **asked["callback"]
        )
        set_seed(args.seed)
        interruption = Interruption(asked, facts)
        trainer = Trainer(
            model=model(),
            args=args,
            train_dataset=Records(40),
            eval_dataset=evaluation_sets(asked),
            callbacks=[interruption, callback],
        )
        output = trainer.train() if asked["is_plain"] else huggingface.train(trainer, callback)
        facts |= {
            "global_step": output.global_step,
            "is_stopped": callback.is_stopped,
            "num_prediction_steps": interruption.num_prediction_steps,
        }
    return facts


def main(path: Path) -> None:
    # One process group for all runs: made here, it is not theirs to end.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    found = []
    for given in json.loads(path.read_text()):
        asked = {**DEFAULTS, **given}
        os.environ.pop(RESUME_VARIABLE, None)
        if asked["resume"]:
            os.environ[RESUME_VARIABLE] = asked["resume"]
        try:
            found.append(run(asked))
        except DstrialError as error:
            if not asked["error"]:
                raise
            found.append({"error": f"{type(error).__name__}: {error}"})
        path.with_name(f"{path.name}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
