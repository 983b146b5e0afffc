"""Store a Trainer's ``checkpoint-<step>`` directories as the trial's checkpoints.

Files are hard-linked into the checkpoint storage, or copied if it is on another file system. The Trainer overwrites files in
place, so linked files are deleted before the Trainer writes the same directory again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import FileEntry, hash_files, share_of
from dstrial.checkpoint.summary import own_places
from dstrial.engine.frozen_parameters import frozen_checksums, leave_out_frozen, leaves_out_frozen
from dstrial.engine.parameter_table import collect_layout
from dstrial.engine.peft_adapter import is_peft_model
from dstrial.errors import RankError
from dstrial.integrations.huggingface import arguments
from dstrial.local.node_checkpoints import run_on_all_ranks
from dstrial.loop.background_save import (
    base_metadata,
    complete_manifest,
    describe_failure,
)
from dstrial.object_storage import without_credentials
from dstrial.resume.metadata import EngineRecord, run_metadata

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

USER_DATA_NAME = "my_data.json"
"""Determined's name for the checkpoint file with ``DetCallback(user_data=...)``."""

_CONFIGURATION_NAME = "load_data.json"  # Determined's name
_LATEST_NAME = "latest"  # DeepSpeed's file with the tag of its newest checkpoint
# Errors of `os.link` after which a file is copied.
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclasses.dataclass(frozen=True, slots=True)
class RunDescription:
    """Data of the run that each checkpoint stores besides the Trainer's files."""

    trial_id: int
    exp_conf: Mapping[str, Any]
    hparams: Mapping[str, Any]
    user_data: Mapping[str, Any] | None  # argument `user_data` of `DetCallback`
    given: Mapping[
        str, Any
    ]  # batch sizes and class names in the config at the run's start, for `EngineRecord.given`
    micro_batch_limit: int  # micro batch size at the start of the run


class TrainerCheckpoints:
    """Stores the directories that a Trainer saves.

    Ranks: all, collectively, except for ``is_stale``.
    """

    def __init__(self, context: core.Context, description: RunDescription) -> None:
        self._checkpoint = context.checkpoint
        self._distributed = context.distributed
        self._description = description
        self._stale_steps: frozenset[int] = frozenset()
        self._model: Any = None
        self._makes_links = True
        self._frozen_checksums: dict[str, str] | None = None  # parameter -> checksum, at the last save
        self.last_step = -1

    def begin(self, trainer: Any, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Set the model to save; mark the directories of later steps as stale.

        An earlier attempt of the run wrote these directories, ``checkpoint-<step>``; the Trainer will write them again
        (``is_stale``). ``trainer`` is None if ``huggingface.train`` is not used.
        """
        self._model = model
        if leaves_out_frozen(self._description.exp_conf) and (engine := self._engine(trainer, args)):
            leave_out_frozen(engine)
        output_dir = pathlib.Path(str(args.output_dir))
        found = {
            int(path.name.removeprefix("checkpoint-"))
            for path in (output_dir.glob("checkpoint-*") if output_dir.is_dir() else ())
            if path.name.removeprefix("checkpoint-").isdecimal()
        }
        gathered = self._distributed.allgather({one for one in found if one > state.global_step})
        self._stale_steps = frozenset().union(*gathered)

    def is_stale(self, step: int) -> bool:
        """Return whether a step's directory may have hard links to a stored checkpoint."""
        return step in self._stale_steps

    def prepare(self, args: TrainingArguments, step: int) -> None:
        """Delete a step's hard-linked files, so that the Trainer writes new ones.

        Ranks: all, collectively.
        """
        self._stale_steps -= {step}
        directory = _directory(args, step)
        if self._distributed.local_rank == 0 and directory.is_dir():
            for path in sorted(directory.rglob("*")):
                # A rank on another machine, or a trial with the same directory, may delete the file at the same time.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and path.stat().st_nlink > 1:
                        path.unlink()
        self._distributed.allgather(None)

    def save_now(
        self,
        trainer: Any,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        """Make the Trainer save the current step now, and store copies of its files.

        Files are not hard-linked, because the Trainer may write this step again without a call of ``prepare``.
        """
        self.prepare(args, state.global_step)
        trainer._save_checkpoint(trainer.model_wrapped, None)
        self._makes_links = False
        try:
            trainer.callback_handler.on_save(args, state, control)
        finally:
            self._makes_links = True
        if not args.load_best_model_at_end:
            control.should_save = False

    def store(
        self, trainer: Any, args: TrainingArguments, state: TrainerState, train_batch_size: int
    ) -> None:
        """Store the Trainer's files of the current step as a checkpoint.

        A no-op if this step is already stored. ``trainer`` is None if ``huggingface.train`` is not used. ``train_batch_size``
        is the total over all ranks.

        Raises:
            CheckpointError: on all ranks, if a rank cannot read or write its files.
        """
        step = state.global_step
        if step == self.last_step:
            return
        directory, engine = _directory(args, step), self._engine(trainer, args)
        self._distributed.allgather(None)  # wait until every rank has written its files
        layout = None if engine is None else self._layout(engine, directory)
        metadata = self._metadata(step, layout, arguments.plain_record(args, train_batch_size))
        listings = self._distributed.allgather(self._listing(directory))
        with self._checkpoint.store_path(metadata, shard=True) as (path, _):
            root = pathlib.Path(path)
            mine = self._files_of_this_rank(listings)

            def put() -> dict[str, FileEntry]:
                for name in mine:
                    target = root / directory.name / name
                    _link(directory / name, target, os.link if self._makes_links else shutil.copy2)
                names = [f"{directory.name}/{name}" for name in mine]
                if self._distributed.rank == 0:
                    names += self._write_run_files(root, directory.name)
                return hash_files(root, names)

            def describe(error: Exception) -> str:
                what = f"{directory} in checkpoint {root}"
                return describe_failure(what, root, self._distributed.rank, error)

            parts = run_on_all_ranks(self._distributed, put, describe)

            def finish() -> None:
                if self._distributed.rank == 0:
                    layouts = [] if layout is None else [layout.to_json()]
                    complete_manifest(root, parts, layouts, metadata)

            run_on_all_ranks(self._distributed, finish, describe)
        if self._makes_links:
            # The Trainer may save the same step again after its evaluation.
            self._stale_steps |= {step}
        self.last_step = step

    def _engine(self, trainer: Any, args: TrainingArguments) -> DeepSpeedEngine | None:
        if not arguments.is_deepspeed(args):
            return None
        wrapped = getattr(trainer, "model_wrapped", None)
        if isinstance(wrapped, DeepSpeedEngine):
            return wrapped
        # Transformers passes only the unwrapped model to callbacks, so search all objects for the engine that wraps the model.
        engines = (one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine))
        engine: DeepSpeedEngine | None = next((one for one in engines if one.module is self._model), None)
        if engine is None:
            raise RankError(
                "the Trainer was given a DeepSpeed config, and no DeepSpeed engine holds its model; expected one before the "
                "first checkpoint. Do not wrap the model yourself, and write "
                "dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train()."
            )
        return engine

    def _layout(self, engine: DeepSpeedEngine, directory: pathlib.Path) -> Layout | None:
        """Return how the engine's state is split over ranks, for the manifest.

        None if ``directory`` has only a model and no engine state. Ranks: all, collectively.
        """
        layout = collect_layout(engine, self._distributed.allgather)
        latest = directory / _LATEST_NAME
        # DeepSpeed writes the file `latest` on rank 0 only, possibly on a local disk.
        has_it = self._distributed.rank == 0 and latest.is_file()
        tag: str | None = latest.read_text(encoding="utf-8").strip() if has_it else None
        tag = self._distributed.broadcast(tag)
        if tag is None:
            return None
        # Also for PEFT models, which the Trainer saves without their frozen parameters.
        if leaves_out_frozen(self._description.exp_conf) or is_peft_model(engine.module):
            frozen = {place.name for place in own_places(layout) if not place.trainable}
            if self._frozen_checksums is None or self._frozen_checksums.keys() != frozen:
                self._frozen_checksums = frozen_checksums(engine, layout, self._distributed.allgather)
            layout = dataclasses.replace(layout, frozen_checksums=self._frozen_checksums)
        return dataclasses.replace(layout, folder=f"{directory.name}/{tag}")

    def _metadata(self, step: int, layout: Layout | None, plain: EngineRecord) -> dict[str, Any]:
        record = plain
        if layout is not None:
            more = {
                "given": dict(self._description.given),
                "micro_batch_limit": self._description.micro_batch_limit,
            }
            record = EngineRecord.from_layout(layout.to_json(), more)
        return {
            **base_metadata(step),
            "transformers_version": transformers.__version__,
            **run_metadata([record], self._description.trial_id),
        }

    def _listing(self, directory: pathlib.Path) -> list[tuple[str, int]]:
        """Return (relative path, size in bytes) of each file; [] except on local rank 0."""
        if self._distributed.local_rank != 0 or not directory.is_dir():
            return []
        return sorted(
            (path.relative_to(directory).as_posix(), path.stat().st_size)
            for path in directory.rglob("*")
            if path.is_file()
        )

    def _files_of_this_rank(self, listings: Sequence[Sequence[tuple[str, int]]]) -> list[str]:
        """Return the paths of the files that this rank stores.

        The first machine that has a file stores the file; the files of a machine are divided among its ranks.
        """
        here = self._distributed.rank - self._distributed.local_rank
        owners: dict[str, int] = {}
        for rank, listing in enumerate(listings):
            for name, _ in listing:
                owners.setdefault(name, rank)
        of_machine = [name for name, _ in listings[here] if owners[name] == here]
        return share_of(of_machine, self._distributed.local_rank, self._distributed.local_size)

    def _write_run_files(self, root: pathlib.Path, directory_name: str) -> list[str]:
        kept = self._description
        configuration = {
            "trial_type": "transformers.Trainer",
            "experiment_config": without_credentials(kept.exp_conf),
            "hparams": dict(kept.hparams),
        }
        (root / _CONFIGURATION_NAME).write_text(json.dumps(configuration, default=str), encoding="utf-8")
        names = [_CONFIGURATION_NAME]
        if kept.user_data is not None:
            name = f"{directory_name}/{USER_DATA_NAME}"
            (root / directory_name).mkdir(exist_ok=True)
            (root / name).write_text(json.dumps(dict(kept.user_data)), encoding="utf-8")
            names.append(name)
        return names


def _directory(args: TrainingArguments, step: int) -> pathlib.Path:
    return pathlib.Path(str(args.output_dir)) / f"checkpoint-{step}"


def _link(source: pathlib.Path, target: pathlib.Path, link: Callable[..., object] = os.link) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
