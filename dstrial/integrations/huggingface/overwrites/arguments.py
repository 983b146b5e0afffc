"""``get_hf_args_with_overwrites``: Trainer arguments that fit a DeepSpeed config.

Reads files, writes one, logs decisions; ``reconcile`` decides.
"""

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
from dstrial.errors import CheckpointError, ConfigError, ConfigProblem
from dstrial.integrations.huggingface.overwrites.reconcile import CONFIG_FLAG, ReconciledArguments, reconcile
from dstrial.local.experiment_file import EXPERIMENT_VARIABLE
from dstrial.local.measuring_variables import SETTINGS_KEY, is_measuring
from dstrial.local.run_directory import LOCAL_ID, RUN_DIR_VARIABLE
from dstrial.ranks.identity import identify
from dstrial.resume.locate import saved_run_to_resume
from dstrial.resume.manifest import read_saved_run
from dstrial.resume.metadata import SavedRun

logger = logging.getLogger("dstrial.dsat")

_NUM_NAME_CHARS = 16
_LENGTH_FLAG = "max_steps"


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """Return a script's arguments with the DeepSpeed config of its trial worked in.

    Batch sizes, accumulation, clipping, precision, learning rate, the optimizer's parameters, warm-up and ``--deepspeed`` are
    brought to what ``hyperparameters.deepspeed_config`` and ``overwrite_deepspeed_args`` say; what the config gives as
    ``"auto"``, or not at all, the arguments say. Missing batch sizes are solved for the ranks there are, and for the batch of
    the checkpoint where a run goes on with another number of ranks. The DeepSpeed JSON stays as it is: ``--deepspeed`` names
    an effective copy in a directory of the run. Contradictions are logged by rank 0, all at once, each with what wins. In a
    measuring trial ``--max_steps`` is the trial's, which ends once enough steps are timed.

    Args:
        args: words behind the script's name, ``sys.argv[1:]``; not changed.
        hparams: the trial's hyperparameters, ``dstrial.integrations.huggingface.hyperparameters(core_context)`` or
            ``info.trial.hparams``; not changed. A path in them is relative to the current directory.

    Returns:
        New words, for ``HfArgumentParser.parse_args_into_dataclasses``; those of ``args`` where the hyperparameters name no
        DeepSpeed config and overwrite none. Without any DeepSpeed config, overwrites of the batch alone set the two flags of
        the batch: a Trainer without DeepSpeed keeps it in this way.

    Raises:
        ConfigError: with everything that cannot be settled: an unreadable DeepSpeed config, batch sizes without a solution,
            values that are no numbers, abbreviated flags.

    Ranks: all, alike; no communication.
    Source: determined.pytorch.dsat.get_hf_args_with_overwrites (0.38.1).
    """
    if _is_plain_batch(args, hparams):
        return _with_batch(args, hparams[OVERWRITE_KEY])
    source = _source(args, hparams)
    if source is None:
        return list(args)
    identity = identify(os.environ)
    info = _cluster_info()
    world_size = identity.world_size
    if identity.launcher == "none" and info is not None:
        world_size = max(sum(info.container_slot_counts), 1)
    found = reconcile(_lengthened(args, hparams), source, world_size, resumed=_resumed(info))
    path = write_effective_config(found.config, effective_directory(os.environ))
    if identity.is_chief:
        _log(found, path)
    return found.pointing_to(str(path))


def effective_directory(environ: Mapping[str, str]) -> Path:
    """Return where effective configs go: run directory, launcher's files or cache."""
    if environ.get(RUN_DIR_VARIABLE):
        directory = Path(environ[RUN_DIR_VARIABLE]) / "deepspeed_config"
    elif environ.get(EXPERIMENT_VARIABLE):
        directory = Path(environ[EXPERIMENT_VARIABLE]).parent
    else:
        directory = _cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        raise ConfigError(
            [
                ConfigProblem(
                    str(directory),
                    "a directory of another user",
                    "one of this user, for the effective DeepSpeed config",
                    "Set XDG_CACHE_HOME to a directory of yours.",
                )
            ]
        )
    return directory


def _cache_directory() -> Path:
    """Return the place for ranks of other launchers: nobody knows when the last ends."""
    import platformdirs

    directory = Path(platformdirs.user_cache_dir("dstrial")) / "deepspeed_config"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # an account without a home directory
        return Path(tempfile.gettempdir()) / f"dstrial-{os.getuid()}"
    return directory


def write_effective_config(config: Mapping[str, Any], directory: Path) -> Path:
    """Write a config under a name made from its content; no reader sees half of it.

    Ranks that write the same config at the same time write the same file, one after the other.
    """
    text = json.dumps(config, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_NAME_CHARS]
    path = directory / f"deepspeed_{digest}.json"
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _lengthened(args: Sequence[str], hparams: Mapping[str, Any]) -> Sequence[str]:
    """Return the arguments; in a measuring trial with the length that it times."""
    num_batches = (hparams.get(SETTINGS_KEY) or {}).get("num_batches") if is_measuring(hparams) else None
    return (
        args if num_batches is None else CommandLine.of(args).with_value(_LENGTH_FLAG, str(num_batches)).words
    )


def _is_plain_batch(args: Sequence[str], hparams: Mapping[str, Any]) -> bool:
    """Whether only micro batch and accumulation are overwritten, and no config named."""
    overwrite = hparams.get(OVERWRITE_KEY)
    if hparams.get(MAIN_KEY) is not None or CommandLine.of(args).find(CONFIG_FLAG) is not None:
        return False
    if not isinstance(overwrite, Mapping) or not set(overwrite) <= set(BATCH_KEYS):
        return False
    return all(type(overwrite.get(key)) is int and overwrite[key] > 0 for key in SIZE_FLAGS)


def _with_batch(args: Sequence[str], overwrite: Mapping[str, Any]) -> list[str]:
    words = CommandLine.of(args)
    for key, flag in SIZE_FLAGS.items():
        words = words.with_value(flag, str(overwrite[key]))
    return list(words.words)


def _source(args: Sequence[str], hparams: Mapping[str, Any]) -> DeepSpeedSource | None:
    """Return the trial's config, or ``--deepspeed``'s where the trial only overwrites."""
    overwrite = hparams.get(OVERWRITE_KEY)
    named = hparams.get(MAIN_KEY)
    if named is None and not overwrite:
        return None
    if named is None:
        named = CommandLine.of(args).value(CONFIG_FLAG)
        if isinstance(named, str) and named.lstrip().startswith("{"):
            named = read_json_text(named, CONFIG_FLAG).value
    findings = Diagnostics({}, "experiment config")
    source = read_deepspeed(
        MAIN_KEY, {MAIN_KEY: named, OVERWRITE_KEY: overwrite}, Path(), {}, "experiment config", findings
    )
    findings.raise_if_any()
    return source


def _cluster_info() -> Any:
    info = det.get_cluster_info()
    return info if info is not None and info.task_type == "TRIAL" else None


def _resumed(info: Any) -> SavedRun | None:
    """Return this run's checkpoint to resume from, if it is on this machine."""
    if info is None or (info.latest_checkpoint is None and os.environ.get(RUN_DIR_VARIABLE)):
        saved = saved_run_to_resume()
        return saved if saved is not None and saved.keeps_batch else None
    storage = info.trial._config.get("checkpoint_storage") or {}
    root = storage.get("container_path") if storage.get("type") == "directory" else None
    if info.latest_checkpoint is None or not root:
        return None
    own_id = LOCAL_ID if os.environ.get(RUN_DIR_VARIABLE) else int(info.trial.trial_id)
    try:
        saved = read_saved_run(Path(root) / info.latest_checkpoint).of_trial(own_id)
    except CheckpointError:
        # Said with all details when the checkpoint is loaded.
        return None
    return saved if saved.keeps_batch else None


def _log(found: ReconciledArguments, path: Path) -> None:
    contradictions = found.contradictions
    if contradictions:
        noun = "contradiction" if len(contradictions) == 1 else "contradictions"
        lines = "\n".join(f"  - {decision.text}" for decision in contradictions)
        logger.warning("%d %s between arguments and DeepSpeed config:\n%s", len(contradictions), noun, lines)
    for decision in found.decisions:
        if not decision.outcome.is_contradiction:
            logger.info("%s", decision.text)
    logger.info("the effective DeepSpeed config is %s", path)
