"""Which files of a DeepSpeed checkpoint a rank writes and reads.

Paths are relative to the directory that ``save_checkpoint`` is given; a tag is a folder in it.
"""

from __future__ import annotations

import dataclasses
import pathlib

from deepspeed import DeepSpeedEngine, PipelineEngine, comm

from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.errors import CheckpointDamagedError


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFiles:
    """The engine files that one rank writes, and reads in the same layout."""

    written: tuple[str, ...]
    read: tuple[str, ...]


def engine_files(engine: DeepSpeedEngine, tag: str) -> EngineFiles:
    """Return the files that this rank writes and reads.

    Where the model is cut into model-parallel parts or stages, DeepSpeed reads the first part's file on
    every rank to see how many parts there are. Experts and tensors offloaded to NVMe are not named: they are files of
    the checkpoint like any other, but who reads them is not known.

    Source: ``DeepSpeedEngine._save_checkpoint`` and ``_load_checkpoint``.
    """
    own_model = [] if engine.has_moe_layers else [engines.model_file(engine, tag)]
    written = list(own_model) if engine.save_non_zero_checkpoint else []
    read = [engines.model_file(engine, tag, part="00"), *own_model] if own_model else []
    if engine.zero_optimization() or optimizers.has_file_per_replica(engine.optimizer):
        own = engines.zero_file(engine, tag)
        read.append(own)
        if engine.save_zero_checkpoint:
            written.append(own)
    if isinstance(engine, PipelineEngine):
        layers = engines.layer_files(engine, tag)
        model_part = f"model_{engine.grid.get_slice_parallel_rank():02d}"
        read += [path.replace(model_part, "model_00") for path in layers.values()]
        read += layers.values()
        mine = engines.written_layers(engine)
        written += [path for idx, path in layers.items() if idx in mine]
    return EngineFiles(written=tuple(dict.fromkeys(written)), read=tuple(dict.fromkeys(read)))


def latest_tag(load_dir: str | pathlib.Path, *, is_universal: bool = False) -> str | None:
    """Return the tag that ``latest`` names; None where there is no such file.

    ``is_universal``: universal checkpoints have a file of their own for the tag.

    Raises:
        CheckpointDamagedError: the tag is no folder name: DeepSpeed joins it to the directory unchecked, so ``../../x`` would
            load files that no manifest names.

    Source: DeepSpeed 0.19.8 ``DeepSpeedEngine.load_checkpoint``.
    """
    path = pathlib.Path(load_dir) / ("latest_universal" if is_universal else "latest")
    if not path.is_file():
        return None
    tag = path.read_text(encoding="utf-8", errors="replace").strip()
    if pathlib.PurePosixPath(tag).name != tag or tag in ("", "..") or "\0" in tag:
        raise CheckpointDamagedError(
            f"{path} names {tag[:80]!r}; expected the name of a folder beside it, as DeepSpeed writes it. Use another checkpoint."
        )
    return tag


def missing_files(root: str | pathlib.Path, paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if not (pathlib.Path(root) / path).is_file()]


def describe_rank(engine: DeepSpeedEngine) -> str:
    """Return this rank and its pipeline stage for a message."""
    if isinstance(engine, PipelineEngine):
        return f"rank {comm.get_rank()} (stage {engine.stage_id})"
    return f"rank {comm.get_rank()}"
