"""Run small Trainer runs in a process per rank: ``trainer_program.py RUNS.json``.

The file holds a list of settings, one entry per run; ``DEFAULTS`` describes them. Metrics and checkpoints are written to the
run directories, other results to ``RUNS.json.<rank>``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import determined as det
import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from dstrial.cli.app import main as dstrial
from dstrial.errors import DstrialError
from dstrial.integrations import huggingface
from dstrial.ranks.process_group import without_compiled_collectives
from dstrial.resume.metadata import RESUME_VARIABLE

DEFAULTS: dict[str, Any] = {
    "stage": None,  # ZeRO stage; None for a Trainer without DeepSpeed
    "steps": 6,
    "micro": 2,
    "accumulation": 1,
    "pause_at": None,  # step at whose begin rank 0 gets SIGTERM; 0: before training
    "pause_in_evaluation": None,  # step in whose evaluation rank 0 gets SIGTERM
    "eval_steps": 4,
    "num_eval_sets": 1,
    "counts_tokens": False,
    "is_partitioned": False,  # whether from_config creates the model, which ZeRO 3 partitions at once
    "storage": None,  # checkpoint directory of det.core.init(), used in place of huggingface.init()
    "exports": None,  # [checkpoint, directory]: only export the checkpoint and load it with transformers
    "is_plain": False,  # whether to call trainer.train() instead of huggingface.train()
    "searcher": {},
    "output": "output",
    "run_dir": None,  # an existing run directory
    "resume": None,  # value of DSTRIAL_RESUME
    "resume_step": None,  # resume from the run directory's checkpoint of this step
    "saves_at": None,  # step at which a callback after DetCallback requests a save
    "has_model_init": False,  # whether to pass model_init instead of model
    "lora": None,  # seed of the base model of a PEFT LoRA model; None: no LoRA
    "is_frozen": False,  # whether only the last block is trained
    "patience": None,  # patience of EarlyStoppingCallback; None: no such callback
    "options": {},  # extra TrainingArguments
    "callback": {},  # extra arguments of DetCallback
    "data": {},  # section ``data`` of the experiment config
    "nan_after": None,  # step after which the weights are set to NaN
    "error": False,  # whether to record a DstrialError instead of raising it
}


class Records(torch.utils.data.Dataset):
    """Random token records, the same on every machine."""

    def __init__(self, num_records: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 64, (num_records, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[idx], "labels": self.tokens[idx]}


class Interruption(TrainerCallback):
    """Sends SIGTERM at the step of the settings, and records the last step."""

    def __init__(self, asked: dict[str, Any], facts: dict[str, Any]) -> None:
        self.asked = asked
        self.facts = facts
        self.num_evaluations = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.asked["pause_at"] and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.asked["pause_in_evaluation"] and args.process_index == 0:
            self.asked["pause_in_evaluation"] = None
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asked["pause_at"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_evaluations += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.facts["ended_at"] = state.global_step


class Save(TrainerCallback):
    """Requests a save at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == self.step


class Poison(TrainerCallback):
    """Sets all weights to NaN after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))


class Warnings(logging.Handler):
    """Collects the messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def model(*, is_partitioned: bool = False) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_layer=2, n_head=2, n_embd=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config) if is_partitioned else GPT2LMHeadModel(config)


def lora_model(seed: int) -> Any:
    import peft

    torch.manual_seed(seed)
    return peft.get_peft_model(
        model(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    )


def evaluation_sets(asked: dict[str, Any]) -> Any:
    if not asked["eval_steps"]:
        return None
    if asked["num_eval_sets"] == 1:
        return Records(8)
    return {f"set{idx}": Records(8) for idx in range(asked["num_eval_sets"])}


def context_of(asked: dict[str, Any]) -> Any:
    if asked["storage"]:
        return det.core.init(checkpoint_storage=asked["storage"])
    exp_conf = {"name": "trainer", "searcher": asked["searcher"], "data": asked["data"]}
    return huggingface.init(exp_conf=exp_conf, run_dir=asked["run_dir"])


def run(asked: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with context_of(asked) as core_context:
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
        callback = huggingface.DetCallback(core_context, args, **asked["callback"])
        set_seed(args.seed)
        interruption = Interruption(asked, facts)
        early = [EarlyStoppingCallback(asked["patience"])] if asked["patience"] else []
        make = functools.partial(model, is_partitioned=asked["is_partitioned"])
        made = {"model_init": lambda: make()} if asked["has_model_init"] else {"model": make()}
        if asked["lora"]:
            made = {"model": lora_model(asked["lora"])}
        if asked["is_frozen"]:
            for name, parameter in made["model"].named_parameters():
                parameter.requires_grad = ".h.1." in name
        late = [] if asked["saves_at"] is None else [Save(asked["saves_at"])]
        late += [] if asked["nan_after"] is None else [Poison(asked["nan_after"])]
        trainer = Trainer(
            **made,
            args=args,
            train_dataset=Records(40),
            eval_dataset=evaluation_sets(asked),
            callbacks=[*early, interruption, callback, *late],
        )
        output = trainer.train() if asked["is_plain"] else huggingface.train(trainer, callback)
        optimizer = trainer.optimizer
        facts |= {
            "weight_decay": optimizer.param_groups[0]["weight_decay"],
            "global_step": output.global_step,
            "is_stopped": callback.is_stopped,
            "num_evaluations": interruption.num_evaluations,
            "length": callback.current_op.length,
        }
    return facts


def export(checkpoint: str, directory: str) -> dict[str, Any]:
    assert dstrial(["checkpoint", "export", checkpoint, directory, "--format", "hf"]) == 0
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    wrong = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
    return {"wrong": wrong, "width": loaded.config.n_embd}


def checkpoint_of(run_dir: Path, step: int) -> str:
    paths = run_dir.glob("checkpoints/*/metadata.json")
    found = [path for path in paths if json.loads(path.read_text())["steps_completed"] == step]
    return str(found[0].parent)


def main(path: Path) -> None:
    # One process group for all runs; a run does not destroy a group that it did not create.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    warnings = Warnings()
    for name in ("dstrial.integrations.huggingface", "dstrial.loop"):
        logging.getLogger(name).addHandler(warnings)
    found = []
    for given in json.loads(path.read_text()):
        asked = {**DEFAULTS, **given}
        os.environ.pop(RESUME_VARIABLE, None)
        # TrainingArguments sets it for DeepSpeed; a later run without DeepSpeed would use DeepSpeed, too.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        if asked["resume_step"]:
            asked["resume"] = checkpoint_of(Path(asked["run_dir"]), asked["resume_step"])
        if asked["resume"]:
            os.environ[RESUME_VARIABLE] = asked["resume"]
        try:
            found.append(export(*asked["exports"]) if asked["exports"] else run(asked))
        except DstrialError as error:
            if not asked["error"]:
                raise
            found.append({"error": f"{type(error).__name__}: {error}"})
        found[-1]["warnings"], warnings.texts = warnings.texts, []
        path.with_name(f"{path.name}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
