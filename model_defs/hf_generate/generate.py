"""Generate text for many prompts with a model that ZeRO 3 shards over all slots; the trial's checkpoint has the texts."""

import json
import logging
import math
import os
import pathlib
import time
from typing import Any

import deepspeed
import determined as det
import torch
from memory import memory_table
from prompts import read_prompts, train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

import dstrial
from dstrial.local.script_variables import read_experiment

OUTPUTS_NAME = "outputs.jsonl"

logger = logging.getLogger("hf_generate")

Outputs = dict[int, dict[str, Any]]
"""Index of a prompt -> prompt, generated text and number of tokens."""


def hyperparameters() -> dict[str, Any]:
    """Return the trial's hyperparameters or, without a master, those of `dstrial.launch --config`."""
    info = det.get_cluster_info()
    if info is not None and info.task_type == "TRIAL":
        return info.trial.hparams
    known = read_experiment()
    if known is None:
        raise SystemExit(
            "There are no hyperparameters. Start it with: python -m dstrial.launch --config EXP.yaml generate.py"
        )
    return known.hyperparameters


def load_model(hparams: dict[str, Any]) -> tuple[Any, Any]:
    """Return (engine, tokenizer); the model is sharded while it is built, so that no rank ever has the whole model.

    Ranks: all, collectively.
    """
    config = dstrial.overwrite_deepspeed_config(
        hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args") or {}
    )
    # As long as this object lives, transformers makes and loads models under deepspeed.zero.Init.
    sharding = HfDeepSpeedConfig(config)
    assert sharding.is_zero3(), (
        "only ZeRO 3 shards the parameters over the ranks; set zero_optimization.stage to 3"
    )
    if hparams.get("model"):
        tokenizer = AutoTokenizer.from_pretrained(hparams["model"])
        model = AutoModelForCausalLM.from_pretrained(hparams["model"])
    else:
        logger.warning(
            "hyperparameters.model is not given: a new model with random weights writes random texts"
        )
        torch.manual_seed(hparams["seed"])
        tokenizer = train_tokenizer(hparams["vocab_size"])
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                "gpt2",
                vocab_size=len(tokenizer),
                n_positions=256,
                n_layer=hparams["n_layer"],
                n_head=4,
                n_embd=hparams["n_embd"],
                bos_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # text is generated at the right end
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.module.eval()
    return engine, tokenizer


def generate(engine: Any, tokenizer: Any, prompts: list[str], num_new_tokens: int) -> list[tuple[str, int]]:
    """Return the generated text and its number of tokens for each prompt.

    Every token needs the parameters of all ranks, so all ranks continue until the last rank has finished (``synced_gpus``).

    Ranks: all, collectively.
    """
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(
        engine.device
    )
    with torch.no_grad():
        tokens = engine.module.generate(
            **batch,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            synced_gpus=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    new = tokens[:, batch["input_ids"].shape[1] :]
    num_tokens = (new != tokenizer.pad_token_id).sum(dim=1).tolist()
    return list(zip(tokenizer.batch_decode(new, skip_special_tokens=True), num_tokens, strict=True))


def restore(core_context: det.core.Context) -> Outputs:
    """Return the outputs in the latest checkpoint, saved by any number of ranks; {} in a new run.

    Ranks: all, collectively.
    """
    info = det.get_cluster_info()
    latest = info.latest_checkpoint if info is not None else None
    resumed = os.environ.get("DSTRIAL_RESUME")  # checkpoint directory that `dstrial run --resume` names
    if latest is not None:
        with core_context.checkpoint.restore_path(latest) as path:
            return read_outputs(pathlib.Path(path))
    return read_outputs(pathlib.Path(resumed)) if resumed else {}


def read_outputs(checkpoint: pathlib.Path) -> Outputs:
    lines = (checkpoint / OUTPUTS_NAME).read_text(encoding="utf-8").splitlines()
    return {output["prompt_idx"]: output for output in map(json.loads, lines)}


def store(core_context: det.core.Context, outputs: Outputs) -> None:
    """Save a checkpoint with all outputs so far. Ranks: the chief."""
    with core_context.checkpoint.store_path({"steps_completed": len(outputs)}) as (path, _uuid):
        lines = (json.dumps(outputs[prompt_idx], ensure_ascii=False) for prompt_idx in sorted(outputs))
        (pathlib.Path(path) / OUTPUTS_NAME).write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    hparams = hyperparameters()
    with dstrial.core_context() as core_context:
        rank, num_ranks = core_context.distributed.rank, core_context.distributed.size
        is_chief = rank == 0
        engine, tokenizer = load_model(hparams)
        table = memory_table(engine, core_context.distributed)
        if is_chief:
            logger.info("%s", table)
        prompts = read_prompts(hparams["num_prompts"], hparams["num_prompt_chars_max"], hparams["seed"])
        outputs = restore(core_context)
        left = [prompt_idx for prompt_idx in range(len(prompts)) if prompt_idx not in outputs]
        own, size = left[rank::num_ranks], hparams["batch_size"]
        # The same on all ranks: a rank without further prompts repeats the first one until the last round.
        num_rounds = math.ceil(math.ceil(len(left) / num_ranks) / size)
        for round_idx in range(num_rounds):
            chosen = own[round_idx * size : (round_idx + 1) * size]
            began_s = time.perf_counter()
            texts = generate(
                engine, tokenizer, [prompts[idx] for idx in chosen] or [prompts[0]], hparams["num_new_tokens"]
            )
            made = [
                {"prompt_idx": idx, "prompt": prompts[idx], "output": text, "num_tokens": num_tokens}
                for idx, (text, num_tokens) in zip(chosen, texts, strict=False)
            ]
            gathered = core_context.distributed.gather(made)
            if gathered is not None:
                new = {output["prompt_idx"]: output for of_rank in gathered for output in of_rank}
                outputs |= new
                report(core_context, outputs, new, len(prompts), time.perf_counter() - began_s)
            if core_context.distributed.broadcast(
                core_context.preempt.should_preempt() if is_chief else None
            ):
                if is_chief:
                    store(core_context, outputs)
                return
        if is_chief:
            num_tokens = sum(output["num_tokens"] for output in outputs.values())
            core_context.train.report_validation_metrics(
                len(outputs), {"num_outputs": len(outputs), "num_tokens": num_tokens}
            )
            store(core_context, outputs)


def report(
    core_context: det.core.Context, outputs: Outputs, new: Outputs, num_prompts: int, elapsed_s: float
) -> None:
    """Report the speed of a round, whose outputs are ``new``, and the progress. Ranks: the chief."""
    num_tokens = sum(output["num_tokens"] for output in new.values())
    core_context.train.report_training_metrics(
        len(outputs), {"num_tokens": num_tokens, "tokens_per_second": num_tokens / elapsed_s}
    )
    core_context.train.report_progress(len(outputs) / num_prompts)


if __name__ == "__main__":
    main()
