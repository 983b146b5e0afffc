"""Iterate repeatedly over a user's own training loader, and restore the position.

The position is restored with the loader's ``load_state_dict``, or else by reading the current pass's micro batches again.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils import data

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.random_state import RngState
from dstrial.errors import DataError

logger = logging.getLogger("dstrial.loop")

ResumeMode = Literal["exact", "reread", "restart"]
"""Values of ``data.dstrial.resume_data``; ``LoaderPasses.restore`` says what each does."""

_END = object()  # returned by ``next`` at the end of a loader


def resume_mode(exp_conf: Mapping[str, Any] | None) -> ResumeMode:
    """Return ``data.dstrial.resume_data``: how a user's own loader resumes.

    Raises:
        ValueError: the value is invalid.
    """
    asked: Any = dstrial_section(exp_conf).get("resume_data") or "exact"
    if asked not in get_args(ResumeMode):
        raise ValueError(
            f"data.dstrial.resume_data is {asked!r}; expected exact, reread or restart. Write one of them."
        )
    mode: ResumeMode = asked
    return mode


class LoaderPasses(Iterator[Any]):
    """An iterator over a loader that begins a new pass where the loader ends.

    Args:
        loader: the user's loader: any iterable of micro batches.
        per_pass: number of micro batches to train per pass; None if the loader has no length.
        rest: number of micro batches at the end of a pass that are not trained.
        rank: this rank, for messages.

    Attributes:
        pass_idx: index of the current pass over the loader.
        in_pass: number of micro batches drawn in the current pass.
        first_digest: checksum of the first micro batch that was drawn; None if unknown.
    """

    def __init__(self, loader: Any, per_pass: int | None, rest: int, rank: int) -> None:
        self._loader = loader
        self._per_pass = per_pass
        self._rest = rest
        self._name = f"the training loader of rank {rank}"
        self._stateful = _stateful_part(loader)
        self._items: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._pass_digest: int | None = None  # checksum of the current pass's first micro batch
        is_iterable = isinstance(getattr(loader, "dataset", None), data.IterableDataset)
        is_plain_map_style = isinstance(loader, data.DataLoader) and not is_iterable
        self._reads_to_end = self._stateful is not None or not is_plain_map_style
        self.pass_idx = 0
        self.in_pass = 0
        self.first_digest: int | None = None
        self._has_drawn = False

    def __next__(self) -> Any:
        while True:
            if self._items is None:
                self._begin_pass()
            if self._per_pass is None or self.in_pass < self._per_pass:
                assert self._items is not None
                item = next(self._items, _END)
                if item is not _END:
                    self.in_pass += 1
                    if self.in_pass == 1 or not self._has_drawn:
                        found = digest(item)  # before training can change the micro batch
                        self._pass_digest = found if self.in_pass == 1 else self._pass_digest
                        self.first_digest = self.first_digest if self._has_drawn else found
                    self._has_drawn = True
                    return item
                if self.in_pass == 0:
                    raise StopIteration
                if self._per_pass is not None:
                    raise DataError(
                        f"{self._name} has a length of {self._per_pass + self._rest} micro batches and ended after "
                        f"{self.in_pass}; expected its length. Correct __len__: it counts what one rank reads."
                    )
            elif self._reads_to_end:
                self._read_to_end()
            self.pass_idx += 1
            self.in_pass = 0
            self._items = None

    def _begin_pass(self) -> None:
        set_epoch(self._loader, self.pass_idx)
        self._start = {"random_states": RngState.read().to_saved(), "generators": self._generator_states()}
        self._items = iter(self._loader)

    def _read_to_end(self) -> None:
        """Read the loader to its end, so that it resets; warn if longer than ``__len__``."""
        assert self._items is not None
        with random_state_kept():
            drawn = 0
            while drawn <= self._rest and next(self._items, _END) is not _END:
                drawn += 1
        if drawn > self._rest and self.pass_idx == 0:
            logger.warning(
                "%s has more micro batches than its length of %d: the others are never trained. Correct __len__, or divide "
                "the data set among the loader's workers (torch.utils.data.get_worker_info)",
                self._name,
                self.in_pass + self._rest,
            )

    def close(self) -> None:
        """Release the loader, so that its workers end."""
        self._loader = self._items = self._stateful = None

    # ---- position -------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return the position in the loader, to save in a checkpoint and for ``restore``."""
        if self._items is None and self._restored is not None:
            return dict(self._restored)
        position = {
            "pass": self.pass_idx,
            "in_pass": self.in_pass,
            "start": self._start,
            "generators": self._generator_states(),
            "digest": self._pass_digest,
            "state": self._stateful.state_dict() if self._stateful is not None and self.in_pass else None,
        }
        if not self._has_drawn and self._restored is not None:  # nothing was read since the restore
            position["state"] = self._restored["state"]
        return position

    def restore(self, saved: Mapping[str, Any], mode: ResumeMode) -> None:
        """Continue at a saved ``position()``; global random states are not changed.

        ``mode``: ``reread`` reads the pass again up to the position; ``exact`` loads the saved ``state_dict`` if the loader
            has one, otherwise does the same as ``reread``; ``restart`` begins the pass again.
        """
        self.pass_idx, self.in_pass = int(saved["pass"]), int(saved["in_pass"])
        if mode == "restart":
            logger.warning(
                "%s begins pass %d again: %d micro batches that were trained are trained once more",
                self._name,
                self.pass_idx,
                self.in_pass,
            )
            self.in_pass = 0
        if not self.in_pass:
            return
        self._restored = saved
        is_stateful = mode == "exact" and self._stateful is not None and saved["state"] is not None
        is_at_end = not is_stateful and self.in_pass == self._per_pass
        if is_at_end:
            self.pass_idx, self.in_pass = self.pass_idx + 1, 0
        if self.pass_idx and not is_stateful and getattr(self._loader, "persistent_workers", False):
            self._start_persistent_workers()
        if is_at_end:
            self._set_generators(saved["generators"])
            return
        set_epoch(self._loader, self.pass_idx)
        self._start, self._pass_digest = saved["start"], saved["digest"]
        with random_state_kept():
            if self._start is not None:
                RngState.from_saved(self._start["random_states"]).restore()
                self._set_generators(self._start["generators"])
            if is_stateful:
                self._load_state(saved["state"])
                self._set_generators(saved["generators"])
            else:
                self._reread()

    def _start_persistent_workers(self) -> None:
        """Create the iterator that persistent workers reuse in all passes.

        Creating the iterator draws a random number; a run that resumes in a later pass must draw this number too, as in pass 0.
        """
        set_epoch(self._loader, 0)
        with random_state_kept():
            iter(self._loader)

    def _load_state(self, state: Any) -> None:
        assert self._stateful is not None
        try:
            self._stateful.load_state_dict(state)
            self._items = iter(self._loader)
        except Exception as error:
            raise DataError(
                f"{self._name} cannot load its state from the checkpoint ({type(error).__name__}: {error}); expected the loader "
                "that wrote it. Build it with the same data set and num_workers, or set data.dstrial.resume_data to reread."
            ) from error

    def _reread(self) -> None:
        began_s = time.monotonic()
        logger.info("%s reads and drops %d micro batches of pass %d", self._name, self.in_pass, self.pass_idx)
        self._items = iter(self._loader)
        for idx in range(self.in_pass):
            item = next(self._items, _END)
            if item is _END:
                raise DataError(
                    f"{self._name} ended after {idx} micro batches of pass {self.pass_idx}, and the checkpoint was written "
                    f"after {self.in_pass}; expected the same data. Restore it, or start a new run."
                )
            if idx == 0 and self._pass_digest not in (None, digest(item)):
                logger.warning(
                    "%s does not repeat itself: pass %d begins with another micro batch than before the checkpoint, so records "
                    "may be trained twice or never. Seed its order, or give it state_dict and load_state_dict",
                    self._name,
                    self.pass_idx,
                )
        logger.info("%s: read again in %.1f s", self._name, time.monotonic() - began_s)

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in _generators(self._loader)]

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(_generators(self._loader), states, strict=False):
            generator.set_state(state.cpu())


def _stateful_part(loader: Any) -> Any:
    """Return the object whose ``state_dict`` contains the loader's position, or None.

    A torch loader's data set qualifies only without workers, because workers read from copies of the data set.
    """
    parts = [loader]
    if isinstance(loader, data.DataLoader) and isinstance(loader.dataset, data.IterableDataset):
        parts += [loader.dataset] if loader.num_workers == 0 else []
    for part in parts:
        if all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
            return part
    return None


def set_epoch(loader: Any, epoch_idx: int) -> None:
    """Call ``set_epoch`` of loader, samplers and data set, if they have the method."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch_idx)


def _generators(loader: Any) -> list[torch.Generator]:
    holders = (loader, getattr(loader, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU generators after the block."""
    before = RngState.read()
    try:
        yield
    finally:
        before.restore()


# ---- checksums of micro batches -------------------------------------------------------------------------


def digest(item: Any) -> int | None:
    """Return a checksum of a micro batch's tensors, numbers and strings.

    None if the micro batch contains none of these.
    """
    value = 0
    found = False
    for leaf in _leaves(item):
        found = True
        value = zlib.crc32(leaf, value)
    return value if found else None


def _leaves(item: Any) -> Iterator[bytes]:
    if isinstance(item, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # nested, sparse and meta tensors have no plain bytes
            dense = item.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
            yield repr((item.dtype, tuple(item.shape))).encode() + found
    elif isinstance(item, np.ndarray):
        if not item.dtype.hasobject:  # bytes of object arrays are addresses
            yield np.ascontiguousarray(item).tobytes()
    elif isinstance(item, str | int | float | bytes):
        yield repr(item).encode()
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)


def reading_problems(gathered: Sequence[tuple[int, int | None]]) -> list[str]:
    """Return warnings about wrongly sharded training loaders; empty without problems.

    Replicas must read different records, and the ranks of one replica the same records. ``gathered`` has for each rank (index
    of its replica, checksum of its first micro batch or None).
    """
    readers = [(rank, replica, found) for rank, (replica, found) in enumerate(gathered) if found is not None]
    problems = []
    of_replica: dict[int, tuple[int, int]] = {}
    for rank, replica, found in readers:
        other, known = of_replica.setdefault(replica, (rank, found))
        if found != known:
            problems.append(
                f"ranks {other} and {rank} belong to one replica and read different records; expected the same. Shard the "
                "training loader by context.get_data_parallel_rank() instead of the rank, and seed it alike on all ranks"
            )
            break
    by_digest: dict[int, int] = {}
    for rank, found in of_replica.values():
        first = by_digest.setdefault(found, rank)
        if first != rank:
            problems.append(
                f"ranks {first} and {rank} read the same records, but belong to replicas of their own, which should read "
                "different ones. Shard the training loader by context.get_data_parallel_rank() and "
                "get_data_parallel_world_size()"
            )
            break
    return problems


# ---- changed number of replicas ---------------------------------------------------------------------------


def position_for(
    saved: Sequence[Mapping[str, Any]], division: tuple[int, int, int], replica: int, mode: ResumeMode
) -> tuple[Mapping[str, Any], ResumeMode]:
    """Return (position, mode), the arguments for ``LoaderPasses.restore``.

    Args:
        saved: positions from the checkpoint: this rank's or, if the rank layout has changed, those of all saved ranks.
        division: (replicas, micro batches per batch, records per micro batch) of this run.
        replica: index of this rank's replica.
        mode: ``data.dstrial.resume_data``. If ``division`` has not changed, ``exact`` is returned instead of ``restart``.

    Raises:
        DataError: ``division`` has changed, and the positions cannot be converted as ``mode`` requires. Every rank raises the
            same error.
    """
    first = saved[0]
    written = tuple(first["division"])
    own = next((one for one in saved if one["replica"] == replica), None)
    if written == division and own is not None:
        return own, "exact" if mode == "restart" else mode
    if mode == "restart":
        return own or first, mode
    sizes = ["{} x {} x {}".format(*numbers) for numbers in (written, division)]
    if mode == "exact":
        raise DataError(
            f"the checkpoint's training loaders read {sizes[0]} records per batch (replicas x micro batches x records), and now "
            f"{sizes[1]}; expected the same, because a loader that is not dstrial.DataLoader divides its records itself. Resume "
            "with the former number of replicas, or set data.dstrial.resume_data: reread if the replicas take turns in one "
            "stream of records, restart to begin the pass again."
        )
    in_pass, left = divmod(first["in_pass"] * written[0] * written[2], division[0] * division[2])
    if left or len({(one["pass"], one["in_pass"]) for one in saved}) > 1:
        raise DataError(
            f"the checkpoint's training loaders, which read {sizes[0]} records per batch, are at positions in their passes that "
            f"{sizes[1]} records per batch cannot take up; expected one position of all replicas on a boundary of micro batches. "
            "Resume with the former number of replicas, or set data.dstrial.resume_data: restart."
        )
    return {**(own or first), "in_pass": in_pass, "digest": None, "state": None}, mode
