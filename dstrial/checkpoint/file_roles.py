"""What each file of a checkpoint holds, and which rank wrote it, from the file's name and the layout."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Sequence
from typing import Literal

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import Manifest
from dstrial.errors import CheckpointError

FileKind = Literal["weights", "optimizer", "rank state", "configuration", "code", "other"]
"""``optimizer`` holds the master weights too, wherever DeepSpeed keeps any; ``rank state`` is the trial's own of each rank."""

KINDS: tuple[FileKind, ...] = ("weights", "optimizer", "rank state", "configuration", "code", "other")
"""Every kind, in the order in which people read them."""

_RANK_STATE = re.compile(r"dstrial_rank(\d+)\.pt")
_ENGINE = re.compile(r"model(\d+)/(.+)")
_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_\d+)?-model_states\.pt")


@dataclasses.dataclass(frozen=True, slots=True)
class FileRole:
    """What a file holds.

    Attributes:
        kind: of content.
        engine_idx: whose engine's, 0-based; None for what belongs to no engine.
        writer_rank: the rank that wrote it; None where its name and the layout do not say.
    """

    kind: FileKind
    engine_idx: int | None = None
    writer_rank: int | None = None


def rank_state_name(rank: int) -> str:
    """Return the file name of one rank's trial state."""
    return f"dstrial_rank{rank}.pt"


def layouts_of(manifest: Manifest, root: str | os.PathLike[str]) -> tuple[Layout, ...]:
    """Return every engine's layout.

    Args:
        manifest: of a checkpoint.
        root: its directory, for the message.

    Raises:
        CheckpointError: another release of dstrial wrote it, in another form.
    """
    try:
        return tuple(Layout.from_json(values) for values in manifest.layouts)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {root} describes its layout in another form ({error}); expected that of dstrial "
            f"{importlib.metadata.version('dstrial')}. Use the release that wrote it."
        ) from error


def role_of(path: str, layouts: Sequence[Layout]) -> FileRole:
    """Say what a file holds.

    Args:
        path: relative to the checkpoint, with ``/``.
        layouts: of the checkpoint's engines; without one, writers of engine files are not known.

    Source: file names of DeepSpeed 0.19.8, ``DeepSpeedEngine._get_ckpt_name``, ``_get_zero_ckpt_name``,
        ``PipelineModule.ckpt_layer_path``.
    """
    own = _RANK_STATE.fullmatch(path)
    if own is not None:
        return FileRole("rank state", None, int(own[1]))
    if path == "load_data.json":
        return FileRole("configuration")
    if path.startswith("code/"):
        return FileRole("code")
    of_engine = _ENGINE.fullmatch(path)
    if of_engine is None:
        return FileRole("other")
    engine_idx, name = int(of_engine[1]), of_engine[2]
    layout = layouts[engine_idx] if engine_idx < len(layouts) else None
    partition = _PARTITION.fullmatch(name)
    if partition is not None:
        kind: FileKind = "optimizer" if partition[3] == "optim" else "weights"
        return FileRole(kind, engine_idx, _rank_of(layout, int(partition[2]), int(partition[1])))
    whole = _MODEL.fullmatch(name)
    if whole is not None:
        return FileRole("weights", engine_idx, _rank_of(layout, int(whole[1]), 0))
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return FileRole("weights", engine_idx, _rank_of_layer(layout, layer[1].lstrip("0") or "0"))
    return FileRole("other", engine_idx)


def _rank_of(layout: Layout | None, part: int, replica: int) -> int | None:
    if layout is None or layout.model_parallel_size > 1:
        return None
    return part * layout.data_parallel_size + replica


def _rank_of_layer(layout: Layout | None, layer: str) -> int | None:
    if layout is None:
        return None
    parts = (place.model_part for place in layout.parameters if place.name.partition(".")[0] == layer)
    return next((_rank_of(layout, part, 0) for part in parts), None)
