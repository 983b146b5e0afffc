"""List the files of a DeepSpeed checkpoint that a rank writes or reads.

A tag is a folder in the ``save_dir`` of ``save_checkpoint``.
"""

from __future__ import annotations

import dataclasses
import pathlib

from deepspeed import DeepSpeedEngine, PipelineEngine, comm

from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.errors import CheckpointDamagedError, CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFiles:
    """Checkpoint files of one engine that a rank writes and reads.

    Paths are relative to the ``save_dir`` of ``save_checkpoint``.
    """

    written: tuple[str, ...]
    read: tuple[str, ...]


def engine_files(engine: DeepSpeedEngine, tag: str) -> EngineFiles:
    """Return the checkpoint files that this rank writes and reads, in folder ``tag``.

    With tensor or pipeline parallelism, every rank also reads the file of model-parallel rank 0, which has the number of
    model-parallel ranks. Files of experts and of tensors offloaded to NVMe are left out, because it is unknown which
    ranks read them.

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


def latest_tag(load_dir: str | pathlib.Path) -> str | None:
    """Return the tag that the file ``latest`` names; None if the file is missing.

    Raises:
        CheckpointDamagedError: the tag is not a plain folder name. DeepSpeed does not check the tag: ``../../x`` would
            load files outside the checkpoint.

    Source: DeepSpeed 0.19.8 ``DeepSpeedEngine.load_checkpoint``.
    """
    path = pathlib.Path(load_dir) / "latest"
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


def require_written(root: str | pathlib.Path, paths: tuple[str, ...], rank: str) -> None:
    if missing := missing_files(root, paths):
        raise CheckpointError(
            f"checkpoint {root} is without {', '.join(missing)} after DeepSpeed's save_checkpoint on {rank}; expected it to "
            "write them. Check that the directory is writable by every rank."
        )


def describe_rank(engine: DeepSpeedEngine) -> str:
    """Return ``rank 3``, or ``rank 3 (stage 1)`` in a pipeline, for messages."""
    if isinstance(engine, PipelineEngine):
        return f"rank {comm.get_rank()} (stage {engine.stage_id})"
    return f"rank {comm.get_rank()}"
