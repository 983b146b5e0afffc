"""Make a Trainer script's arguments agree with the trial's DeepSpeed config."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import determined as det

from dstrial.config.auto_values import SIZE_FLAGS
from dstrial.config.batch import BATCH_KEYS
from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_source import MAIN_KEY, OVERWRITE_KEY, DeepSpeedSource, read_deepspeed
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.documents import read_json_text
from dstrial.errors import ConfigError
from dstrial.integrations.huggingface.argument_table import (
    CONFIG_FLAG,
    ArgumentDraft,
    reconcile,
    solve_sizes,
)
from dstrial.local.run_directory import RUN_DIR_VARIABLE
from dstrial.local.script_variables import EXPERIMENT_VARIABLE, SETTINGS_KEY, is_measuring
from dstrial.ranks.identity import identify
from dstrial.resume.locate import saved_run_of_trial, saved_run_to_resume
from dstrial.resume.metadata import SavedRun

logger = logging.getLogger("dstrial.dsat")

_NUM_NAME_CHARS = 16  # of a content hash, in file names
_LENGTH_FLAG = "max_steps"


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """Return a script's arguments, changed to agree with the trial's DeepSpeed config.

    ``hyperparameters.deepspeed_config`` and ``overwrite_deepspeed_args`` determine batch sizes, accumulation, clipping,
    precision, learning rate, the optimizer's parameters, warm-up and ``--deepspeed``. The arguments determine values that the
    config leaves out or sets to ``"auto"``. Missing batch sizes are computed for the current number of ranks. A resumed run
    keeps the checkpoint's total batch size. ``--deepspeed`` names a changed copy of the DeepSpeed JSON. Rank 0 logs all
    contradictions between arguments and config, each with the value that wins. In trials that only time steps for the
    autotuner (``dstrial.dsat``), ``--max_steps`` is the number of steps to time.

    Args:
        args: the script's arguments, ``sys.argv[1:]``; not changed.
        hparams: the trial's hyperparameters, from ``dstrial.integrations.huggingface.hyperparameters(core_context)`` or
            ``info.trial.hparams``; not changed. Paths in them are relative to the current directory.

    Returns:
        New arguments, for ``HfArgumentParser.parse_args_into_dataclasses``; a copy of ``args`` if the hyperparameters have no
        DeepSpeed config and no overwrites. If there is no DeepSpeed config and only batch sizes are overwritten, only the two
        batch-size flags are set.

    Raises:
        ConfigError: the DeepSpeed config is unreadable, or the batch sizes contradict each other or
            the number of ranks.

    Ranks: all, with equal results; no communication.
    Source: determined.pytorch.dsat.get_hf_args_with_overwrites (0.38.1).
    """
    words = CommandLine.of(args)
    overwrite = hparams.get(OVERWRITE_KEY)
    if _is_plain_batch(words, hparams, overwrite):
        for key, flag in SIZE_FLAGS.items():
            words = words.with_value(flag, str(hparams[OVERWRITE_KEY][key]))
        return list(words.words)
    source = _source(words, hparams)
    if source is None:
        return list(args)
    identity = identify(os.environ)
    info = det.get_cluster_info()
    info = info if info is not None and info.task_type == "TRIAL" else None
    world_size = identity.world_size
    if identity.launcher == "none" and info is not None:
        world_size = max(sum(info.container_slot_counts), 1)
    num_batches = (hparams.get(SETTINGS_KEY) or {}).get("num_batches") if is_measuring(hparams) else None
    if num_batches is not None:
        words = words.with_value(_LENGTH_FLAG, str(num_batches))
    found = reconcile(words.words, source, world_size, resumed=_resumed(info))
    path = write_effective_config(found.config, effective_directory(os.environ))
    if identity.is_chief:
        _log(found, path)
    return list(found.arguments.with_value(CONFIG_FLAG, str(path)).words)


def keep_batch_sizes(
    args: Sequence[str], hparams: dict[str, Any], world_size: int, resumed: SavedRun
) -> None:
    """Overwrite batch sizes in ``hparams`` if a resumed run would change the total.

    Changes ``overwrite_deepspeed_args`` of ``hparams`` in place: adds batch sizes that keep the total. ``args`` are the
    script's arguments, ``resumed`` is the run to resume.

    Raises:
        ConfigError: the batch cannot be divided evenly among the ranks.
    """
    words = CommandLine.of(args)
    overwrite = hparams.get(OVERWRITE_KEY) or {}
    try:
        source = _source(words, hparams)
        config = overwrite if source is None else source.merged
    except ConfigError:
        config = overwrite  # `get_hf_args_with_overwrites` will raise the error again
    solution, is_kept = solve_sizes(words, config, world_size, resumed)
    if is_kept:
        hparams[OVERWRITE_KEY] = {**overwrite, **{key: getattr(solution, key) for key in BATCH_KEYS}}


def effective_directory(environ: Mapping[str, str]) -> Path:
    """Create and return the directory for effective DeepSpeed configs.

    If there is a run directory, the result is inside it. Else, if the launcher wrote an experiment file, the result is the
    directory of this file. Else the result is in the user's cache.
    """
    if environ.get(RUN_DIR_VARIABLE):
        directory = Path(environ[RUN_DIR_VARIABLE]) / "deepspeed_config"
    elif environ.get(EXPERIMENT_VARIABLE):
        directory = Path(environ[EXPERIMENT_VARIABLE]).parent
    else:  # other launchers: the end of the job is unknown, so the file is never deleted
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("dstrial")) / "deepspeed_config"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def write_effective_config(config: Mapping[str, Any], directory: Path) -> Path:
    """Write a config as ``deepspeed_<hash of the content>.json``; return the path.

    The file is written atomically.
    """
    text = json.dumps(config, indent=2) + "\n"
    path = directory / f"deepspeed_{hashlib.sha256(text.encode()).hexdigest()[:_NUM_NAME_CHARS]}.json"
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", encoding="utf-8", delete=False) as file:
        file.write(text)
    return Path(file.name).replace(path)


def _is_plain_batch(words: CommandLine, hparams: Mapping[str, Any], overwrite: Any) -> bool:
    if hparams.get(MAIN_KEY) is not None or words.find(CONFIG_FLAG) is not None:
        return False
    if not isinstance(overwrite, Mapping) or not set(overwrite) <= set(BATCH_KEYS):
        return False
    return all(type(overwrite.get(key)) is int and overwrite[key] > 0 for key in SIZE_FLAGS)


def _source(words: CommandLine, hparams: Mapping[str, Any]) -> DeepSpeedSource | None:
    """Return the DeepSpeed config with overwrites; None if ``hparams`` has neither.

    If ``hparams`` has only overwrites, the config is that of the argument ``--deepspeed``.
    """
    overwrite = hparams.get(OVERWRITE_KEY)
    named = hparams.get(MAIN_KEY)
    if named is None and not overwrite:
        return None
    if named is None:
        named = words.value(CONFIG_FLAG)
        if isinstance(named, str) and named.lstrip().startswith("{"):
            named = read_json_text(named, CONFIG_FLAG).value
    findings = Diagnostics({}, "experiment config")
    source = read_deepspeed(
        MAIN_KEY, {MAIN_KEY: named, OVERWRITE_KEY: overwrite}, Path(), {}, "experiment config", findings
    )
    findings.raise_if_any()
    return source


def _resumed(info: Any) -> SavedRun | None:
    """Return the run that this trial resumes; None for a new run.

    None also if only the weights of a checkpoint are loaded. ``info`` is Determined's cluster info; None without a master.
    """
    saved = saved_run_to_resume() if info is None else saved_run_of_trial(info)
    return saved if saved is not None and saved.keeps_batch else None


def _log(found: ArgumentDraft, path: Path) -> None:
    if found.contradictions:
        lines = "\n".join(f"  - {text}" for text in found.contradictions)
        logger.warning("contradictions between arguments and DeepSpeed config:\n%s", lines)
    logger.info("the effective DeepSpeed config is %s", path)
