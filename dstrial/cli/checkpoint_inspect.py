"""``dstrial checkpoint inspect``: show the content of a checkpoint."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dstrial.checkpoint.completion_marker import is_complete
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.summary import (
    configuration_of,
    count_parameters,
    layout_fields,
)
from dstrial.cli.checkpoint import OpenCheckpoint, add_action, add_shared_options, open_checkpoint
from dstrial.cli.streams import field_lines, print_json, text_table
from dstrial.config.documents import yaml_text
from dstrial.errors import CheckpointError
from dstrial.visible_text import size_text, visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG = """\
Files are not verified; `dstrial checkpoint verify` does that.

examples:
  dstrial checkpoint inspect runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint inspect 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 --parameters
  dstrial checkpoint inspect CHECKPOINT --json | jq .engines[0].zero_stage
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "inspect",
        help="show layout, steps, sizes, versions and parameters",
        description="Show time and trial of a checkpoint, its layout over ranks, sizes, versions, parameters, and the "
        "optimizer's settings and step.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--parameters", action="store_true", help="list every parameter with shape, dtype, group and stage"
    )
    add_shared_options(parser, json=True)


def main(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(args.checkpoint, args)
    contents = _contents(checkpoint, with_parameters=args.parameters, trusts_code=args.trust_code)
    if args.as_json:
        print_json(contents)
    else:
        sys.stdout.write(_text(contents))
    return 0


def _contents(opened: OpenCheckpoint, *, with_parameters: bool, trusts_code: bool) -> dict[str, Any]:
    source, manifest, layouts = opened.source, opened.manifest, opened.layouts
    configuration = configuration_of(source.path)
    training: Mapping[str, Any] = (source.record or {}).get("training") or {}
    engines = []
    for engine_idx, layout in enumerate(layouts):
        engine = {
            **layout_fields(layout),
            "parameters": _parameter_counts(layout),
            "optimizer_state": _optimizer(opened, engine_idx, layout, trusts_code=trusts_code),
        }
        if with_parameters:
            engine["parameter_table"] = _parameter_table(layout)
        engines.append(engine)
    return {
        "path": str(source.path),
        "uuid": (source.record or {}).get("uuid") or source.path.name,
        "is_complete": is_complete(source.path) or source.run_directory is None,
        "created": manifest.created,
        "steps_completed": manifest.steps_completed,
        "experiment": (configuration.get("experiment_config") or {}).get("name"),
        "experiment_id": training.get("experimentId"),
        "trial_id": training.get("trialId"),
        "run_directory": None if source.run_directory is None else str(source.run_directory.path),
        "num_files": len(manifest.files),
        "num_bytes": sum(entry.num_bytes for entry in manifest.files.values()),
        "hyperparameters": configuration.get("hparams"),
        "engines": engines,
    }


def _parameter_counts(layout: Layout) -> dict[str, Any]:
    counts = count_parameters(layout)
    return {
        "parameters": counts.num_parameters,
        "elements": counts.num_elements,
        "frozen_parameters": counts.num_frozen,
        "frozen_elements": counts.num_frozen_elements,
        "left_out": len(layout.frozen_checksums),
        "not_optimized": counts.num_not_optimized,
        "tied": dict(counts.tied),
    }


def _optimizer(
    opened: OpenCheckpoint, engine_idx: int, layout: Layout, *, trusts_code: bool
) -> dict[str, Any]:
    from dstrial.engine.checkpoint_reader.open import open_saved_engine, optimizer_summary

    try:
        return optimizer_summary(open_saved_engine(opened.path, engine_idx, layout, trusts_code=trusts_code))
    except CheckpointError as error:
        return {"problem": str(error)}


def _parameter_table(layout: Layout) -> list[dict[str, Any]]:
    return [
        {
            "name": place.name,
            "shape": list(place.shape),
            "dtype": place.dtype,
            "elements": math.prod(place.shape),
            "group": place.group_idx,
            "stage": place.stage,
            "trainable": place.trainable,
            "tied_to": place.tied_to,
        }
        for place in layout.parameters
    ]


def _text(contents: Mapping[str, Any]) -> str:
    experiment = contents["experiment"]
    if contents["experiment_id"] is not None:
        experiment = f"{contents['experiment_id']} ({experiment}), trial {contents['trial_id']}"
    steps = contents["steps_completed"]
    facts = [
        ("checkpoint", contents["uuid"]),
        ("directory", contents["path"]),
        ("run", contents["run_directory"]),
        ("experiment", experiment),
        ("saved", f"{contents['created']} after {steps} {'batch' if steps == 1 else 'batches'}"),
        ("complete", None if contents["is_complete"] else "no: it has no completion mark"),
        ("size", f"{size_text(contents['num_bytes'])} in {contents['num_files']} files"),
    ]
    parts = [field_lines(facts)]
    for engine_idx, settings in enumerate(contents["engines"]):
        shown = {key: value for key, value in settings.items() if key != "parameter_table"}
        parts.append(visible(yaml_text({f"engine {engine_idx}": shown})))
    for engine_idx, engine in enumerate(contents["engines"]):
        if "parameter_table" in engine:
            parts.append(_table_text(engine_idx, engine["parameter_table"]))
    return "\n".join(parts)


def _table_text(engine_idx: int, table: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            "x".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            f"{row['elements']:,}",
            row["group"],
            row["stage"],
            "yes" if row["trainable"] else "frozen",
            row["tied_to"],
        ]
        for row in table
    ]
    header = [
        f"parameter of engine {engine_idx}",
        *("shape", "dtype", "elements", "group", "stage", "trained", "tied to"),
    ]
    return text_table(header, rows, right=(3,))
