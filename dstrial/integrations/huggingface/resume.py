"""Open a Trainer's checkpoint, and load its engine in whatever layout runs now."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.checkpoint.file_roles import layouts_of
from dstrial.checkpoint.integrity import read_verified
from dstrial.checkpoint.layout import Layout, compatible, reshape_problems
from dstrial.checkpoint.manifest import MANIFEST_NAME, Manifest
from dstrial.engine.checkpoint_reader.open import open_saved_engine
from dstrial.engine.checkpoint_reader.safe_load import bind_checkpoint_engine, vouched_for
from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
from dstrial.engine.deepspeed_internals import engines
from dstrial.engine.files import describe_rank, latest_tag
from dstrial.engine.parameter_names import named_buffers
from dstrial.engine.parameter_table import collect_layout
from dstrial.engine.reshape import load_reshaped
from dstrial.errors import CheckpointError, CheckpointLayoutError, CheckpointNotFoundError
from dstrial.local.json_files import read_json
from dstrial.loop.checkpoint_loader import trusts_code
from dstrial.scratch import scratch_directory

logger = logging.getLogger("dstrial.integrations.huggingface")

STATE_NAME = "trainer_state.json"

_TRAINER_DIRECTORY = re.compile(r"checkpoint-(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint that can be read."""

    uuid: str
    root: pathlib.Path
    trainer_directory: pathlib.Path  # `checkpoint-<step>` in `root`, or `root` itself
    step: int  # batches trained
    manifest: Manifest | None  # None if another program wrote it
    layouts: tuple[Layout, ...]  # empty without DeepSpeed, and without a manifest
    continues: bool  # of this very trial; another one gives its weights only
    trusts_code: bool = False  # holds unlisted classes, and the user vouches for it


@contextlib.contextmanager
def opened(
    context: core.Context, uuid: str, trial_id: int, exp_conf: Mapping[str, Any]
) -> Iterator[OpenedCheckpoint]:
    """Open a checkpoint, by uuid or directory, and verify it by its manifest.

    Errors: none or no Trainer's, a damaged file, or a file that would run code without anybody vouching for it.
    Ranks: all, collectively.
    """
    with contextlib.ExitStack() as stack:
        if pathlib.Path(uuid).is_absolute():
            root = pathlib.Path(uuid)
            metadata = _metadata_beside(root)
        else:
            root = pathlib.Path(stack.enter_context(context.checkpoint.restore_path(uuid)))
            found = context.checkpoint.get_metadata(uuid) if context.distributed.rank == 0 else None
            metadata = context.distributed.broadcast(found) or {}
        manifest: Manifest | None = None
        if (root / MANIFEST_NAME).is_file():
            distributed = context.distributed
            manifest = read_verified(
                root, distributed.allgather, part=distributed.local_rank, parts=distributed.local_size
            )
        directory = _trainer_directory(root)
        names = _files_of(root, directory) if manifest is None else list(manifest.files)
        written_by = metadata.get("trial_id")
        yield OpenedCheckpoint(
            uuid=uuid,
            root=root,
            trainer_directory=directory,
            step=_step_of(directory),
            manifest=manifest,
            layouts=() if manifest is None else layouts_of(manifest, root),
            continues=written_by is None or int(written_by) == trial_id,
            trusts_code=trusts_code(context, uuid, root, names, exp_conf),
        )


def _files_of(root: pathlib.Path, directory: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in directory.rglob("*") if path.is_file())


def _metadata_beside(root: pathlib.Path) -> Mapping[str, Any]:
    return dict(read_json(root / "metadata.json") or {})


def _trainer_directory(root: pathlib.Path) -> pathlib.Path:
    """Return the newest ``checkpoint-<step>`` in a checkpoint, or itself if it is one."""
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


def _step_of(directory: pathlib.Path) -> int:
    state = read_json(directory / STATE_NAME) or {}
    return int(state.get("global_step", 0))


@contextlib.contextmanager
def directory_for(found: OpenedCheckpoint, train_batch_size: int) -> Iterator[pathlib.Path]:
    """Give the directory that a Trainer of a micro batch resumes from, in the block.

    The Trainer takes the micro batch of the checkpoint in place of that of its arguments, whatever the number of ranks. So one
    with another micro batch gets a directory of links to the checkpoint's files, in which the state says its own.

    Args:
        found: the checkpoint.
        train_batch_size: records of one forward pass of one process, ``args.train_batch_size``.

    Ranks: any; no communication.
    Source: transformers 4.56 ``Trainer.train``; 5.23 does so with ``auto_find_batch_size``.
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
    """Load weights, optimizer and scheduler in any layout. Ranks: all, collectively."""
    bind_checkpoint_engine(engine)
    with vouched_for([engine], trusts_code=opened_checkpoint.trusts_code):
        _load_engine(engine, opened_checkpoint, distributed)


def _load_engine(engine: DeepSpeedEngine, opened_checkpoint: OpenedCheckpoint, distributed: Any) -> None:
    if not opened_checkpoint.layouts:
        _load_as_it_is(engine, opened_checkpoint)
        return
    saved = opened_checkpoint.layouts[0]
    now = collect_layout(engine, distributed.allgather)
    differences = compatible(saved, now)
    if not differences:
        with engines.ignoring_load_universal([engine]):
            _load_as_it_is(engine, opened_checkpoint)
        return
    problems = reshape_problems(saved, now)
    if problems:
        raise CheckpointLayoutError(
            f"checkpoint {opened_checkpoint.root} was written for another layout ({'; '.join(differences)}), and it cannot be "
            f"brought into this one: {'; '.join(problems)}."
        )
    if distributed.rank == 0:
        logger.info(
            "checkpoint %s is brought into another layout: %s",
            opened_checkpoint.uuid,
            "; ".join(differences[:3]),
        )
    trusts = opened_checkpoint.trusts_code
    saved_engine = open_saved_engine(opened_checkpoint.root, 0, saved, trusts_code=trusts)
    load_reshaped(engine, saved_engine, now)
    _load_buffers(engine, saved_engine)


def _load_as_it_is(engine: DeepSpeedEngine, opened_checkpoint: OpenedCheckpoint) -> None:
    path = str(opened_checkpoint.trainer_directory)
    tag = latest_tag(path, is_universal=bool(engine.load_universal_checkpoint()))
    loaded, _ = type(engine).load_checkpoint(
        engine, path, tag=tag, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    if loaded is None:
        raise CheckpointError(
            f"checkpoint {path} holds nothing that DeepSpeed can load on {describe_rank(engine)}; expected the engine's files. "
            "Resume from another checkpoint."
        )


def _load_buffers(engine: DeepSpeedEngine, saved: SavedEngine) -> None:
    """Load persistent buffers as replica 0 had them; the model makes the others."""
    buffers = saved.buffers()
    with torch.no_grad():
        for name, buffer in named_buffers(engine.module).items():
            if name in buffers:
                buffer.copy_(buffers[name])
