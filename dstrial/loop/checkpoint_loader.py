"""Restore checkpoints that were written with the same rank layout or another one.

A checkpoint directory contains ``model<i>/`` (engines, or files of the trial's own ``save``), ``dstrial_rank<r>.pt`` (the
rank's counters, random states, unreported metrics, reducers, callbacks), ``load_data.json`` (configuration),
``manifest.json`` (layout; size and checksum of every file) and, written last, the completion marker.

Pickle files with only plain values and classes of ``safe_load.LISTED`` are always loaded. Other pickle files can run code. They
are loaded only if one of these vouches for the checkpoint: a signature of this user account in the manifest; the manifest's
SHA-256 in the master's metadata of the checkpoint; the same SHA-256 in the user's ``data.dstrial.trust_checkpoint_code``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from determined import core

from dstrial.checkpoint.integrity import read_verified
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import (
    MANIFEST_DIGEST,
    MANIFEST_NAME,
    hash_file,
    hash_files,
    is_own_manifest,
    layouts_of,
    rank_state_name,
    share_of,
)
from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.adapters.batch_sizes import recount_micro_batches
from dstrial.engine.checkpoint_reader.open import read_for_rank, read_rank_state
from dstrial.engine.checkpoint_reader.safe_load import (
    load,
    may_be_unpickled,
    unlisted_in,
    untrusted,
    vouched_for,
)
from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
from dstrial.engine.deepspeed_internals import engines
from dstrial.engine.frozen_parameters import without_frozen
from dstrial.engine.random_state import RngState
from dstrial.engine.reshape import load_reshaped
from dstrial.engine.state import (
    differing_settings,
    extra_state_for,
    merged_tied_modules,
    optimizer_settings,
    restore_engine_extra_state,
)
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointLayoutError
from dstrial.loop.run_state import RunState, restore_reducer
from dstrial.resume.plan import plan_load, require_same_batch
from dstrial.trial.trial import Checkpointable

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger("dstrial.loop")

WINDOW_KEYS = ("window_seconds", "window_start")
"""Keys of the saved loop state: seconds of training since the last metric report, and first batch after that report."""

TRUST_KEY = "trust_checkpoint_code"
"""Key of ``data.dstrial``: the SHA-256 of the checkpoint whose code the user trusts."""


class CheckpointLoader:
    """Restores a run from a checkpoint: engines, counters, metrics, random states."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._pending_random_states: Mapping[str, Any] | None = None
        self._is_trusted = False  # whether unlisted classes are loaded from the checkpoint

    def restore(
        self, uuid: str, expected_epoch_length: int | None, expected_records: int | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Load a checkpoint, except random states; see ``restore_random_states``.

        Args:
            uuid: the checkpoint's uuid; without a master, the path of the checkpoint's directory is accepted too.
            expected_epoch_length: batches per epoch of the current training loader.
            expected_records: records per batch over all ranks of the current training loader; None if unknown.

        Returns:
            (loop state, whether the run continues). The loop state was passed to ``CheckpointSaver.save``. If another trial
            wrote the checkpoint, the run does not continue: only weights are loaded, the loop state is empty, and batches
            count from 0.

        Ranks: all, collectively.
        """
        context, runtime = self._state.context, self._state.runtime
        with runtime.core.checkpoint.restore_path(uuid) as restored, contextlib.ExitStack() as stack:
            path = pathlib.Path(restored)
            manifest = read_verified(path, context.distributed)
            trusts = trusts_code(runtime.core, uuid, path, list(manifest.files), runtime.exp_conf)
            self._is_trusted = trusts
            stack.enter_context(vouched_for(context.models, trusts_code=trusts))
            stack.enter_context(engines.ignoring_load_universal(context.models))
            saved = list(layouts_of(manifest, path))
            now = self._state.layouts()
            saved_size = saved[0].world_size if saved else context.distributed.size
            _require_ranks(path, manifest.files, saved_size)
            # If ``autotp_size`` has changed, all ranks of a replica continue the random states of one saved rank.
            sizes = [one[0].model_parallel_size for one in (saved, now) if one]
            source = context.distributed.rank
            if len(set(sizes)) > 1:
                source = source // sizes[1] * sizes[0]
            name = rank_state_name(source % saved_size)
            state: dict[str, Any] = load(path / name, map_location=self._map_location, trusts_code=trusts)
            continues = state["trial_id"] == self._state.trial_id
            is_reshaped = self._must_reshape(path, saved, now)
            if continues:
                require_same_batch(path, saved, now)
            if is_reshaped:
                self._reshape_rank_state(path, state, saved_size, source)
            if is_reshaped or saved[0].micro_batches_per_batch != now[0].micro_batches_per_batch:
                # Ranks add metrics more or less often per batch: the next report only has batches from now on.
                state["window"], state["reducers"] = None, []
                state["loop"] = {key: state["loop"][key] for key in state["loop"] if key not in WINDOW_KEYS}
            state["loop"] = rescale_micro_batches(state["loop"], saved, now)
            self._state.callbacks.call("on_checkpoint_load_start", state)
            self._load_engines(path, state, saved, now, is_reshaped=is_reshaped)
        self._state.callbacks.load_state_dict(state["callbacks"])
        self._pending_random_states = state["random_states"] if continues else None
        if not continues:
            logger.info(
                "checkpoint %s belongs to another trial: its weights are taken over, counting starts at 0",
                uuid,
            )
            return {}, False
        _require_same_data(uuid, state, expected_epoch_length, expected_records)
        self._continue_counts(state)
        return dict(state["loop"]), True

    def _load_engines(
        self,
        path: pathlib.Path,
        state: Mapping[str, Any],
        saved: list[Layout],
        now: list[Layout],
        *,
        is_reshaped: bool,
    ) -> None:
        """Load the checkpoint at ``path`` into all engines.

        ``is_reshaped``: whether the rank layout has changed, so that the engines' state is resharded.
        """
        context = self._state.context
        settings = [optimizer_settings(engine) for engine in context.models]
        with contextlib.ExitStack() as stack:
            for engine, before, after in zip(context.models, saved, now, strict=True):
                stack.enter_context(without_frozen(engine, before, after, context.distributed.allgather))
            if is_reshaped:
                self._load_reshaped(path, state["all_engines"], saved, now)
                self._state.trial._load_beside_engines(context, path)
            else:
                self._state.trial.load(context, path)
        for engine_idx, engine in enumerate(context.models):
            restore_engine_extra_state(engine, self._extra_state(state, engine_idx, saved, now))
            if not is_reshaped:
                recount_micro_batches(engine, saved[engine_idx], now[engine_idx])
            settle_optimizer_settings(
                engine,
                settings[engine_idx],
                self._state.runtime.exp_conf,
                f"engine {engine_idx}",
                is_chief=context.distributed.rank == 0,
            )

    def _continue_counts(self, state: Mapping[str, Any]) -> None:
        context, runtime = self._state.context, self._state.runtime
        self._state.progress.load_state_dict(state["progress"])
        if state["window"] is not None:
            self._state.window.load_state_dict(state["window"], context.device)
        for wrapped, saved in zip(runtime.wrapped_reducers, state["reducers"], strict=False):
            restore_reducer(wrapped.reducer, saved)

    def _must_reshape(self, path: pathlib.Path, saved: list[Layout], now: list[Layout]) -> bool:
        """Return whether the checkpoint's rank layout differs from this run's.

        Raises:
            CheckpointLayoutError: the layouts differ, and the checkpoint cannot be resharded.
        """
        problems = []
        trial_class = type(self._state.trial)
        is_own = trial_class.save is not Checkpointable.save or trial_class.load is not Checkpointable.load
        if is_own and not trial_class._saves_engines_by_tag:
            problems.append(
                f"{trial_class.__name__} writes its checkpoints itself: resume it with the layout it was written for"
            )
        differences = plan_load(path, saved, now, problems)
        if differences and self._state.context.distributed.rank == 0:
            logger.info("checkpoint %s is brought into another layout: %s", path.name, "; ".join(differences))
        return bool(differences)

    def _reshape_rank_state(
        self, path: pathlib.Path, state: dict[str, Any], saved_size: int, source: int
    ) -> None:
        """Convert the content of ``dstrial_rank<r>.pt`` to this run's rank layout.

        ``path`` is the checkpoint, and ``state`` the file's content, which is changed in place. ``saved_size`` ranks wrote the
        checkpoint. This rank continues the random states of the saved rank ``source``; if there were fewer ranks, it gets none.
        """
        # The files are memory-mapped, because only a small part of other ranks' state is used.
        states = [read_rank_state(path, rank, trusts_code=self._is_trusted) for rank in range(saved_size)]
        state["loop"] = {**state["loop"], **position_of([one["loop"] for one in states])}
        state["all_engines"] = [one["engines"] for one in states]
        if source >= saved_size:
            # The checkpoint has no state for this rank, which keeps the random states from its seed.
            state["random_states"] = None

    def _load_reshaped(
        self,
        path: pathlib.Path,
        extras: list[list[Mapping[str, Any]]],
        saved: list[Layout],
        now: list[Layout],
    ) -> None:
        for engine_idx, engine in enumerate(self._state.context.models):
            tied = merged_tied_modules([of_rank[engine_idx] for of_rank in extras])
            tag = self._state.trial._engine_tag(engine_idx)
            read = functools.partial(SavedEngine, path, tag, tied=tied, trusts_code=self._is_trusted)
            part, after = engines.checkpoint_part(engine), now[engine_idx]
            load_reshaped(engine, read_for_rank(read, saved[engine_idx], after, part), after)

    def _extra_state(
        self, state: Mapping[str, Any], engine_idx: int, saved: list[Layout], now: list[Layout]
    ) -> Mapping[str, Any]:
        if "all_engines" not in state:
            own: Mapping[str, Any] = state["engines"][engine_idx]
            return own
        extras = [engines[engine_idx] for engines in state["all_engines"]]
        return extra_state_for(
            self._state.context.models[engine_idx], saved[engine_idx], now[engine_idx], extras
        )

    def _map_location(self, storage: Any, location: str) -> Any:
        """Move an accelerator tensor's storage to this rank's device (``map_location``)."""
        if location == "cpu":
            return storage
        restore: Callable[[Any, str], Any] = torch.serialization.default_restore_location
        return restore(storage, str(self._state.context.device))

    def restore_random_states(self) -> None:
        if self._pending_random_states is not None:
            device = self._state.context.device
            RngState.from_saved(self._pending_random_states).restore(device)
            self._pending_random_states = None


def _require_ranks(path: pathlib.Path, names: Container[str], num_ranks: int) -> None:
    missing = [rank_state_name(rank) for rank in range(num_ranks) if rank_state_name(rank) not in names]
    if missing:
        raise CheckpointDamagedError(
            f"checkpoint {path} has no {missing[0]}; expected the state of {num_ranks} ranks. Resume from another "
            "checkpoint."
        )


def settle_optimizer_settings(
    engine: DeepSpeedEngine,
    before: Sequence[Mapping[str, Any]],
    exp_conf: Mapping[str, Any] | None,
    label: str,
    *,
    is_chief: bool,
) -> None:
    """Keep the loaded optimizer settings, or restore this run's settings.

    This run's settings are restored if ``data.dstrial.override_optimizer`` is true. If the settings differ, the chief logs a
    warning. ``before`` is the result of ``optimizer_settings`` before the load; ``label`` names the engine in the warning.
    """
    overrides = dstrial_section(exp_conf).get("override_optimizer") is True
    found = differing_settings(engine, before, overrides=overrides)
    if found and is_chief:
        logger.warning(
            "%s: this run sets its optimizer to %s; %s",
            label,
            "; ".join(found),
            "this run's settings count (data.dstrial.override_optimizer)"
            if overrides
            else "the checkpoint counts. To use this run's settings, set "
            "data.dstrial.override_optimizer to true",
        )


def _require_same_data(
    uuid: str, state: Mapping[str, Any], expected_epoch_length: int | None, expected_records: int | None
) -> None:
    saved_records = state["loop"].get("records_per_batch", expected_records)
    if expected_records is not None and saved_records != expected_records:
        raise CheckpointError(
            f"checkpoint {uuid} was written with {saved_records} records in a batch, and the training loader now reads "
            f"{expected_records}; expected the same. Build the loader with "
            "batch_size=context.get_train_micro_batch_size_per_gpu()."
        )
    saved_epoch_length = state["progress"]["epoch_length"]
    if saved_epoch_length != expected_epoch_length:
        raise CheckpointError(
            f"checkpoint {uuid} was written with epochs of {saved_epoch_length} batches, and the training loader now has "
            f"{expected_epoch_length}; expected the same records and batch size. Restore them, or start a new run."
        )


def rescale_micro_batches(
    loop_state: Mapping[str, Any], saved: Sequence[Layout], now: Sequence[Layout]
) -> dict[str, Any]:
    """Return ``loop_state`` with ``micro_batches_drawn`` converted to this run.

    A batch may have more or fewer micro batches in this run; the number of batches stays the same. ``saved`` and ``now`` are
    the layouts of the checkpoint's and of this run's engines. If ``saved`` is empty, nothing is converted.

    Raises:
        CheckpointLayoutError: the number of records read is not a whole number of this run's micro batches.
    """
    if not saved:
        return dict(loop_state)
    before, after = saved[0].micro_batches_per_batch, now[0].micro_batches_per_batch
    drawn, rest = divmod(int(loop_state.get("micro_batches_drawn", 0)) * after, before)
    if rest:
        raise CheckpointLayoutError(
            f"the checkpoint was written after {loop_state['micro_batches_drawn']} micro batches of {saved[0].micro_batch_size} "
            f"records, which is no whole number of micro batches of {now[0].micro_batch_size}; expected a boundary of both. "
            "Resume with the micro batch that wrote it."
        )
    return {**loop_state, "micro_batches_drawn": drawn}


def position_of(loop_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the position in the training data, merged from all ranks' loop states.

    The result has ``micro_batches_drawn``, and, if any rank has them, ``loaders`` and ``records_per_batch``. Ranks in the middle
    stages of a pipeline have no loader, and therefore none of these values.
    """
    found: dict[str, Any] = {
        "micro_batches_drawn": max(int(one.get("micro_batches_drawn", 0)) for one in loop_states),
    }
    if loaders := [position for one in loop_states for position in one.get("loaders", ())]:
        found["loaders"] = loaders
    for one in loop_states:
        if one.get("records_per_batch") is not None:
            found["records_per_batch"] = int(one["records_per_batch"])
    return found


# ---- trust in pickle files ----------------------------------------------------------------------------


def trusts_code(
    context: core.Context,
    uuid: str,
    root: pathlib.Path,
    names: Sequence[str],
    exp_conf: Mapping[str, Any] | None,
) -> bool:
    """Return whether to load classes outside ``safe_load.LISTED``, which can run code.

    False if no file names such classes. True if a file does, and a signature, the master or the user vouches for the
    checkpoint. The caller must have verified the files that the manifest lists. Other files are scanned too, because a library
    may load any file in the directory.

    Args:
        context: Core API context, for communication between ranks and for metadata that the master stores.
        uuid: the checkpoint's uuid or directory.
        root: the checkpoint's directory.
        names: files that the manifest lists, relative to ``root``; equal on all ranks.
        exp_conf: the experiment config, whose ``data.dstrial.trust_checkpoint_code`` may contain the checkpoint's SHA-256.

    Raises:
        UntrustedCheckpointError: a file names unlisted classes, and neither signature, master nor user vouches for the
            checkpoint; or the manifest does not list the file.

    Ranks: all, collectively.
    """
    distributed = context.distributed
    pickles = sorted(name for name in names if may_be_unpickled(name))
    strays = _files_not_in_manifest(root, names)
    mine = share_of(pickles, distributed.local_rank, distributed.local_size)
    mine = [*mine, *share_of(strays, distributed.local_rank, distributed.local_size)]
    found: dict[str, tuple[str, ...]] = {}
    for part in distributed.allgather(unlisted_in(root, mine)):
        found.update(part)
    if not found:
        return False
    # No signature covers a file that the manifest does not list.
    unknown = {f"checkpoint {root}: {name}": found[name] for name in sorted(found.keys() - set(names))}
    if unknown:
        raise untrusted(unknown, "The checkpoint's manifest does not list the file: delete it.")
    voucher, digest = None, None
    if distributed.rank == 0:
        digest = checkpoint_digest(root, pickles)
        voucher = _voucher(context, uuid, root, digest, exp_conf)
    voucher, digest = distributed.broadcast((voucher, digest))
    if voucher is None:
        raise untrusted(
            {
                f"checkpoint {root}: {name}" if not idx else name: found[name]
                for idx, name in enumerate(sorted(found))
            },
            "If you trust who wrote it, add --trust-code to `dstrial run --resume`, or write "
            f"data: {{dstrial: {{{TRUST_KEY}: {digest}}}}} into the experiment config.",
        )
    if distributed.rank == 0:
        logger.info("checkpoint %s holds objects of classes of its own, and is loaded: %s", uuid, voucher)
    return True


def _files_not_in_manifest(root: pathlib.Path, listed: Sequence[str]) -> list[str]:
    """Return the files outside the manifest that a resume might unpickle.

    ``listed`` has the files in the manifest. Without a manifest, the result is empty.
    """
    if not (root / MANIFEST_NAME).is_file():
        return []
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return sorted(name for name in present - set(listed) if may_be_unpickled(name))


def checkpoint_digest(root: pathlib.Path, names: Sequence[str]) -> str:
    """Return the hexadecimal SHA-256 of a checkpoint's manifest.

    Without a manifest, return the SHA-256 of the checksums of the files ``names``, which are relative to ``root``.
    """
    if (root / MANIFEST_NAME).is_file():
        return hash_file(root / MANIFEST_NAME).sha256
    sums = {name: entry.sha256 for name, entry in hash_files(root, sorted(names)).items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def _voucher(
    context: core.Context, uuid: str, root: pathlib.Path, digest: str, exp_conf: Mapping[str, Any] | None
) -> str | None:
    """Return log text on why a checkpoint's code is trusted; None if it is untrusted."""
    if dstrial_section(exp_conf).get(TRUST_KEY) == digest:
        return f"data.dstrial.{TRUST_KEY} says so"
    if not (root / MANIFEST_NAME).is_file():
        return None
    if is_own_manifest(root):
        return "this account has written it"
    # Only the master's metadata counts; metadata in a directory may come from the same untrusted author.
    if context.info is not None and not pathlib.Path(uuid).is_absolute():
        metadata = context.checkpoint.get_metadata(uuid)
        if metadata.get(MANIFEST_DIGEST) == digest:
            return "the master knows it as what a trial of its own has written"
    return None
