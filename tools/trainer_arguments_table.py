"""Show what becomes of every pair of a Trainer argument and a DeepSpeed key, and that the real Trainer accepts it.

Usage: ``python -m dstrial.launch --slots 2 tools/trainer_arguments_table.py [--json FILE]``. Rank 0 prints a Markdown table:
for each pair the cases absent, equal, contradictory and ``"auto"``, what the Trainer alone makes of them, and what
``dstrial.dsat.get_hf_args_with_overwrites`` returns. Both are given to the installed transformers: ``HfArgumentParser`` parses
the arguments into real ``TrainingArguments``, whose ``HfTrainerDeepSpeedConfig`` is processed and finalized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import HfArgumentParser, TrainingArguments

from dstrial.config.deepspeed_source import MAIN_KEY, read_deepspeed
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.merge import overwrite_deepspeed_config
from dstrial.dsat import get_hf_args_with_overwrites
from dstrial.errors import ConfigError
from dstrial.integrations import huggingface
from dstrial.integrations.huggingface.argument_table import reconcile

NUM_STEPS = 50
"""Steps that the Trainer is taken to count."""

ADAMW = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {}}}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
CPU = () if torch.accelerator.is_available() else ("--use_cpu", "True")
"""Without an accelerator TrainingArguments refuse bf16 unless they are told that this is meant."""
PRECISIONS = ("bf16", "fp16")
IS_RATIO_A_FLAG = "warmup_ratio" in {field.name for field in dataclasses.fields(TrainingArguments)}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """An argument, a key, and values to try.

    Attributes:
        flag: argument without dashes.
        key: dotted key.
        same: the value as both sides write it: text of the flag, value of the key.
        other: another text for the flag.
        base: what the config has besides.
    """

    flag: str
    key: str
    same: tuple[str, Any]
    other: str
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)


PAIRS = (
    Pair("per_device_train_batch_size", "train_micro_batch_size_per_gpu", ("4", 4), "16"),
    Pair("gradient_accumulation_steps", "gradient_accumulation_steps", ("2", 2), "4"),
    Pair("per_device_train_batch_size", "train_batch_size", ("4", 8), "16"),
    Pair("max_grad_norm", "gradient_clipping", ("0.5", 0.5), "2.0"),
    Pair("learning_rate", "optimizer.params.lr", ("0.001", 0.001), "1e-05", ADAMW),
    Pair("learning_rate", "scheduler.params.warmup_max_lr", ("0.001", 0.001), "1e-05", WARMUP),
    Pair("adam_beta1", "optimizer.params.betas", ("0.8", [0.8, 0.999]), "0.7", ADAMW),
    Pair("adam_beta2", "optimizer.params.betas", ("0.95", [0.9, 0.95]), "0.99", ADAMW),
    Pair("adam_epsilon", "optimizer.params.eps", ("1e-06", 1e-6), "1e-07", ADAMW),
    Pair("weight_decay", "optimizer.params.weight_decay", ("0.1", 0.1), "0.3", ADAMW),
    Pair("warmup_steps", "scheduler.params.warmup_num_steps", ("10", 10), "20", WARMUP),
    Pair("max_steps", "scheduler.params.total_num_steps", (str(NUM_STEPS), NUM_STEPS), str(NUM_STEPS), DECAY),
    Pair("bf16", "bf16.enabled", ("True", True), "False"),
    Pair("fp16", "fp16.enabled", ("True", True), "False"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row: arguments, config and overwrites as a user would write them."""

    name: str
    arguments: tuple[str, ...]
    config: Mapping[str, Any]
    overwrite: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def nested(key: str, value: Any) -> dict[str, Any]:
    *sections, last = key.split(".")
    made: dict[str, Any] = {last: value}
    for section in reversed(sections):
        made = {section: made}
    return made


def cases_of(pair: Pair) -> Iterator[Case]:
    base = overwrite_deepspeed_config({"zero_optimization": {"stage": 2}}, dict(pair.base))
    steps = () if pair.flag == "max_steps" else ("--max_steps", str(NUM_STEPS))
    if pair.flag in PRECISIONS:
        steps = (*steps, *CPU)
    same, value = pair.same

    def case(name: str, flag: str | None, key: Any, overwrite: Any = None) -> Case:
        given = () if flag is None else (f"--{pair.flag}", flag)
        config = base if key is None else overwrite_deepspeed_config(base, nested(pair.key, key))
        return Case(name, (*given, *steps), config, {} if overwrite is None else nested(pair.key, overwrite))

    if pair.flag == "max_steps":
        yield case("equal", same, value)
        yield case("contradictory", pair.other, value + 7)
        yield case("auto", same, "auto")
        return
    yield case("both absent", None, None)
    yield case("key absent", same, None)
    yield case("argument absent", None, value)
    yield case("equal", same, value)
    yield case("contradictory", pair.other, value)
    yield case("auto, argument given", same, "auto")
    yield case("auto, argument absent", None, "auto")
    yield case("overwrite contradicts both", pair.other, None if pair.flag in PRECISIONS else "auto", value)


def more_cases() -> Iterator[Case]:
    """Yield cases of several arguments or keys at once."""
    steps = ("--max_steps", str(NUM_STEPS))
    zero = {"zero_optimization": {"stage": 2}}
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    yield Case(
        "batch: total given, both arguments given and contradictory",
        ("--per_device_train_batch_size=4", "--gradient-accumulation-steps=2", *steps),
        {**zero, "train_batch_size": 64},
    )
    yield Case("batch: all auto, arguments absent", steps, {**zero, **auto})
    yield Case(
        "batch: all auto, overwritten micro batch",
        ("--per-device-train-batch-size", "8", *steps),
        {**zero, **auto},
        {"train_micro_batch_size_per_gpu": 2},
    )
    yield Case(
        "learning rate: two keys differ, one overwritten",
        ("--learning_rate", "1e-05", *steps),
        overwrite_deepspeed_config(
            {**zero, **ADAMW, **WARMUP}, {"scheduler": {"params": {"warmup_max_lr": 0.01}}}
        ),
        {"optimizer": {"params": {"lr": 0.002}}},
    )
    yield Case(
        "precision: bf16 is on, --fp16 given", ("--fp16", *steps, *CPU), {**zero, "bf16": {"enabled": True}}
    )
    yield Case(
        "precision: fp16 off by the config, --bf16_full_eval given",
        ("--bf16_full_eval", *steps, *CPU),
        {**zero, "fp16": {"enabled": False}, "bf16": {"enabled": False}},
    )
    if IS_RATIO_A_FLAG:
        yield Case(
            "warm-up: --warmup_ratio and a number of steps",
            ("--warmup_ratio", "0.2", *steps),
            {**zero, **overwrite_deepspeed_config(WARMUP, nested("scheduler.params.warmup_num_steps", 10))},
        )
    yield Case("zero_optimization is missing", steps, {"gradient_clipping": 1.0})
    yield Case(
        "everything contradictory",
        (
            *(
                "--per_device_train_batch_size",
                "16",
                "--gradient_accumulation_steps=4",
                "--learning_rate=1e-05",
            ),
            *(
                "--max-grad-norm",
                "9",
                "--adam_beta1",
                "0.5",
                "--adam_epsilon",
                "1e-4",
                "--weight-decay=0.7",
                "--warmup_steps",
            ),
            *("33", "--max_steps", str(NUM_STEPS), "--bf16", "--deepspeed", "another.json", *CPU),
        ),
        {
            **zero,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": 0.001,
                    "betas": [0.9, 0.95],
                    "eps": 1e-6,
                    "weight_decay": 0.1,
                    "torch_adam": True,
                },
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 10, "total_num_steps": 77},
            },
            "bf16": {"enabled": False},
        },
    )


class Verdict(str):
    """What the real Trainer says: ``accepts``, or its refusal."""

    __slots__ = ()


def tried(arguments: list[str], out: Path) -> tuple[Verdict, dict[str, Any], Any]:
    """Parse arguments and finalize the config as a Trainer does; return its verdict, the config and the arguments. Ranks: all."""
    words = [*arguments, "--output_dir", str(out), "--report_to", "none"]
    try:
        (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            words, look_for_args_file=False
        )
        config = parsed.hf_deepspeed_config
        config.trainer_config_finalize(parsed, torch.nn.Linear(1, 1), NUM_STEPS)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("- ds")]
        return Verdict("refuses: " + "; ".join(lines or [str(error).splitlines()[0]])), {}, None
    return Verdict("accepts"), config.config, parsed


def disagreements(config: Mapping[str, Any], parsed: Any) -> list[str]:
    """Return what DeepSpeed is told otherwise than the Trainer, where the Trainer does not look."""
    found = []
    clipping = config.get("gradient_clipping", 1.0)
    if clipping != parsed.max_grad_norm:
        found.append(f"max_grad_norm {parsed.max_grad_norm}, DeepSpeed clips at {clipping}")
    if config.get("gradient_accumulation_steps", 1) != parsed.gradient_accumulation_steps:
        found.append(f"gradient_accumulation_steps {parsed.gradient_accumulation_steps}, DeepSpeed counts 1")
    for section, names in (
        (
            "optimizer",
            {
                "lr": ("learning_rate",),
                "eps": ("adam_epsilon",),
                "weight_decay": ("weight_decay",),
                "betas": ("adam_beta1", "adam_beta2"),
            },
        ),
        ("scheduler", {"warmup_max_lr": ("learning_rate",), "warmup_num_steps": ("warmup_steps",)}),
    ):
        parameters = config.get(section, {}).get("params") if section in config else None
        defaults = dict(TrainingArguments.__dataclass_fields__)
        if parameters is None:
            continue
        for field in (field for name, fields in names.items() if name not in parameters for field in fields):
            if getattr(parsed, field) != defaults[field].default:
                found.append(f"{field} {getattr(parsed, field)}, DeepSpeed takes its default")
    return found


def alone(case: Case, directory: Path) -> str:
    """Return what the Trainer makes of a case without dstrial; overwrites are in the file then. Ranks: all."""
    path = directory / "alone.json"
    _write(path, overwrite_deepspeed_config(dict(case.config), dict(case.overwrite)))
    given = [word for word in case.arguments if word != "another.json"]
    given = [word for word in given if word != "--deepspeed"]
    verdict, config, parsed = tried([*given, "--deepspeed", str(path)], directory)
    if parsed is None:
        return str(verdict)
    ignored = disagreements(config, parsed)
    return f"accepts and ignores: {'; '.join(ignored)}" if ignored else "accepts"


def row_of(case: Case, directory: Path, world_size: int) -> dict[str, Any]:
    hparams = {MAIN_KEY: "ds_config.json", "overwrite_deepspeed_args": dict(case.overwrite)}
    _write(directory / "ds_config.json", case.config)
    before = (directory / "ds_config.json").read_bytes()
    arguments = list(case.arguments)
    row: dict[str, Any] = {
        "case": case.name,
        "arguments": " ".join(arguments),
        "alone": alone(case, directory),
    }
    row["config"] = json.dumps(overwrite_deepspeed_config(dict(case.config), dict(case.overwrite)))
    try:
        source = read_deepspeed(MAIN_KEY, hparams, Path(), {}, "", Diagnostics({}, ""))
        assert source is not None
        found = reconcile(arguments, source, world_size)
        returned = get_hf_args_with_overwrites(arguments, hparams)
    except ConfigError as error:
        return {
            **row,
            "verdict": f"ConfigError: {error}",
            "outcomes": [],
            "returned": "",
            "effective": "",
            "ignored": [],
        }
    verdict, config, parsed = tried(returned, directory)
    is_untouched = arguments == list(case.arguments) and (directory / "ds_config.json").read_bytes() == before
    return {
        **row,
        "outcomes": [[one.argument, one.is_contradiction, one.text] for one in found.decisions],
        "returned": " ".join(word for word in returned[: returned.index("--deepspeed")]),
        "effective": json.dumps(found.config),
        "verdict": str(verdict),
        "ignored": [] if parsed is None else disagreements(config, parsed),
        "is_untouched": is_untouched,
        "world_size": 0 if parsed is None else parsed.world_size,
    }


def _write(path: Path, config: Mapping[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(config))
    temporary.replace(path)


def rows(directory: Path, world_size: int) -> list[dict[str, Any]]:
    made = []
    for pair in PAIRS:
        for case in cases_of(pair):
            row = row_of(case, directory, world_size)
            made.append(
                {**row, "pair": f"`--{pair.flag}` x `{pair.key}`", "flag": f"--{pair.flag}", "key": pair.key}
            )
    for case in more_cases():
        made.append({**row_of(case, directory, world_size), "pair": "several", "flag": "", "key": ""})
    return made


def _outcome(row: Mapping[str, Any]) -> str:
    texts = []
    for flag, _, text in row["outcomes"]:
        is_its_own = row["flag"] == flag or (row["key"] and row["key"] in text)
        if (is_its_own or row["pair"] == "several") and (row["flag"] == "" or flag != "--deepspeed"):
            texts.append(text)
    return "<br>".join(texts) or ("nothing is changed" if row["verdict"] == "accepts" else row["verdict"])


def table(made: list[dict[str, Any]], world_size: int) -> str:
    lines = [
        f"transformers {transformers.__version__}, {world_size} ranks, {len(made)} cases",
        "",
        "| pair | case | arguments | the Trainer alone | outcome with dstrial | the Trainer then |",
        "|---|---|---|---|---|---|",
    ]
    for row in made:
        cells = (
            row["pair"],
            row["case"],
            f"`{row['arguments']}`",
            row["alone"],
            _outcome(row),
            row["verdict"],
        )
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = Path(sys.argv[2]).resolve() if sys.argv[1:2] == ["--json"] else None
        os.chdir(directory)
        core_context = stack.enter_context(huggingface.init())
        rank, world_size = core_context.distributed.rank, core_context.distributed.size
        made = rows(directory, world_size)
        if rank == 0 and file is not None:
            file.write_text(json.dumps({"version": transformers.__version__, "rows": made}))
        elif rank == 0:
            sys.stdout.write(table(made, world_size))


if __name__ == "__main__":
    main()
