"""Export a saved engine's weights as one model, without ranks or an accelerator.

Names and shapes are those of the module's ``state_dict``. Values are the optimizer's master weights, converted to the
requested dtype. Files are written tensor by tensor through one buffer of ``_BUFFER_NUMEL`` elements, so that memory does not
grow with the model.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from dstrial.checkpoint.model_files import TensorSpec, header_bytes, in_file_order, shards_of
from dstrial.checkpoint.summary import own_places, tied_names
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine
from dstrial.errors import CheckpointLayoutError

_BUFFER_NUMEL = 4 << 20

_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_TYPES = {code: dtype for dtype, code in _CODES.items()}

OnBytes = Callable[[int], None]
"""Callback with the number of bytes written since its last call."""


class ModelWeights:
    """The consolidated weights of a saved engine, read in chunks.

    Floating-point tensors are converted to ``dtype``, by default the module's dtype; others are unchanged.

    Attributes:
        specs: every tensor, each storage once, in module order, buffers last.
        aliases: further name of a tied weight -> its name in ``specs``.
        unequal: parameters whose copies on several pipeline stages differ; the first stage's copy is used.

    Raises:
        CheckpointLayoutError: layers are split over a model-parallel axis in a way that only the model's code defines.
    """

    def __init__(self, saved: SavedEngine, dtype: torch.dtype | None) -> None:
        layout = saved.layout
        if layout.model_parallel_size > 1:
            raise CheckpointLayoutError(
                f"the checkpoint's layers are cut over {layout.model_parallel_size} model-parallel ranks; expected whole layers, "
                "for only the model knows along which axis. Put them together with the model's own tools."
            )
        self._saved = saved
        self._buffers = saved.buffers()
        self.aliases = tied_names(layout)
        self.unequal = tuple(saved.unequal_copies())
        specs = [
            _spec(place.name, place.shape, getattr(torch, place.dtype), dtype) for place in own_places(layout)
        ]
        specs += [
            _spec(name, tuple(buffer.shape), buffer.dtype, dtype) for name, buffer in self._buffers.items()
        ]
        self.specs = tuple(specs)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def pieces(self, spec: TensorSpec) -> Iterator[memoryview]:
        """Yield a tensor's bytes in chunks; a chunk is valid until the next one is read."""
        scratch = torch.empty(min(spec.numel, _BUFFER_NUMEL), dtype=_TYPES[spec.dtype])
        buffer = self._buffers.get(spec.name)
        for begin in range(0, spec.numel, _BUFFER_NUMEL):
            piece = scratch[: min(_BUFFER_NUMEL, spec.numel - begin)]
            if buffer is not None:
                piece.copy_(buffer.detach().reshape(-1)[begin : begin + piece.numel()])
            else:
                self._saved.copy(spec.name, MASTER, begin, piece)
            yield piece.view(torch.uint8).numpy().data


def write_safetensors(
    weights: ModelWeights,
    path: pathlib.Path,
    specs: Sequence[TensorSpec] | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Write a new safetensors file; its metadata has the aliases of tied weights."""
    ordered = in_file_order(weights.specs if specs is None else specs)
    names = {spec.name for spec in ordered}
    aliases = {alias: name for alias, name in weights.aliases.items() if name in names}
    with path.open("xb") as file:
        file.write(header_bytes(ordered, {"format": "pt", **aliases}))
        _write_tensors(file, weights, ordered, on_bytes)
        os.fsync(file.fileno())


def write_torch(weights: ModelWeights, path: pathlib.Path, on_bytes: OnBytes | None = None) -> None:
    """Write a ``state_dict`` for ``torch.load``, in which tied weights share storage.

    torch can only save tensors in memory, so the bytes are first written to a temporary file beside ``path``, which is mapped
    and then removed. It is as large as the result.
    """
    beside = path.with_name(f"{path.name}.mapped")
    ordered = in_file_order(weights.specs)
    try:
        with beside.open("xb+") as file:
            _write_tensors(file, weights, ordered, on_bytes)
            tensors = _mapped(file.fileno(), ordered)
            state = {spec.name: tensors[spec.name] for spec in weights.specs}
            state |= {alias: tensors[name] for alias, name in weights.aliases.items()}
            with path.open("xb") as result:
                torch.save(state, result)
                result.flush()
                os.fsync(result.fileno())
    finally:
        beside.unlink(missing_ok=True)


def write_hugging_face(
    weights: ModelWeights,
    directory: pathlib.Path,
    *,
    max_shard_bytes: int,
    files: Sequence[pathlib.Path] = (),
    on_bytes: OnBytes | None = None,
) -> None:
    """Write a new model directory in the format of Transformers' ``save_pretrained``.

    Tensors of more than ``max_shard_bytes`` are split into several files with an index. ``files`` are config and tokenizer
    files to copy.

    Source: file names and index of Transformers 4, ``PreTrainedModel.save_pretrained``.
    """
    directory.mkdir()
    shards = shards_of(weights.specs, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for idx, shard in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{idx + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(weights, directory / name, shard, on_bytes)
        weight_map |= {spec.name: name for spec in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": weights.num_bytes}, "weight_map": weight_map}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in files:
        shutil.copyfile(file, directory / file.name)


def _write_tensors(
    file: BinaryIO, weights: ModelWeights, specs: Sequence[TensorSpec], on_bytes: OnBytes | None
) -> None:
    for spec in specs:
        for piece in weights.pieces(spec):
            file.write(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    file.flush()


def _spec(name: str, shape: Sequence[int], own: torch.dtype, asked: torch.dtype | None) -> TensorSpec:
    dtype = asked if asked is not None and own.is_floating_point else own
    if dtype not in _CODES:
        raise CheckpointLayoutError(
            f"{name!r} has elements of type {dtype}; expected one that can be exported. Name a type with --dtype."
        )
    return TensorSpec(name, _CODES[dtype], tuple(shape))


def _mapped(descriptor: int, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Map a file of consecutive tensors; each tensor has its own storage."""
    total = sum(spec.num_bytes for spec in specs)
    # Never written, but torch requires writable memory.
    mapped: Any = mmap.mmap(descriptor, total, access=mmap.ACCESS_COPY) if total else b""
    tensors, begin = {}, 0
    for spec in specs:
        dtype = _TYPES[spec.dtype]
        if math.prod(spec.shape):
            flat = torch.from_numpy(np.frombuffer(mapped, np.uint8, spec.num_bytes, begin))
            tensors[spec.name] = flat.view(dtype).reshape(spec.shape)
        else:
            tensors[spec.name] = torch.empty(spec.shape, dtype=dtype)
        begin += spec.num_bytes
    return tensors
