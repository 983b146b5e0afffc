"""Writing and reading whole checkpoints: engines, trial state of every rank, and the manifest over them.

A checkpoint directory holds ``model<i>/`` (engines, or whatever the trial's ``save`` writes),
``dstrial_rank<r>.pt`` (this rank's counters, random states, open report window, reducers, callbacks),
``load_data.json`` (configuration), ``manifest.json`` (layout and every file with size, checksum and reader)
and, written last by the store, the completion mark.
"""

from __future__ import annotations

import json
import logging
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import determined as det
import numpy as np
import torch
from determined import constants

import dstrial
from dstrial.checkpoint.manifest import Manifest, hash_files, read_manifest, share_of, write_manifest
from dstrial.checkpoint.verify import Damage, damaged_error, verify_files
from dstrial.engine.files import engine_files
from dstrial.engine.layout import compatible
from dstrial.engine.state import engine_extra_state, restore_engine_extra_state
from dstrial.errors import CheckpointError, CheckpointLayoutError
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.metrics import MetricWindow
from dstrial.loop.progress import Progress
from dstrial.loop.reducers import reducer_state, restore_reducer
from dstrial.loop.reports import ReportsUnderway
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.trial import DeepSpeedTrial

logger = logging.getLogger("dstrial.loop")


def rank_state_name(rank: int) -> str:
    """Return the file name of one rank's trial state."""
    return f"dstrial_rank{rank}.pt"


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of this process and of its device. Ranks: any; no communication."""
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            algorithm,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.random.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = _accelerator().get_rng_state(device.index)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put this process's random states back. Ranks: any; no communication."""
    random.setstate(states["python"])
    algorithm, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.random.set_rng_state(states["torch"])
    if device.type != "cpu" and "device" in states:
        _accelerator().set_rng_state(states["device"], device.index)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


class _LeaveAtOnce(BaseException):
    """Passes through the store without waiting for other ranks, which wait inside DeepSpeed's own barriers.

    This rank then exits with the error it carries as its cause, the launcher ends the others, and the
    directory, which has no completion mark, is removed at the next start.
    """


class Checkpointing:
    """Saves and restores one trial with everything the loop needs to go on exactly.

    Args:
        trial: the user's trial.
        context: its context, engines wrapped.
        callbacks: the user's callbacks.
        progress: the run's counters.
        window: the open window of training metrics.
        trial_id: number of the trial; a checkpoint of another trial gives weights only.
    """

    def __init__(
        self,
        trial: DeepSpeedTrial,
        context: DeepSpeedTrialContext,
        callbacks: Callbacks,
        progress: Progress,
        window: MetricWindow,
        trial_id: int,
    ) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._progress = progress
        self._window = window
        self._trial_id = trial_id
        self._reports = ReportsUnderway(context._core.train)
        self._layouts: list[dict[str, Any]] | None = None
        self._pending_random_states: Mapping[str, Any] | None = None

    def save(self, loop_state: Mapping[str, Any]) -> str:
        """Write a checkpoint of now. Ranks: all, collectively.

        Args:
            loop_state: what the loop wants back at a resume, besides counters and window; per rank.

        Returns:
            The checkpoint's uuid.

        Raises:
            CheckpointError: it cannot be written; the checkpoints before it stay as they are.
        """
        context, progress = self._context, self._progress
        metadata = {
            "steps_completed": progress.batches_trained,
            "determined_version": det.__version__,
            "dstrial_version": dstrial.__version__,
            "framework": f"torch-{torch.__version__}",
            "format": "dstrial",
        }
        if context.distributed.rank == 0:
            self._reports.wait()
        previous, progress.last_checkpoint = progress.last_checkpoint, progress.batches_trained
        try:
            with context._core.checkpoint.store_path(metadata, shard=True) as (path, uuid):
                self._write_rank_states_together(pathlib.Path(path), loop_state)
                try:
                    self._write_engines(pathlib.Path(path))
                except Exception as error:
                    if context.distributed.size > 1:
                        raise _LeaveAtOnce from error
                    raise
        except _LeaveAtOnce as left:
            raise self._cannot_write(path, left.__cause__) from left.__cause__
        except BaseException:
            progress.last_checkpoint = previous
            raise
        self._callbacks.call("on_checkpoint_upload_end", uuid=uuid)
        return str(uuid)

    def _cannot_write(self, path: pathlib.Path, cause: BaseException | None) -> BaseException:
        if cause is not None and not isinstance(cause, OSError):
            return cause
        return CheckpointError(
            f"checkpoint {path} at batch {self._progress.batches_trained} cannot be written by rank "
            f"{self._context.distributed.rank}: {cause}; expected a writable directory with enough room. Make room, then "
            "resume: the checkpoints before it are complete."
        )

    def _write_rank_states_together(self, path: pathlib.Path, loop_state: Mapping[str, Any]) -> None:
        """Write this rank's own state; the failure of one rank is the failure of all. Ranks: all, collectively."""
        distributed = self._context.distributed
        error: Exception | None = None
        try:
            self._write_rank_state(path, loop_state)
        except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks know of it
            error = caught
        failures = distributed.allgather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(
                    f"checkpoint {path} cannot be written by rank {rank}: {failure}; expected a writable directory with "
                    "enough room. Make room, then resume: the checkpoints before it are complete."
                )

    def _write_rank_state(self, path: pathlib.Path, loop_state: Mapping[str, Any]) -> None:
        context = self._context
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "trial_id": self._trial_id,
            "progress": self._progress.state_dict(),
            "window": self._window.state_dict(),
            "loop": dict(loop_state),
            "reducers": [reducer_state(wrapped.reducer) for wrapped in context._wrapped_reducers],
            "callbacks": self._callbacks.state_dict(),
            "engines": [engine_extra_state(engine) for engine in context.models],
            "random_states": random_states(context.device),
        }
        self._callbacks.call("on_checkpoint_save_start", state)
        # Through a Python file: torch's own writer hides why a write failed.
        with (path / rank_state_name(context.distributed.rank)).open("wb") as file:
            torch.save(state, file)

    def _write_engines(self, path: pathlib.Path) -> None:
        """Write the engines and the manifest over everything. Ranks: all, collectively."""
        context = self._context
        self._trial.save(context, path)
        if context.distributed.rank == 0:
            self._write_configuration(path)
        layouts = self._current_layouts()
        self._callbacks.call("on_checkpoint_end", str(path))
        self._callbacks.call("on_checkpoint_write_end", str(path))
        context.distributed.allgather(None)
        mine = share_of(_files_in(path), context.distributed.local_rank, context.distributed.local_size)
        gathered = context.distributed.gather((hash_files(path, mine), self._files_i_read()))
        if gathered is not None:
            files = {name: entry for part, _ in gathered for name, entry in part.items()}
            readers: dict[str, list[int]] = {}
            for reader, (_, names) in enumerate(gathered):
                for name in names:
                    readers.setdefault(name, []).append(reader)
            batches_trained = self._progress.batches_trained
            manifest = Manifest.build(
                steps_completed=batches_trained, layouts=layouts, files=files, readers=readers
            )
            write_manifest(path, manifest)

    def _write_configuration(self, path: pathlib.Path) -> None:
        context = self._context
        load_data = {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": context._exp_conf,
            "hparams": context._hparams,
        }
        (path / "load_data.json").write_text(json.dumps(load_data, default=str))
        if context._core.info is not None and pathlib.Path(constants.MANAGED_TRAINING_MODEL_COPY).is_dir():
            det.util.write_user_code(path, True)

    def _current_layouts(self) -> list[dict[str, Any]]:
        if self._layouts is None:
            gather = self._context.distributed.allgather
            self._layouts = [adapter.layout(gather).to_json() for adapter in self._context._adapters]
        return self._layouts

    def restore(self, uuid: str, expected_epoch_length: int | None) -> tuple[dict[str, Any], bool]:
        """Load a checkpoint. Ranks: all, collectively.

        Random states are not touched: call :meth:`restore_random_states` as the last thing before training.

        Args:
            uuid: the checkpoint's uuid, or its directory off a cluster.
            expected_epoch_length: batches per epoch of the loader in use.

        Returns:
            The loop's own state as given to :meth:`save`, and whether the run itself is continued; False
            means another trial's weights were taken over and counting starts at 0.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint, or it was not written by dstrial.
            CheckpointDamagedError: a file is missing or differs from the manifest.
            CheckpointLayoutError: it was written for another number or arrangement of ranks.
            CheckpointError: it belongs to other data.
        """
        context = self._context
        with context._core.checkpoint.restore_path(uuid) as restored:
            path = pathlib.Path(restored)
            manifest = self._read_verified(path)
            problems = [
                f"engine {idx}: {problem}"
                for idx, (saved, now) in enumerate(
                    zip(manifest.layouts, self._current_layouts(), strict=False)
                )
                for problem in compatible(saved, now)
            ]
            if len(manifest.layouts) != len(self._current_layouts()):
                problems.append(
                    f"it holds {len(manifest.layouts)} engines, the trial wraps {len(self._current_layouts())}"
                )
            if problems:
                raise CheckpointLayoutError(
                    f"checkpoint {path} was written for another layout: {'; '.join(problems)}. Resume it with the layout it "
                    "was written for."
                )
            needed = [rank_state_name(rank) for rank in range(context.distributed.size)]
            missing = [name for name in needed if name not in manifest.files]
            if missing:
                raise CheckpointLayoutError(
                    f"checkpoint {path} has no {missing[0]}; expected the state of {len(needed)} ranks, and it holds "
                    f"{sum(name.startswith('dstrial_rank') for name in manifest.files)}. Resume it with as many ranks as it was "
                    "written with."
                )
            state = torch.load(
                path / needed[context.distributed.rank], map_location=self._place, weights_only=False
            )
            self._callbacks.call("on_checkpoint_load_start", state)
            self._trial.load(context, path)
            for engine, extra in zip(context.models, state["engines"], strict=True):
                restore_engine_extra_state(engine, extra)
        self._callbacks.load_state_dict(state["callbacks"])
        continues = state["trial_id"] == self._trial_id
        self._pending_random_states = state["random_states"] if continues else None
        if not continues:
            logger.info(
                "checkpoint %s belongs to another trial: its weights are taken over, counting starts at 0",
                uuid,
            )
            return {}, False
        saved_epoch_length = state["progress"]["epoch_length"]
        if saved_epoch_length != expected_epoch_length:
            raise CheckpointError(
                f"checkpoint {uuid} was written with epochs of {saved_epoch_length} batches, and the training loader now has "
                f"{expected_epoch_length}; expected the same records and batch size. Restore them, or start a new run."
            )
        self._progress.load_state_dict(state["progress"])
        self._window.load_state_dict(state["window"], context.device)
        for wrapped, saved in zip(context._wrapped_reducers, state["reducers"], strict=False):
            restore_reducer(wrapped.reducer, saved)
        return dict(state["loop"]), True

    def _place(self, storage: Any, location: str) -> Any:
        """Put what was on an accelerator on this rank's, and leave the rest on the CPU, for ``torch.load``."""
        if location == "cpu":
            return storage
        restore: Callable[[Any, str], Any] = torch.serialization.default_restore_location
        return restore(storage, str(self._context.device))

    def restore_random_states(self) -> None:
        """Put back the random states of the checkpoint that was restored, if any."""
        if self._pending_random_states is not None:
            restore_random_states(self._pending_random_states, self._context.device)
            self._pending_random_states = None

    def _files_i_read(self) -> list[str]:
        """Return the files of a checkpoint that this rank reads back in the same layout."""
        names = [rank_state_name(self._context.distributed.rank)]
        for engine_idx, engine in enumerate(self._context.models):
            names += engine_files(engine, f"model{engine_idx}").read
        return names

    def _read_verified(self, path: pathlib.Path) -> Manifest:
        """Read the manifest and compare every file with it, each rank its share. Ranks: all, collectively."""
        distributed = self._context.distributed
        mine: list[Damage] | CheckpointError
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            mine = error
        else:
            names = share_of(sorted(manifest.files), distributed.local_rank, distributed.local_size)
            mine = verify_files(path, manifest, only=names)
        gathered = distributed.allgather(mine)
        for found in gathered:
            if isinstance(found, CheckpointError):
                raise found
        damages = {damage.path: damage for found in gathered for damage in found}
        if damages:
            raise damaged_error(path, [damages[name] for name in sorted(damages)])
        return manifest


def _files_in(path: pathlib.Path) -> list[str]:
    return sorted(
        str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and not p.name.endswith(".tmp")
    )
