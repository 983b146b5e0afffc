"""Write checkpoints in a background thread; training waits only for a host copy.

At most one save is in progress. The background threads of all ranks communicate on a separate control channel. All ranks learn
the save's outcome together: at the next sync point, before the next save, or at the end of training.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import logging
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from determined import constants, core

from dstrial.checkpoint.manifest import FileEntry, hash_files, rank_state_name, share_of
from dstrial.engine.frozen_parameters import leave_out_frozen, leaves_out_frozen
from dstrial.engine.random_state import RngState
from dstrial.engine.snapshot import HostBuffers, StateCopies, copy_engine
from dstrial.engine.state import engine_extra_state
from dstrial.errors import CheckpointError
from dstrial.local.node_checkpoints import run_on_all_ranks
from dstrial.loop.background_save import (
    PendingReports,
    SaveJob,
    SaveStatus,
    base_metadata,
    complete_manifest,
    describe_failure,
)
from dstrial.loop.run_state import RunState, reducer_state
from dstrial.object_storage import without_credentials
from dstrial.ranks.control_channel import ControlChannel
from dstrial.trial.trial import Checkpointable

logger = logging.getLogger("dstrial.loop")


class _ExitRank(BaseException):
    """Raised to leave ``store_path`` without collective calls, which would deadlock.

    Other ranks may wait in DeepSpeed's barriers. This rank exits with ``error`` as cause, and the launcher ends the other ranks.
    The next start removes the checkpoint's directory, which has no completion marker.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclasses.dataclass(frozen=True, slots=True)
class _Copied:
    """One rank's copied state that the background thread still has to write.

    Attributes:
        configuration: content of ``load_data.json`` on rank 0; empty on other ranks.
    """

    path: pathlib.Path
    batches_trained: int
    copies: StateCopies
    configuration: str
    layouts: Sequence[Mapping[str, Any]]
    metadata: dict[str, Any]


class CheckpointSaver:
    """Saves checkpoints of one trial that allow an exact resume.

    Callbacks run on the main thread: ``on_checkpoint_save_start`` before the copy, ``on_checkpoint_upload_end`` after all
    ranks know that the checkpoint is complete. If the trial overrides ``save``, or a callback overrides ``on_checkpoint_end``
    or ``on_checkpoint_write_end``, training waits until the files are written; only checksums, upload and registration then
    happen in the background.
    """

    def __init__(self, state: RunState, *, in_background: bool) -> None:
        self._state = state
        self._reports = PendingReports(state.runtime.core.train)
        self._buffers = HostBuffers(state.context.distributed.local_size, device=state.context.device)
        self._job: SaveJob | None = None
        self._own_channel: ControlChannel | None = None
        self._saves_itself = type(state.trial).save is not Checkpointable.save
        self._files_are_seen = any(
            state.callbacks.overrides(name) for name in ("on_checkpoint_end", "on_checkpoint_write_end")
        )
        distributed = state.context.distributed
        # Other contexts than a ControlChannel cannot be used in two threads at a time.
        can_share = distributed.size == 1 or isinstance(distributed, ControlChannel)
        self._in_background = in_background and can_share
        if leaves_out_frozen(state.runtime.exp_conf):
            for engine in state.context.models:
                leave_out_frozen(engine)

    # ---- the main thread -----------------------------------------------------------------------------

    def save(self, loop_state: Mapping[str, Any]) -> str:
        """Start to save the current state; return the new checkpoint's uuid.

        Training may continue afterwards; ``finish`` waits until the checkpoint is complete.

        Args:
            loop_state: values that the loop needs to continue on this rank, such as the position in the training data.
                Counters and running metrics are saved separately.

        Raises:
            CheckpointError: the previous save has failed, or this save cannot begin. Complete checkpoints are kept.

        Ranks: all, collectively.
        """
        self.finish()
        progress = self._state.progress
        channel = self._channel()
        previous, progress.last_checkpoint = progress.last_checkpoint, progress.batches_trained
        layouts = self._state.layouts_to_save()
        metadata = {
            **base_metadata(progress.batches_trained),
            **self._state.runtime.checkpoint_metadata(layouts, self._state.trial_id),
        }
        try:
            with contextlib.ExitStack() as stack:
                path, uuid = stack.enter_context(
                    _store_on(self._state.runtime.core.checkpoint, channel).store_path(metadata, shard=True)
                )
                copied = self._copy(pathlib.Path(path), loop_state, layouts, metadata)
                block = stack.pop_all()
        except _ExitRank as left:
            progress.last_checkpoint = previous
            if not isinstance(left.error, OSError):
                raise left.error from left.error.__cause__
            described = self._describe(pathlib.Path(path), progress.batches_trained, left.error)
            raise CheckpointError(described) from left.error
        except BaseException:
            progress.last_checkpoint = previous
            raise
        self._job = SaveJob(
            str(uuid), copied.batches_trained, previous, lambda: self._complete(block, channel, copied)
        )
        if not self._in_background:
            self.finish()
        return str(uuid)

    def _channel(self) -> core.DistributedContext:
        """Return the control channel on which the ranks' save threads communicate.

        The first call creates the channel. Ranks: all, collectively.
        """
        distributed = self._state.context.distributed
        if not self._in_background or distributed.size == 1:
            return distributed
        if self._own_channel is None:
            self._own_channel = ControlChannel(distributed.identity, timeout_s=distributed.timeout_s)
        return self._own_channel

    def _copy(
        self,
        path: pathlib.Path,
        loop_state: Mapping[str, Any],
        layouts: Sequence[Mapping[str, Any]],
        metadata: dict[str, Any],
    ) -> _Copied:
        """Copy this rank's state for the background thread.

        Without background saving, or if callbacks read the files, the files are written immediately.

        Ranks: all, collectively.
        """
        context = self._state.context
        is_immediate = not self._in_background or self._files_are_seen
        copies = StateCopies(None if is_immediate else self._buffers)
        is_chief = context.distributed.rank == 0
        run_on_all_ranks(
            context.distributed,
            lambda: self._copy_rank_state(path, loop_state, copies),
            lambda error: self._describe(path, self._state.progress.batches_trained, error),
        )
        try:
            self._copy_engines(path, copies)
            self._state.callbacks.call("on_checkpoint_end", str(path))
            self._state.callbacks.call("on_checkpoint_write_end", str(path))
        except Exception as error:
            if context.distributed.size > 1:
                raise _ExitRank(error) from error
            raise
        return _Copied(
            path=path,
            batches_trained=self._state.progress.batches_trained,
            copies=copies,
            configuration=self._configuration() if is_chief else "",
            layouts=layouts,
            metadata=metadata,
        )

    def _copy_rank_state(
        self, path: pathlib.Path, loop_state: Mapping[str, Any], copies: StateCopies
    ) -> None:
        context = self._state.context
        path.mkdir(exist_ok=True)
        state = {
            "trial_id": self._state.trial_id,
            "progress": self._state.progress.state_dict(),
            "window": self._state.window.state_dict(),
            "loop": dict(loop_state),
            "reducers": [reducer_state(wrapped.reducer) for wrapped in self._state.runtime.wrapped_reducers],
            "callbacks": self._state.callbacks.state_dict(),
            "engines": [engine_extra_state(engine) for engine in context.models],
            "random_states": RngState.read(context.device).to_saved(),
        }
        self._state.callbacks.call("on_checkpoint_save_start", state)
        # `through_python`, because errors of torch's C++ writer do not state the cause.
        copies.add(state, str(path / rank_state_name(context.distributed.rank)), through_python=True)
        if copies.has_failed:
            _require_picklable(state)

    def _copy_engines(self, path: pathlib.Path, copies: StateCopies) -> None:
        if self._saves_itself:
            self._state.trial.save(self._state.context, path)
            return
        for engine_idx, engine in enumerate(self._state.context.models):
            copy_engine(engine, path, self._state.trial._engine_tag(engine_idx), copies)

    def _configuration(self) -> str:
        load_data = {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": without_credentials(self._state.runtime.exp_conf),
            "hparams": self._state.runtime.given_hparams,
        }
        return json.dumps(load_data, default=str)

    # ---- the thread ----------------------------------------------------------------------------------

    def _complete(
        self, block: contextlib.ExitStack, channel: core.DistributedContext, copied: _Copied
    ) -> None:
        """Write and hash the files, write the manifest, then upload and register all.

        The upload and registration happen when ``block``, the context of ``store_path``, is exited. Ranks: all, collectively;
        communication is only on ``channel``.
        """

        def describe(error: Exception) -> str:
            return self._describe(copied.path, copied.batches_trained, error)

        try:
            with block:
                run_on_all_ranks(channel, lambda: self._write(copied), describe)
                parts = run_on_all_ranks(channel, lambda: self._hash(copied), describe)
                run_on_all_ranks(channel, lambda: self._write_manifest(copied, parts), describe)
            channel.allgather(None)
        except Exception as error:
            if channel is self._own_channel and self._own_channel is not None:
                self._own_channel.leave(describe(error))
            raise

    def _write(self, copied: _Copied) -> None:
        try:
            copied.copies.write()
        except RuntimeError as error:  # raised by torch's C++ writer if the disk is full
            raise CheckpointError(self._describe(copied.path, copied.batches_trained, error)) from error
        if self._state.context.distributed.rank == 0:
            (copied.path / "load_data.json").write_text(copied.configuration)
            model = pathlib.Path(constants.MANAGED_TRAINING_MODEL_COPY)
            if self._state.runtime.core.info is not None and model.is_dir():
                shutil.copytree(model, copied.path / "code")
                (copied.path / "code").chmod(0o755)  # a directory that can be deleted

    def _hash(self, copied: _Copied) -> dict[str, FileEntry]:
        distributed = self._state.context.distributed
        mine = share_of(_files_in(copied.path), distributed.local_rank, distributed.local_size)
        return hash_files(copied.path, mine)

    def _write_manifest(self, copied: _Copied, parts: Sequence[Mapping[str, FileEntry]]) -> None:
        if self._state.context.distributed.rank == 0:
            complete_manifest(copied.path, parts, copied.layouts, copied.metadata)
            self._reports.wait()

    def _describe(self, path: pathlib.Path, batches_trained: int, error: Exception) -> str:
        what = f"checkpoint {path} at batch {batches_trained}"
        return describe_failure(what, path, self._state.context.distributed.rank, error)

    # ---- outcome of a save ---------------------------------------------------------------------------

    def status(self) -> SaveStatus | None:
        """Return whether this rank's save has ended or failed; None without a save."""
        return None if self._job is None else self._job.status

    def settle(self, statuses: Sequence[SaveStatus | None]) -> None:
        """Finish the save if it has ended on all ranks; raise an error if it has failed.

        If no rank has failed and a rank still writes, the call is a no-op. ``statuses`` has the result of ``status()`` of every
        rank.

        Raises:
            CheckpointError: the save has failed on another rank. This rank's own error is raised unchanged.
        """
        job = self._job
        if job is None:
            return
        failures = [status.failure for status in statuses if status is not None and status.failure]
        if failures:
            self._state.progress.last_checkpoint = job.previous_batches
            if not job.status.is_done:
                raise CheckpointError(failures[0])
            self._job = None
            raise job.error or CheckpointError(failures[0])
        if all(status is not None and status.is_done for status in statuses):
            self._job = None
            job.wait()
            self._state.callbacks.call("on_checkpoint_upload_end", uuid=job.uuid)

    def finish(self) -> None:
        """Wait for the save in progress; raise its error. Ranks: all, collectively."""
        if self._job is not None:
            self._job.wait()
            self.settle(self._state.context.distributed.allgather(self.status()))

    def close(self) -> None:
        """Wait for the save in progress, log its failure, and free the host buffers."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()
            if job.error is not None:
                self._state.progress.last_checkpoint = job.previous_batches
                logger.error(
                    "the checkpoint at batch %d was not completed: %s", job.batches_trained, job.error
                )
        self._buffers.clear()
        channel, self._own_channel = self._own_channel, None
        if channel is not None:
            channel.close()


def _store_on(store: core.CheckpointContext, channel: core.DistributedContext) -> core.CheckpointContext:
    """Return a copy of the checkpoint store that communicates on ``channel``."""
    same = copy.copy(store)
    same._dist = channel
    return same


def _files_in(path: pathlib.Path) -> list[str]:
    return sorted(
        str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and not p.name.endswith(".tmp")
    )


def _require_picklable(state: Mapping[str, Any]) -> None:
    parts = {f"the state of the callback {name!r}": value for name, value in state["callbacks"].items()}
    parts |= {f"state[{key!r}]": value for key, value in state.items() if key != "callbacks"}
    for name, value in parts.items():
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001  # user objects fail to pickle in any way they like
            raise CheckpointError(
                f"{name} cannot be pickled ({type(error).__name__}: {error}); expected what torch.save can write. Have "
                "state_dict or on_checkpoint_save_start leave it out."
            ) from None
