"""Open the saved state of a checkpoint's engines, and summarise optimizer state.

A checkpoint that was written with AutoTP can be read as if it had another ``autotp_size``.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import engine_folder, rank_state_name
from dstrial.engine.checkpoint_reader.safe_load import load_mapped
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine
from dstrial.errors import CheckpointError

_TIED_PREFIX = "tied_modules."


def open_saved_engine(
    root: str | pathlib.Path, engine_idx: int, layout: Layout, *, trusts_code: bool = False
) -> SavedEngine:
    """Open an engine's state saved by dstrial, Accelerate or Hugging Face's Trainer.

    Args:
        root: the checkpoint's directory.
        engine_idx: 0-based index of the engine, in the order in which the trial has wrapped its engines.
        layout: the engine's layout, from the manifest.
        trusts_code: whether classes outside ``safe_load.LISTED`` may be loaded, which can run code.

    Raises:
        CheckpointLayoutError: single parameters cannot be read (state on NVMe, or experts spread over ranks).
        CheckpointDamagedError: a file is missing or cannot be read.
        UntrustedCheckpointError: a file contains unlisted classes.
    """
    path = pathlib.Path(root)
    tied: dict[str, Mapping[str, torch.Tensor]] = {}
    if any(place.name.startswith(_TIED_PREFIX) for place in layout.parameters):
        for rank in range(layout.world_size):
            state = read_rank_state(path, rank, trusts_code=trusts_code)
            for key, of_layer in state["engines"][engine_idx].get("tied_modules", {}).items():
                tied.setdefault(key, of_layer)  # ranks of the first stage come first
    return SavedEngine(
        path, layout.folder or folder_in(path, engine_idx), layout, tied, trusts_code=trusts_code
    )


def read_for_rank(
    read: Callable[[Layout], SavedEngine], saved: Layout, now: Layout, part: int
) -> SavedEngine:
    """Return an engine's saved state, with parameters sliced for this rank.

    Args:
        read: function that takes a layout, and opens the saved state of the parameters in this layout.
        saved: the layout in the checkpoint.
        now: the layout of this run's engine.
        part: this rank's model-parallel rank.
    """
    if saved.model_parallel_size != now.model_parallel_size:
        parts = [read(saved.of_part(one)) for one in range(saved.model_parallel_size)]
        return MergedEngine(parts, saved, now, part)
    return read(saved if saved.model_parallel_size == 1 else saved.of_part(part))


class MergedEngine(SavedEngine):
    """Saved state of one engine, sliced for a rank of another ``autotp_size``.

    Parameters have the shape of this rank's slices. Memory holds one whole parameter at a time.

    Args:
        parts: saved state of each tensor-parallel rank, in order of ranks.
        layout: the saved engine's layout.
        now: the layout of this run's engine.
        part: this rank's tensor-parallel rank.
    """

    def __init__(self, parts: Sequence[SavedEngine], layout: Layout, now: Layout, part: int) -> None:
        vars(self).update(vars(parts[0]))  # counters, settings and scalars are equal on all parts
        self.layout = layout
        self._parts = parts
        self._slices = now.slices()
        self._part = part
        self._last = functools.lru_cache(maxsize=1)(self._merge)

    def copy(self, name: str, key: str, begin: int, out: torch.Tensor) -> None:
        out.copy_(self._last(name, key, False)[begin : begin + out.numel()])

    def recorded(self, name: str, key: str, begin: int, numel: int) -> Iterator[torch.Tensor]:
        yield self._last(name, key, True)[begin : begin + numel]

    def unequal_copies(self) -> list[str]:
        """Return unsliced parameters whose copies differ between tensor-parallel ranks."""
        return [
            name
            for name, place in self.places.items()
            if place.tensor_dim is None
            and self.holds(name)
            and any(
                not torch.equal(self._parts[0].full(name, key), other.full(name, key))
                for key in (MASTER, *self.state_keys(name))
                for other in self._parts[1:]
            )
        ]

    def _merge(self, name: str, key: str, is_recorded: bool) -> torch.Tensor:
        """Return this rank's slice of a parameter's weights or optimizer state, flattened.

        ``key`` is ``MASTER`` for the weights, or the name of an optimizer state such as ``exp_avg``. If ``is_recorded``, the
        files are read with ``SavedEngine.recorded``, otherwise with ``copy``.
        """
        owner = self.place(name).name
        # AutoTP may slice a parameter for one ``autotp_size`` and leave it whole for another.
        before, after = self.place(owner).tensor_dim, self._slices[owner][0].tensor_dim
        parts = self._parts[:1] if before is None else self._parts
        slices = [self._read(part, owner, key, is_recorded) for part in parts]
        whole = slices[0] if before is None else torch.cat(slices, before)
        if after is None:
            return whole.reshape(-1)
        sizes = [place.shape[after] for place in self._slices[owner]]
        return whole.narrow(after, sum(sizes[: self._part]), sizes[self._part]).reshape(-1)

    @staticmethod
    def _read(part: SavedEngine, name: str, key: str, is_recorded: bool) -> torch.Tensor:
        if not is_recorded:
            return part.full(name, key)
        shape = part.place(name).shape
        pieces = list(part.recorded(name, key, 0, math.prod(shape)))
        return torch.cat(pieces).reshape(shape) if pieces else torch.empty(shape)


def folder_in(root: str | pathlib.Path, engine_idx: int) -> str:
    """Return the folder name (DeepSpeed tag) of an engine in the checkpoint ``root``."""
    path = pathlib.Path(root)
    return engine_folder((found.relative_to(path).as_posix() for found in path.glob("*/*")), engine_idx)


def read_rank_state(root: str | pathlib.Path, rank: int, *, trusts_code: bool = False) -> dict[str, Any]:
    """Return the content of a rank's file ``dstrial_rank<r>.pt`` in a checkpoint.

    Tensors are memory-mapped. If ``trusts_code``, classes outside ``safe_load.LISTED`` may be loaded, which can run code.

    Raises:
        CheckpointDamagedError: the file is missing or cannot be read.
        CheckpointError: a class of the trial cannot be imported.
        UntrustedCheckpointError: the file contains unlisted classes, and ``trusts_code`` is False.
    """
    path = pathlib.Path(root) / rank_state_name(rank)
    try:
        return load_mapped(path, holds=f"the state of rank {rank}", trusts_code=trusts_code)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds objects of the trial's own classes, which cannot be imported here ({error}); expected the model "
            "definition on the import path. Set PYTHONPATH to its directory."
        ) from error


def optimizer_summary(saved: SavedEngine) -> dict[str, Any]:
    """Return a saved optimizer's settings and counters as plain JSON values.

    Returns:
        A dict with these entries.
        ``groups``: distinct settings of parameter groups.
        ``steps``: distinct step counts of parameters, ascending.
        ``state``: keys of optimizer state with a value per element, such as ``exp_avg``.
        ``global_steps``, ``global_samples``, ``skipped_steps``: the engine's counters.
        ``loss_scale``: None unless the engine computes in fp16.
        ``lr_scheduler``: the scheduler's state as plain values; None without a scheduler.
    """
    counters = saved.engine_state()
    scale = saved.loss_scale_state()
    loss_scale = scale.get("cur_scale")
    if saved.layout.precision != "fp16":
        loss_scale = None  # some wrappers save a constant 1
    owned = [name for name in saved.places if saved.place(name).group_idx is not None]
    steps = {float(saved.scalars(name)["step"]) for name in owned if "step" in saved.scalars(name)}
    scheduler = counters["lr_scheduler"]
    # Pipeline stages often have parameter groups with equal settings.
    in_order = sorted(
        owned, key=lambda name: (saved.place(name).group_idx or 0, saved.place(name).model_part)
    )
    groups: list[dict[str, Any]] = []
    for name in in_order:
        settings = plain(saved.group_settings(name))
        if settings is not None and settings not in groups:
            groups.append(settings)
    return {
        "groups": groups,
        "steps": sorted(int(step) if step.is_integer() else step for step in steps),
        "state": saved.state_keys(owned[0]) if owned else [],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "skipped_steps": counters["skipped_steps"],
        "loss_scale": None if loss_scale is None else float(loss_scale),
        "lr_scheduler": plain(scheduler) if isinstance(scheduler, Mapping) else None,
    }


def plain(value: Any) -> Any:
    """Convert a value, also a nested one, to JSON types.

    Tensors of up to 16 elements become (nested lists of) numbers; larger tensors and values of other types become text.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= 16 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
