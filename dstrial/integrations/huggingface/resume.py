"""Open and verify a Trainer's checkpoint; load it on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.checkpoint.integrity import read_verified
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import MANIFEST_NAME, Manifest, layouts_of
from dstrial.engine.checkpoint_reader.open import open_saved_engine, read_for_rank
from dstrial.engine.checkpoint_reader.safe_load import bind_checkpoint_engine, vouched_for
from dstrial.engine.deepspeed_internals import engines
from dstrial.engine.frozen_parameters import without_frozen
from dstrial.engine.parameter_names import named_buffers
from dstrial.engine.parameter_table import collect_layout
from dstrial.engine.reshape import load_reshaped
from dstrial.engine.state import describe_rank, latest_tag
from dstrial.errors import CheckpointError, CheckpointNotFoundError
from dstrial.local.json_files import read_json
from dstrial.loop.checkpoint_loader import trusts_code
from dstrial.resume.plan import plan_load
from dstrial.scratch import scratch_directory

logger = logging.getLogger("dstrial.integrations.huggingface")

STATE_NAME = "trainer_state.json"

_TRAINER_DIRECTORY = re.compile(r"checkpoint-(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A Trainer's checkpoint on this machine, verified against its manifest."""

    uuid: str
    root: pathlib.Path
    trainer_directory: pathlib.Path  # `checkpoint-<step>` in `root`, or `root` itself
    step: int  # number of optimizer steps before the checkpoint
    layouts: tuple[
        Layout, ...
    ]  # how the engine's state is split over ranks; empty without DeepSpeed or a manifest
    continues: (
        bool  # whether the same trial wrote the checkpoint; from another trial only the weights are loaded
    )
    trusts_code: bool = False  # whether pickles may load any class (`checkpoint_loader.trusts_code`)


@contextlib.contextmanager
def opened(
    context: core.Context, uuid: str, trial_id: int, exp_conf: Mapping[str, Any]
) -> Iterator[OpenedCheckpoint]:
    """Open a Trainer's checkpoint and verify its files against its manifest.

    ``uuid`` is a uuid or an absolute path. ``trial_id`` and ``exp_conf`` are those of the trial that loads the checkpoint.

    Raises:
        CheckpointNotFoundError: the checkpoint does not exist, or no Trainer wrote it.
        CheckpointDamagedError: a file differs from the manifest.
        UntrustedCheckpointError: loading a file could run code, and neither this account's signature, the master nor the
            config vouches for the checkpoint.

    Ranks: all, collectively.
    """
    with contextlib.ExitStack() as stack:
        if pathlib.Path(uuid).is_absolute():
            root = pathlib.Path(uuid)
            metadata = dict(read_json(root / "metadata.json") or {})
        else:
            root = pathlib.Path(stack.enter_context(context.checkpoint.restore_path(uuid)))
            found = context.checkpoint.get_metadata(uuid) if context.distributed.rank == 0 else None
            metadata = context.distributed.broadcast(found) or {}
        manifest: Manifest | None = None
        if (root / MANIFEST_NAME).is_file():
            manifest = read_verified(root, context.distributed)
        directory = _trainer_directory(root)
        names = [path.relative_to(root).as_posix() for path in directory.rglob("*") if path.is_file()]
        names = sorted(names) if manifest is None else list(manifest.files)
        written_by = metadata.get("trial_id")
        yield OpenedCheckpoint(
            uuid=uuid,
            root=root,
            trainer_directory=directory,
            step=int((read_json(directory / STATE_NAME) or {}).get("global_step", 0)),
            layouts=() if manifest is None else layouts_of(manifest, root),
            continues=written_by is None or int(written_by) == trial_id,
            trusts_code=trusts_code(context, uuid, root, names, exp_conf),
        )


def _trainer_directory(root: pathlib.Path) -> pathlib.Path:
    if (root / STATE_NAME).is_file():
        return root
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := _TRAINER_DIRECTORY.fullmatch(path.name)) and (path / STATE_NAME).is_file()
    ]
    if not found:
        raise CheckpointNotFoundError(
            f"checkpoint {root} has no checkpoint-<step>/{STATE_NAME}; expected what a Trainer with DetCallback wrote. Resume "
            "with the program that wrote it, or start a new trial."
        )
    return max(found)[1]


@contextlib.contextmanager
def directory_for(found: OpenedCheckpoint, train_batch_size: int) -> Iterator[pathlib.Path]:
    """Yield a directory from which the Trainer resumes with a given micro batch size.

    ``train_batch_size`` is the micro batch size of the Trainer's arguments. The Trainer would use the size in
    ``trainer_state.json`` instead. If both sizes are equal, the checkpoint's directory is yielded. Otherwise a temporary
    directory is yielded, with a changed copy of ``trainer_state.json`` and links to all other files.

    Source: transformers 4.56 ``Trainer.train`` reads the size; 5.23 only with ``auto_find_batch_size``.
    """
    state = read_json(found.trainer_directory / STATE_NAME) or {}
    if state.get("train_batch_size") in (None, train_batch_size):
        yield found.trainer_directory
        return
    with scratch_directory("dstrial-resume-") as made:
        directory = made / found.trainer_directory.name
        directory.mkdir()
        for path in found.trainer_directory.iterdir():
            if path.name != STATE_NAME:
                (directory / path.name).symlink_to(path.resolve())
        values = {**state, "train_batch_size": train_batch_size}
        (directory / STATE_NAME).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")
        yield directory


def load_engine(engine: DeepSpeedEngine, opened_checkpoint: OpenedCheckpoint, distributed: Any) -> None:
    """Load weights, optimizer and scheduler into an engine, resharded if needed.

    Ranks: all, collectively.
    """
    bind_checkpoint_engine(engine)
    trusts = opened_checkpoint.trusts_code
    with vouched_for([engine], trusts_code=trusts), contextlib.ExitStack() as stack:
        if not opened_checkpoint.layouts:
            _load_as_it_is(engine, opened_checkpoint)
            return
        saved = opened_checkpoint.layouts[0]
        now = collect_layout(engine, distributed.allgather)
        is_recut = saved.model_parallel_size != now.model_parallel_size
        problems = ["the Trainer counts its batch by AutoTP's size: set it back"] if is_recut else []
        differences = plan_load(opened_checkpoint.root, [saved], [now], problems)
        stack.enter_context(without_frozen(engine, saved, now, distributed.allgather))
        if not differences:
            stack.enter_context(engines.ignoring_load_universal([engine]))
            _load_as_it_is(engine, opened_checkpoint)
            return
        if distributed.rank == 0:
            logger.info(
                "checkpoint %s is brought into another layout: %s",
                opened_checkpoint.uuid,
                "; ".join(differences),
            )
        read = functools.partial(open_saved_engine, opened_checkpoint.root, 0, trusts_code=trusts)
        saved_engine = read_for_rank(read, saved, now, engines.checkpoint_part(engine))
        load_reshaped(engine, saved_engine, now)
        # The checkpoint has the persistent buffers (of replica 0); all other buffers keep the model's initial values.
        buffers = saved_engine.buffers()
        with torch.no_grad():
            for name, buffer in named_buffers(engine.module).items():
                if name in buffers:
                    buffer.copy_(buffers[name])


def _load_as_it_is(engine: DeepSpeedEngine, opened_checkpoint: OpenedCheckpoint) -> None:
    path = str(opened_checkpoint.trainer_directory)
    loaded, _ = engine.load_checkpoint(
        path, tag=latest_tag(path), load_optimizer_states=True, load_lr_scheduler_states=True
    )
    if loaded is None:
        raise CheckpointError(
            f"checkpoint {path} holds nothing that DeepSpeed can load on {describe_rank(engine)}; expected the engine's files. "
            "Resume from another checkpoint."
        )
