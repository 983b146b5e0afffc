"""Determine a checkpoint file's content and writing rank from the file's name."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from dstrial import __version__
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import Manifest
from dstrial.errors import CheckpointDamagedError, CheckpointError

FileKind = Literal["weights", "optimizer", "rank state", "configuration", "code", "other"]
"""Content of a file. ``optimizer``: optimizer states and fp32 master weights. ``rank state``: random states and other state of
one rank's training loop."""

KINDS: tuple[FileKind, ...] = ("weights", "optimizer", "rank state", "configuration", "code", "other")
"""All values of ``FileKind``, in display order."""

_RANK_STATE = re.compile(r"dstrial_rank(\d+)\.pt")
_ENGINE = re.compile(r"(model(\d+)|pytorch_model(?:_(\d+))?|global_step\d+)/(.+)")
_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
# Names of files that transformers.Trainer writes into its directory `checkpoint-<step>`.
_TRAINER = re.compile(r"checkpoint-\d+/([^/]+)")
_TRAINER_RANK = re.compile(r"rng_state(?:_(\d+))?\.pth")
_TRAINER_WEIGHTS = re.compile(r"(?:adapter_)?(?:model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
_TRAINER_OPTIMIZER = frozenset({"optimizer.pt", "scheduler.pt", "scaler.pt"})
_LAYER = re.compile(r"layer_(\d+)(?:-model_\d+)?-model_states\.pt")


@dataclasses.dataclass(frozen=True, slots=True)
class FileRole:
    """A checkpoint file's content, its engine, and the rank that wrote it.

    ``engine_idx`` is None if the file belongs to no engine, ``writer_rank`` is None if the rank is unknown.
    """

    kind: FileKind
    engine_idx: int | None = None
    writer_rank: int | None = None


def rank_state_name(rank: int) -> str:
    return f"dstrial_rank{rank}.pt"


def engine_folder(paths: Iterable[str], engine_idx: int) -> str:
    """Return the folder (DeepSpeed tag) that has an engine's files in a checkpoint.

    ``DeepSpeedTrial.save`` writes engine *i* to ``model<i>``, Accelerate to ``pytorch_model`` or ``pytorch_model_<i>``, the
    Hugging Face Trainer to ``global_step<n>``. The default is ``model<i>``. ``paths`` are the checkpoint's files.

    Source: accelerate 1.15 ``Accelerator.save_state``; transformers 5.23 ``Trainer._save_checkpoint``.
    """
    for path in sorted(paths):
        found = _ENGINE.fullmatch(path)
        if found is not None and _engine_idx(found) == engine_idx:
            return found[1]
    return f"model{engine_idx}"


def _engine_idx(found: re.Match[str]) -> int:
    return int(found[2] or found[3] or 0)


def layouts_of(manifest: Manifest, root: str | os.PathLike[str]) -> tuple[Layout, ...]:
    """Return each engine's layout from a manifest.

    Raises:
        CheckpointError: the layouts are of another release; the message names ``root``.
        CheckpointDamagedError: a layout names a folder outside of the checkpoint.
    """
    try:
        layouts = tuple(Layout.from_json(values) for values in manifest.layouts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {root} describes its layout in another form ({error}); expected that of dstrial "
            f"{__version__}. Use the release that wrote it."
        ) from error
    for layout in layouts:
        folder = pathlib.PurePosixPath(layout.folder)
        if folder.is_absolute() or ".." in folder.parts:
            raise CheckpointDamagedError(
                f"checkpoint {root} has an engine in {layout.folder!r}, outside of the checkpoint; expected a folder of it. Use "
                "another checkpoint."
            )
    return layouts


def role_of(path: str, layouts: Sequence[Layout]) -> FileRole:
    """Return a file's role from its path; without ``layouts``, the writer is unknown.

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
    found = _engine_of(path, layouts)
    if found is None:
        return _role_of_trainer_file(path)
    engine_idx, name = found
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


def _engine_of(path: str, layouts: Sequence[Layout]) -> tuple[int, str] | None:
    for engine_idx, layout in enumerate(layouts):
        if layout.folder and path.startswith(f"{layout.folder}/"):
            return engine_idx, path[len(layout.folder) + 1 :]
    match = _ENGINE.fullmatch(path)
    return None if match is None else (_engine_idx(match), match[4])


def _role_of_trainer_file(path: str) -> FileRole:
    # Source: transformers 5.23, ``Trainer._save_checkpoint`` and ``PreTrainedModel.save_pretrained``.
    match = _TRAINER.fullmatch(path)
    if match is None:
        return FileRole("other")
    name = match[1]
    rank = _TRAINER_RANK.fullmatch(name)
    if rank is not None:
        return FileRole("rank state", None, int(rank[1] or 0))
    if name in _TRAINER_OPTIMIZER:
        return FileRole("optimizer", None, 0)
    if _TRAINER_WEIGHTS.fullmatch(name) is not None:
        return FileRole("weights", None, 0)
    return FileRole("configuration" if name.endswith((".json", ".bin", ".jinja", ".txt")) else "other")


def _rank_of(layout: Layout | None, part: int, replica: int) -> int | None:
    if layout is None or layout.model_parallel_size > 1:
        return None
    return part * layout.data_parallel_size + replica


def _rank_of_layer(layout: Layout | None, layer: str) -> int | None:
    if layout is None:
        return None
    parts = (place.model_part for place in layout.parameters if place.name.partition(".")[0] == layer)
    return next((_rank_of(layout, part, 0) for part in parts), None)
