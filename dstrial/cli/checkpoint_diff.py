"""``dstrial checkpoint diff``: compare two checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dstrial.checkpoint.summary import (
    Difference,
    compare,
    compare_layouts,
    compare_parameters,
    configuration_of,
    own_places,
)
from dstrial.cli.checkpoint import OpenCheckpoint, add_action, add_shared_options, open_checkpoint
from dstrial.cli.streams import bytes_bar, count_argument, print_json, text_table
from dstrial.errors import CheckpointError, DstrialError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
    from dstrial.engine.weight_differences import WeightDifference

_SECTIONS = ("config", "layout", "progress", "weights")

_EPILOG = """\
config:   hyperparameters, experiment config, DeepSpeed config
layout:   ranks, ZeRO stage, precision, batch sizes, versions
progress: batches, steps, learning rates, scheduler, loss scale
weights:  names of parameters, and distances of their weights (with --optimizer also of the optimizer's moments)

exit status: 0 if the checkpoints are equal, 1 if they differ, 2 after an error

examples:
  dstrial checkpoint diff BEFORE AFTER
  dstrial checkpoint diff 8-slots 6-slots --only weights --optimizer --top 20
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "diff",
        help="compare two checkpoints of any two layouts",
        description="Compare two checkpoints, whatever their layouts: configs, layouts, progress and weights. Distances of "
        "weights are Euclidean norms of differences. Relative distances are divided by the larger norm of the two.",
        epilog=_EPILOG,
        checkpoints=("a", "b"),
    )
    parser.add_argument(
        "--only", choices=_SECTIONS, action="append", help="compare this section only; repeatable"
    )
    parser.add_argument("--optimizer", action="store_true", help="compare the optimizer's moments too")
    parser.add_argument(
        "--top",
        type=count_argument,
        default=10,
        metavar="N",
        help="list the N largest differences (default: %(default)s)",
    )
    add_shared_options(parser, json=True)


def main(args: argparse.Namespace) -> int:
    """Compare two checkpoints; return 0 if equal, 1 if they differ, 2 for an error."""
    try:
        report = _compare(args)
    except DstrialError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.as_json:
        print_json(report)
    else:
        sys.stdout.write(_text(report, args.top))
    return 0 if report["is_same"] else 1


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    sections = args.only or _SECTIONS
    a, b = (open_checkpoint(asked, args) for asked in (args.a, args.b))
    differences: dict[str, list[Difference]] = {}
    if len(a.layouts) != len(b.layouts):
        differences["engines"] = [Difference("number of engines", len(a.layouts), len(b.layouts))]
    if "config" in sections:
        ours, theirs = (configuration_of(side.path) for side in (a, b))
        differences |= {
            "hyperparameters": compare(ours.get("hparams") or {}, theirs.get("hparams") or {}),
            "experiment": compare(_experiment(ours), _experiment(theirs)),
        }
    if "progress" in sections:
        steps = [{"steps_completed": side.manifest.steps_completed} for side in (a, b)]
        differences["progress"] = compare(*steps)
    weights: list[dict[str, Any]] = []
    for engine_idx, (layout_a, layout_b) in enumerate(zip(a.layouts, b.layouts, strict=False)):
        name = f"engine {engine_idx}"
        if "layout" in sections:
            differences[f"layout of {name}"] = compare_layouts(layout_a, layout_b)
        if "weights" in sections:
            differences[f"parameters of {name}"] = compare_parameters(layout_a, layout_b)
        if {"config", "progress", "weights"} & set(sections):
            weights.append(_compare_state(args, sections, engine_idx, a, b, differences))
    differing = {name: found for name, found in differences.items() if found}
    return {
        "a": str(a.path),
        "b": str(b.path),
        "is_same": not differing and not any(part.get("num_differing") for part in weights),
        "differences": {
            name: [dataclasses.asdict(difference) for difference in found]
            for name, found in differing.items()
        },
        "weights": [part for part in weights if part],
    }


def _experiment(configuration: dict[str, Any]) -> dict[str, Any]:
    config = configuration.get("experiment_config") or {}
    return {key: value for key, value in config.items() if key != "hyperparameters"}


def _compare_state(
    args: argparse.Namespace,
    sections: Sequence[str],
    engine_idx: int,
    a: OpenCheckpoint,
    b: OpenCheckpoint,
    differences: dict[str, list[Difference]],
) -> dict[str, Any]:
    """Compare an engine's config, optimizer and weights; return how weights differ.

    Differences of the config and the optimizer are added to ``differences``. The result is empty if weights are not compared.
    """
    from dstrial.engine.checkpoint_reader.open import open_saved_engine, optimizer_summary, plain

    saved_a, saved_b = (
        open_saved_engine(side.path, engine_idx, side.layouts[engine_idx], trusts_code=args.trust_code)
        for side in (a, b)
    )
    name = f"engine {engine_idx}"
    if "config" in sections:
        configs = [plain(saved.deepspeed_config()) for saved in (saved_a, saved_b)]
        differences[f"DeepSpeed config of {name}"] = compare(*configs)
    if "progress" in sections:
        summaries = [optimizer_summary(saved) for saved in (saved_a, saved_b)]
        differences[f"optimizer of {name}"] = compare(*summaries)
    if "weights" not in sections:
        return {}
    return _compare_weights(args, engine_idx, saved_a, saved_b)


def _compare_weights(
    args: argparse.Namespace, engine_idx: int, a: SavedEngine, b: SavedEngine
) -> dict[str, Any]:
    from dstrial.engine.weight_differences import comparable, weight_differences

    if max(a.layout.model_parallel_size, b.layout.model_parallel_size) > 1:
        raise CheckpointError(
            f"engine {engine_idx} is sharded over a model-parallel axis; expected whole layers, as only the model's code can "
            "merge them. Compare the rest with --only config --only layout --only progress."
        )
    numels = {place.name: math.prod(place.shape) for place in own_places(a.layout)}
    names = comparable(a, b)
    # Two float64 values are compared per element of the weights and of each of the optimizer's moments.
    total = sum(
        numels[name] * 16 * (1 + (len(a.state_keys(name)) if args.optimizer else 0)) for name in names
    )
    with bytes_bar("comparing", total, is_plain=args.as_json) as advance:
        found = list(weight_differences(a, b, with_optimizer=args.optimizer, on_bytes=advance))
    differing = sorted((one for one in found if one.num_differing), key=_sort_key)
    norms = {
        field: math.sqrt(sum(getattr(one, field) ** 2 for one in found if one.key == "master"))
        for field in ("norm_a", "norm_b", "norm_difference")
    }
    larger = max(norms["norm_a"], norms["norm_b"])
    norms["relative"] = norms["norm_difference"] / larger if larger else 0.0
    return {
        "engine": engine_idx,
        "num_compared": len(found),
        "num_differing": len(differing),
        "num_elements": sum(one.numel for one in found),
        "num_elements_differing": sum(one.num_differing for one in found),
        **{field: _finite_or_none(value) for field, value in norms.items()},
        "largest": [
            {
                name: _finite_or_none(value) if isinstance(value, float) else value
                for name, value in {**dataclasses.asdict(one), "relative": one.relative}.items()
            }
            for one in differing[: args.top]
        ],
    }


def _sort_key(difference: WeightDifference) -> float:
    """Sort key: non-finite differences first, then by descending relative difference."""
    return -math.inf if math.isnan(difference.relative) else -difference.relative


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(report: dict[str, Any], top: int) -> str:
    parts = [f"A: {report['a']}\nB: {report['b']}\n"]
    for name, found in report["differences"].items():
        lines = "".join(f"  {Difference(**difference)}\n" for difference in found)
        parts.append(f"{name}:\n{lines}")
    for weights in report["weights"]:
        parts.append(_weights_text(weights, top))
    if report["is_same"]:
        parts.append("the two are the same\n")
    return "\n".join(parts)


def _weights_text(weights: dict[str, Any], top: int) -> str:
    name = f"weights of engine {weights['engine']}"
    if not weights["num_differing"]:
        return f"{name}: all {weights['num_compared']} tensors are equal\n"
    head = (
        f"{name}: {weights['num_differing']} of {weights['num_compared']} tensors differ, in "
        f"{weights['num_elements_differing']:,} of {weights['num_elements']:,} elements\n"
        f"norm of A {_number_text(weights['norm_a'])}, of B {_number_text(weights['norm_b'])}, of the difference "
        f"{_number_text(weights['norm_difference'])} (relative {_number_text(weights['relative'])})\n"
    )
    rows = [
        [
            one["name"] if one["key"] == "master" else f"{one['name']} ({one['key']})",
            f"{one['num_differing']:,} of {one['numel']:,}",
            *(_number_text(one[key]) for key in ("norm_a", "norm_difference", "relative", "max_difference")),
        ]
        for one in weights["largest"]
    ]
    if not rows:
        return head
    header = ["parameter", "elements", "norm of A", "difference", "relative", "largest"]
    shown = f"the {len(rows)} largest:\n" if weights["num_differing"] > top else ""
    return head + shown + text_table(header, rows, right=(1, 2, 3, 4, 5))


def _number_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
