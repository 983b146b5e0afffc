"""Write the generated pages of docs/reference: experiment config, settings of the master, command line, parallel axes.

    python tools/reference_pages.py

``tests/config/test_json_schema.py`` compares the pages with the tables and parsers that they are made from.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from dstrial.cli.app import COMMANDS, build_parser
from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.keys import json_schema
from dstrial.config.parallel_dims import ParallelDims
from dstrial.config.schema import EXPERIMENT
from dstrial.master.settings import SETTINGS
from dstrial.resume.metadata import EngineRecord, SavedRun, given_settings
from dstrial.resume.plan import resume_problems

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_HEAD = """\
# The experiment config

This page lists every key of an experiment config that `dstrial check` accepts: the keys of Determined's config,
version 0, and dstrial's own keys below `data.dstrial`. A key with the value null counts as not given.
[Train](../how-to/training.md) says which keys `dstrial run` uses. [A shared master](../how-to/shared-master.md) has
settings that replace some defaults. *Without effect* marks keys that dstrial accepts and ignores. *Unless given* means:
if you leave out the key.

An editor that supports JSON Schema, such as VS Code with the YAML extension, completes and checks the keys while you
write. Save the schema with `dstrial check --schema > experiment-config.schema.json`, and start the config with:

    # yaml-language-server: $schema=experiment-config.schema.json
"""
_SETTINGS_HEAD = """\
# Settings of the master

This page lists every key of the file that `dstrial up --config-file FILE` reads. Without such a file, all defaults
apply. `det -u admin master config` shows the settings of a running master.

"""
_COMMANDS_HEAD = """\
# The command line

This page shows the help of every command, as `dstrial COMMAND --help` prints it. The *master* is the server that
`dstrial up` starts. A *slot* is one accelerator, or one rank on the CPU. Exit status: 0 on success, 1 after an error, 2
after wrong usage, and 130 after Ctrl-C, unless the command's help says otherwise.

| command | use |
|---|---|
"""
_AXES_HEAD = """\
# Parallel axes: what trains, what resumes

The table shows the result of `dstrial check` for each axis of parallelism, ZeRO stage and optimizer, on four slots.
[Parallelism](../how-to/parallelism.md) says how to set up an axis.

- The last three columns say whether a checkpoint of the combination resumes after a change.
  A resume in the same layout is always possible and bitwise exact.
- *yes*: `dstrial check` accepts the combination. When training starts, the ranks also check facts that only the code
  shows, such as process groups of an engine and fused layers.
- *refused in the ranks*: `dstrial check` accepts the combination, and training ends with an error before the first batch.
  `dstrial check` cannot see experts and `ep_size`, which are in the trial's code.
- *no*: `dstrial check` refuses the combination. The number is that of its message below the table.
- A dash: there is no checkpoint to resume from, or no axis to remove.
- *optimizer of the trial*: an SGD of torch that the trial passes to `deepspeed.initialize`.

| axis | ZeRO | optimizer | trains | resumes on eight slots | resumes in another ZeRO stage | resumes without the axis |
|---|---|---|---|---|---|---|
"""
_OPTIMIZERS = {
    "Adam": "FusedAdam",
    "AdamW": "FusedAdam",
    "Muon": "MuonWithAuxAdam",
    "optimizer of the trial": "SGD",
}
_WRAPPERS = ("", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
# Name of an axis -> fields of ParallelDims, and settings of the DeepSpeed config, for two ranks.
_AXES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({}, {}),
    "pipeline": ({"pp": 2}, {}),
    "tensor (AutoTP)": ({"tp": 2}, {"tensor_parallel": {"autotp_size": 2}}),
    "sequence (Ulysses)": ({"sp": 2}, {"sequence_parallel_size": 2}),
    "expert (MoE)": ({"ep": 2}, {}),
}
_ROW = "| key | type | default | meaning |\n|---|---|---|---|\n"


def rows(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a table row for each key below a part of the schema."""
    for key, value in schema["properties"].items():
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        section = f"keys `{prefix}{key}.…` below" if "properties" in value else ""
        yield f"| `{prefix}{key}` | {_type(value)} | {default} | {value.get('description', section)} |\n"
        if "properties" in value and "batches" not in value["properties"]:  # a length is no section
            yield from rows(value, f"{prefix}{key}.")
        elif "properties" in value.get("items", {}):
            yield from rows(value["items"], f"{prefix}{key}[].")


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"] if one is not None)
    bounds = {
        "at least": value.get("minimum"),
        "above": value.get("exclusiveMinimum"),
        "at most": value.get("maximum"),
    }
    words = {"array": "list", "object": "mapping"}
    kinds = " or ".join(words.get(one, one) for one in value.get("type", ["any"]) if one != "null")
    return ", ".join([kinds, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])


def experiment_config() -> str:
    """Return the page of the experiment config."""
    schema = json_schema(EXPERIMENT, "")
    parts = [_HEAD]
    properties = schema["properties"]
    sections = [key for key in properties if "properties" in properties[key] and not key.startswith("min_")]
    single = {key: value for key, value in properties.items() if key not in sections}
    parts.append(f"\n## Top level\n\n{_ROW}{''.join(rows({'properties': single}))}")
    for key in sections:
        text = properties[key]["description"]
        table = "".join(rows(properties[key], f"{key}."))
        parts.append(f"\n## `{key}`\n\n{text[:1].upper()}{text[1:]}.\n\n{_ROW}{table}")
    return "".join(parts)


def master_settings() -> str:
    """Return the page of the master's settings file."""
    return f"{_SETTINGS_HEAD}{_ROW}{''.join(rows(json_schema(SETTINGS, '')))}"


def command_line() -> str:
    """Return the page of all commands."""
    parts = [
        _COMMANDS_HEAD,
        *(f"| [`dstrial {name}`](#dstrial-{name}) | {text} |\n" for name, text in COMMANDS.items()),
    ]
    for name in COMMANDS:
        parts += _sections((name,))
    return "".join(parts)


def _sections(words: tuple[str, ...]) -> Iterator[str]:
    text = help_of(*words)
    yield f"\n{'#' * (len(words) + 1)} dstrial {' '.join(words)}\n\n```text\n{text.strip()}\n```\n"
    if re.search(r" (ACTION|TOOL) \.\.\.", text):
        actions = re.findall(
            r"^    ([a-z][a-z-]*)(?:\s|$)", text.partition("options:")[0], flags=re.MULTILINE
        )
        for action in actions:
            yield from _sections((*words, action))


def help_of(*words: str) -> str:
    """Return what ``dstrial WORDS --help`` prints at 100 columns."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        build_parser(words[0]).parse_args([*words, "--help"])
    return printed.getvalue()


def parallel_axes() -> str:
    """Return the page of the parallel axes."""
    notes: dict[str, int] = {}
    lines = [_AXES_HEAD]
    for axis in _AXES:
        for stage in range(4):
            rows: dict[str, list[str]] = {}
            for optimizer in _OPTIMIZERS:
                cells = [
                    f"no, [{notes.setdefault(one, len(notes) + 1)}](#messages)" if one.endswith(".") else one
                    for one in _decisions(axis, stage, optimizer)
                ]
                cells += ["—"] * (4 - len(cells))
                rows.setdefault(" | ".join(cells), []).append(optimizer)
            lines += [f"| {axis} | {stage} | {', '.join(names)} | {row} |\n" for row, names in rows.items()]
    lines.append("\n## Messages\n\n")
    lines += [f"{number}. {text}\n" for text, number in notes.items()]
    return "".join(lines)


def _decisions(axis: str, stage: int, optimizer: str) -> Iterator[str]:
    """Yield what the check says of the config, then of three resumes: yes, or a message."""
    sizes, sections = _AXES[axis]
    dims = ParallelDims(4, **sizes, is_pipeline="pp" in sizes)
    config = _deepspeed_config(stage, optimizer, sections)
    problems = check_deepspeed(config, dims, auto="warning").problems
    is_code_refused = "ep" in sizes and stage == 3  # by DeepSpeed, for its MoE
    yield str(problems[0]) if problems else "refused in the ranks" if is_code_refused else "yes"
    if problems or is_code_refused:
        return
    engine = EngineRecord(
        engine_kind="pipeline" if dims.is_pipeline else "data_parallel",
        zero_stage=stage,
        offload_optimizer="none",
        offload_parameters="none",
        optimizer=_OPTIMIZERS[optimizer],
        wrapper=_WRAPPERS[stage],
        lr_scheduler="",
        train_batch_size=4 * (4 if "tp" in sizes else dims.dp),
        micro_batch_size=1,
        micro_batches_per_batch=4,
        expert_parallel_size=sizes.get("ep", 0),
        **dims.to_layout(),
        given=given_settings(config),
    )
    saved = SavedRun("C", 100, None, (engine,))
    other = _deepspeed_config((stage + 1) % (2 if dims.is_pipeline else 4), optimizer, sections)
    changes: list[Any] = [(8, config, {}), (4, other, {})]
    if "ep" in sizes:
        changes.append(None)
    elif sizes:
        changes.append((4, _deepspeed_config(stage, optimizer, {}), {"pipeline_stages": 1}))
    for change in changes:
        if change is None:  # only the trial's code has the size
            yield "refused in the ranks"
            continue
        num_slots, changed, extents = change
        found = resume_problems(saved, num_slots=num_slots, extents=extents, configs=[changed])
        yield str(found[0]) if found else "yes"


def _deepspeed_config(stage: int, optimizer: str, sections: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage, **({"reduce_scatter": False} if (stage, optimizer) == (3, "Muon") else {})}
    kind = {} if optimizer == "optimizer of the trial" else {"optimizer": {"type": optimizer}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": zero,
        **({} if kind else {"zero_allow_untested_optimizer": True}),
        **kind,
        **sections,
    }


PAGES = {
    "experiment-config.md": experiment_config,
    "master-settings.md": master_settings,
    "command-line.md": command_line,
    "parallel-axes.md": parallel_axes,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
