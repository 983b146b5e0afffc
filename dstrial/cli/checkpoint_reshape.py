"""``dstrial checkpoint reshape``: convert a checkpoint to another layout offline."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file, layouts_of, read_manifest, read_saved_run
from dstrial.checkpoint.summary import configuration_of
from dstrial.cli.checkpoint import (
    CheckpointSource,
    OpenCheckpoint,
    add_action,
    add_shared_options,
    has_trusted_code,
    open_checkpoint,
)
from dstrial.cli.checkpoint_export import require_new
from dstrial.cli.experiment_arguments import parse_entrypoint
from dstrial.config.documents import yaml_text
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.merge import merge_deepspeed
from dstrial.errors import (
    CheckpointError,
    CheckpointLayoutError,
    LaunchError,
    UntrustedCheckpointError,
)
from dstrial.launch.slots import slots_argument
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import REWRITE_VARIABLE, RunDirectory
from dstrial.local.script_variables import AROUND_FIT_KEY
from dstrial.visible_text import plural

if TYPE_CHECKING:
    from argparse import _SubParsersAction


_RESUME_INSTEAD = "Resume the run on the new number of slots: it is reshaped then."
_RESERVED_PREFIXES = ("DSTRIAL_", "DET_")  # of variables that the experiment config cannot set

_EPILOG = """\
The command starts ranks on the CPUs of this machine with the trial's own model definition. The ranks load the checkpoint
in the new layout, compare every value bit by bit, save the result as OUTPUT and exit before the first batch.
The model definition comes from --context, else from the run or the checkpoint. The trial must be a trial class.
OUTPUT is an ordinary checkpoint: `dstrial run EXP.yaml --resume OUTPUT --slots N` resumes from it in the same layout.

examples:
  dstrial checkpoint reshape CHECKPOINT for-6-slots --slots 6
  dstrial checkpoint reshape 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 zero3 --slots 4 --zero-stage 3 --context model_defs/gpt2
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "reshape",
        help="write a copy of a checkpoint for another number of slots or another ZeRO stage",
        description="Write a copy of a checkpoint in the layout of another number of slots or another ZeRO stage. A run that "
        "resumes does this automatically; use this command to do it in advance. OUTPUT must not exist.",
        epilog=_EPILOG,
    )
    parser.add_argument("output", metavar="OUTPUT", help="new directory for the copy")
    parser.add_argument("--slots", type=slots_argument, metavar="N", required=True, help="number of ranks")
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        metavar="S",
        help="ZeRO stage, 0 to 3 (default: the checkpoint's ZeRO stage)",
    )
    parser.add_argument("--context", metavar="DIR", help="directory of the model definition")
    add_shared_options(parser)


def main(args: argparse.Namespace) -> int:
    output = Path(args.output).absolute()
    opened = open_checkpoint(args.checkpoint, args)
    require_new(output)
    for engine_idx, layout in enumerate(opened.layouts):
        if layout.precision == "fp16":
            raise CheckpointLayoutError(
                f"engine {engine_idx} of checkpoint {opened.path} computes in fp16; expected fp32 or bf16, for DeepSpeed has no "
                f"fp16 on CPUs. {_RESUME_INSTEAD}"
            )
    is_trusted = args.trust_code or has_trusted_code(opened.source)
    context_dir = _context_dir(args.context, opened.source, is_trusted=is_trusted)
    with _workspace(output) as workspace:
        experiment = _experiment(args, opened, context_dir, workspace, is_trusted=is_trusted)
        written = _rewrite(opened, experiment, workspace, args.slots)
        stage = _require_layout(written, opened.layouts, args.slots, args.zero_stage)
        require_new(output)
        written.rename(output)
    sys.stdout.write(f"{output}: {opened.path.name} for {plural(args.slots, 'slot')}, ZeRO stage {stage}\n")
    return 0


@contextlib.contextmanager
def _workspace(output: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``output``, deleted after the ``with`` block.

    It is on the same file system as ``output``, so that results can be renamed to ``output``.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".reshaping", dir=output.parent)
    except OSError as error:
        raise CheckpointError(
            f"OUTPUT is {str(output)!r}, where nothing can be written ({error.strerror}); expected a directory of your own. "
            "Name another one."
        ) from error
    with made as name:
        yield Path(name)


def _context_dir(asked: str | None, source: CheckpointSource, *, is_trusted: bool) -> Path:
    """Return the directory of the model definition.

    The first of these is used: ``asked`` (``--context``); the run's context directory; the checkpoint's copy. The last two
    require a trusted checkpoint, because reshaping runs their code.
    """
    if asked is not None:
        if not Path(asked).is_dir():
            raise CheckpointError(
                f"--context is {asked!r}; expected the directory of the model definition. Correct the path."
            )
        return Path(asked).resolve()
    if not is_trusted:
        raise UntrustedCheckpointError(
            f"checkpoint {source.path} is not known to be written by this account; expected a model definition that does not "
            "come with it, for reshaping runs it. Name its directory with --context, or add --trust-code if you trust who wrote "
            "it."
        )
    found = [source.path / "code"]
    if source.run_directory is not None:
        found.insert(0, Path(source.run_directory.read_record().context_dir))
    for path in found:
        if path.is_dir():
            return path
    raise CheckpointError(
        f"checkpoint {source.path} has no model definition beside it; expected the trial's own, which makes the engines. Name "
        "its directory with --context."
    )


def _experiment(
    args: argparse.Namespace,
    opened: OpenCheckpoint,
    context_dir: Path,
    workspace: Path,
    *,
    is_trusted: bool,
) -> ExperimentConfig:
    """Write the experiment config for the new layout into ``workspace``; return it.

    If the checkpoint is not trusted, settings that can run code are removed.
    """
    saved = configuration_of(opened.path)
    config, hparams = saved.get("experiment_config"), saved.get("hparams")
    if not isinstance(config, Mapping) or not isinstance(hparams, Mapping):
        raise CheckpointError(
            f"{opened.path / 'load_data.json'} has no experiment_config and hparams; expected the trial's configuration, as "
            f"`dstrial run` keeps it. {_RESUME_INSTEAD}"
        )
    path = workspace / "experiment.yaml"
    values = _config_for(config, hparams, args.slots, args.zero_stage, opened.manifest.steps_completed)
    if not is_trusted:
        # Both can run code: variables such as LD_PRELOAD, and the name of a function that the ranks call.
        values.pop("environment", None)
        values["hyperparameters"].pop(AROUND_FIT_KEY, None)
    section = values["data"]["dstrial"]
    section.pop("trust_checkpoint_code", None)
    if args.trust_code:
        section["trust_checkpoint_code"] = hash_file(opened.path / MANIFEST_NAME).sha256
    path.write_text(yaml_text(values), encoding="utf-8")
    return load_experiment(
        path, context_dir, require_entrypoint=True, slots=args.slots, resumed=read_saved_run(opened.path)
    )


def _config_for(
    config: Mapping[str, Any],
    hparams: Mapping[str, Any],
    num_slots: int,
    zero_stage: int | None,
    steps_completed: int,
) -> dict[str, Any]:
    """Return an experiment config with which ranks restore and save the checkpoint.

    ``config`` and ``hparams`` are the original ones. ``zero_stage`` None means the stage in ``hparams``. A search becomes a
    single trial.
    """
    hyperparameters = copy.deepcopy(dict(hparams))
    if zero_stage is not None:
        asked = {"zero_optimization": {"stage": zero_stage}}
        overwrite = hyperparameters.get("overwrite_deepspeed_args") or {}
        hyperparameters["overwrite_deepspeed_args"] = merge_deepspeed(overwrite, asked)
        for key, value in hyperparameters.items():
            is_config = key == "deepspeed_config" or key.endswith("_deepspeed_config")
            if is_config and isinstance(value, Mapping):
                hyperparameters[key] = merge_deepspeed(value, asked)
    searcher = config.get("searcher") or {}
    if searcher.get("name") != "single" or searcher.get("max_length") is None:
        kept = {
            key: searcher[key] for key in ("metric", "smaller_is_better") if searcher.get(key) is not None
        }
        searcher = {"name": "single", **kept, "max_length": {"batches": steps_completed + 1}}
    values = {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if value is not None and key not in ("checkpoint_storage", "bind_mounts", "profiling")
    }
    given = values.get("data")
    data = given if isinstance(given, Mapping) else {}
    return {
        **values,
        "data": {**data, "dstrial": dict(dstrial_section(config))},
        "hyperparameters": hyperparameters,
        "resources": {"slots_per_trial": num_slots},
        "searcher": copy.deepcopy(dict(searcher)),
    }


def _rewrite(opened: OpenCheckpoint, experiment: ExperimentConfig, workspace: Path, num_slots: int) -> Path:
    """Load the checkpoint on CPU ranks and save it in ``workspace``; return its path.

    Raises:
        CheckpointError: the trial is a script, which cannot be told to stop before its first batch.
        LaunchError: the ranks failed or were stopped.
    """
    from dstrial.launch.local_ranks import run_ranks
    from dstrial.launch.rank_main import trial_command

    entrypoint = parse_entrypoint(experiment.entrypoint, str(opened.path / "load_data.json"))
    if entrypoint.trial is None:
        raise CheckpointError(
            f"the trial's entrypoint is the command {' '.join(entrypoint.words)!r}; expected a trial class (module:Class). "
            f"{_RESUME_INSTEAD}"
        )
    run_directory = RunDirectory.create(
        workspace / "runs",
        name=experiment.name,
        context_dir=experiment.context_dir,
        command=sys.argv,
        config=experiment.raw,
    )
    outcome = run_ranks(
        trial_command(
            entrypoint.trial,
            context_dir=experiment.context_dir,
            config=experiment.path,
            run_dir=run_directory.path,
            resume=str(opened.path),
        ),
        num_ranks=num_slots,
        env=_variables(opened.path, experiment),
        log_dir=run_directory.attempt_logs_path(1),
        serves_store=False,
    )
    newest = newest_checkpoint(run_directory.checkpoints_path)
    if outcome.exit_code != 0 or newest is None:
        stopped = f"stopped by {outcome.stopped_by}" if outcome.stopped_by else "failed"
        raise LaunchError(
            f"the ranks that reshape {opened.path} {stopped}; nothing was written.\n{outcome.describe().strip()}"
        )
    return newest.path


def _variables(checkpoint: Path, experiment: ExperimentConfig) -> dict[str, str]:
    trial_id = read_saved_run(checkpoint).trial_id
    if trial_id is None:
        from dstrial.engine.checkpoint_reader.open import read_rank_state

        trial_id = int(read_rank_state(checkpoint, 0)["trial_id"])
    variables = {
        name: value
        for name, value in experiment.environment_variables.items()
        if not name.startswith(_RESERVED_PREFIXES)
    }
    return {
        **variables,
        REWRITE_VARIABLE: str(trial_id),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _require_layout(written: Path, before: tuple[Layout, ...], num_slots: int, zero_stage: int | None) -> int:
    """Check the layout of the written checkpoint, and return its ZeRO stage.

    ``before`` has the original checkpoint's layout of each engine. ``zero_stage`` is the stage that was requested; None means
    the original stage. Raises CheckpointLayoutError if the model definition ignored ``num_slots`` or the stage.
    """
    layouts = layouts_of(read_manifest(written), written)
    for engine_idx, (was, is_) in enumerate(zip(before, layouts, strict=True)):
        wanted = was.zero_stage if zero_stage is None else zero_stage
        if (is_.world_size, is_.zero_stage) != (num_slots, wanted):
            raise CheckpointLayoutError(
                f"engine {engine_idx} was written with {is_.world_size} ranks and ZeRO stage {is_.zero_stage}; expected "
                f"{num_slots} and {wanted}. Let the trial read its DeepSpeed config with context.get_deepspeed_config(), or "
                "merge hyperparameters.overwrite_deepspeed_args into it."
            )
    return layouts[0].zero_stage
