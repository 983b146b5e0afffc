"""Export a saved engine's weights as one model, in one process on the CPU.

Exported names and shapes are those of the module's ``state_dict``. Values are the optimizer's master weights, converted to the
requested dtype. To limit memory, safetensors files are written in chunks of ``_BUFFER_NUMEL`` elements.

A safetensors file has the header's length (8 bytes, little endian), the header (JSON: name -> type, shape, begin and end
offset), and the bytes of all tensors, in C order and little endian.

Source: format of safetensors 0.4 to 0.6, its README, "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import torch

from dstrial.checkpoint.summary import own_places, tied_names
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine
from dstrial.errors import CheckpointLayoutError

_BUFFER_NUMEL = 4 << 20  # elements that are converted and written at a time

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
"""Name of an element type in a safetensors file -> torch dtype."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}

OnBytes = Callable[[int], None]
"""Callback that receives the number of bytes written since the callback's last call."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one tensor in a file.

    ``dtype`` is safetensors' name of the element type, such as ``F32``, a key of ``DTYPES``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors by element size, largest first, so that each tensor is aligned.

    Tensors with equal element sizes keep their order.
    """
    return sorted(specs, key=lambda spec: -DTYPES[spec.dtype].itemsize)


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a safetensors file: the header's length and the header.

    ``specs`` are the file's tensors in the order in which they will be written; ``metadata`` is the header's ``__metadata__``.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec in specs:
        end = begin + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards_of(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Divide tensors into files of at most ``max_bytes``; return a list per file.

    The order of tensors does not change.

    A tensor larger than ``max_bytes`` gets a file of its own.
    """
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    return shards


class ModelWeights:
    """The weights of a saved engine, merged from the files of all ranks.

    Floating-point tensors are converted to ``dtype``; None keeps the module's dtype. Other tensors are not converted.

    Attributes:
        specs: one entry per tensor to export, in module order, buffers last; tied weights have one entry together.
        aliases: other name of a tied weight -> the weight's name in ``specs``.
        unequal: names of tied parameters whose copies on pipeline stages differ; the first stage's copy is exported.

    Raises:
        CheckpointLayoutError: layers are split over model-parallel ranks, or frozen weights are not in the checkpoint.
    """

    def __init__(self, saved: SavedEngine, dtype: torch.dtype | None) -> None:
        layout = saved.layout
        if layout.model_parallel_size > 1:
            raise CheckpointLayoutError(
                f"the checkpoint's layers are cut over {layout.model_parallel_size} model-parallel ranks; expected whole layers, "
                "for only the model knows along which axis. Put them together with the model's own tools."
            )
        self._saved = saved
        self._dtype = dtype
        self._sources: dict[str, str] = {}  # name of a spec -> the saved parameter's name, if different
        self._buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.unequal: tuple[str, ...] = ()
        self.specs: tuple[TensorSpec, ...] = ()
        self._select(saved)

    def _select(self, saved: SavedEngine) -> None:
        layout = saved.layout
        if layout.frozen_checksums:
            raise CheckpointLayoutError(
                f"the checkpoint holds only what is trained, and not {len(layout.frozen_checksums)} frozen parameters; expected "
                "all weights. Export the adapter (--format adapter), which PEFT loads and merges with its base model."
            )
        self._buffers = saved.buffers()
        self.aliases = tied_names(layout)
        self.unequal = tuple(saved.unequal_copies())
        specs = [
            _spec(place.name, place.shape, getattr(torch, place.dtype), self._dtype)
            for place in own_places(layout)
        ]
        specs += [
            _spec(name, tuple(buffer.shape), buffer.dtype, self._dtype)
            for name, buffer in self._buffers.items()
        ]
        self.specs = tuple(specs)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def pieces(self, spec: TensorSpec) -> Iterator[memoryview]:
        """Yield a tensor's bytes in chunks.

        All chunks use the same memory: copy or write a chunk before you request the next one.
        """
        scratch = torch.empty(min(spec.numel, _BUFFER_NUMEL), dtype=DTYPES[spec.dtype])
        buffer = self._buffers.get(spec.name)
        for begin in range(0, spec.numel, _BUFFER_NUMEL):
            piece = scratch[: min(_BUFFER_NUMEL, spec.numel - begin)]
            if buffer is not None:
                piece.copy_(buffer.detach().reshape(-1)[begin : begin + piece.numel()])
            else:
                self._copy(spec.name, begin, piece)
            yield piece.view(torch.uint8).numpy().data

    def _copy(self, name: str, begin: int, piece: torch.Tensor) -> None:
        self._saved.copy(self._sources.get(name, name), MASTER, begin, piece)


_NOT_MERGED = re.compile(r"\.lora_|trainable_tokens")


class AdapterWeights(ModelWeights):
    """Weights of a PEFT adapter, named as in ``adapter_model.safetensors``.

    Attributes:
        config: content of ``adapter_config.json``.

    Raises:
        CheckpointLayoutError: the checkpoint has no adapter.
    """

    def _select(self, saved: SavedEngine) -> None:
        adapter = _adapter(saved)
        self.config: dict[str, Any] = adapter["config"]
        self._sources = {key: name for name, key in adapter["keys"].items()}
        buffers = saved.buffers()
        self._buffers = {key: buffers[name] for key, name in self._sources.items() if name in buffers}
        specs = []
        for key, name in self._sources.items():
            place = None if key in self._buffers else saved.place(name)
            shape = self._buffers[key].shape if place is None else place.shape
            own = self._buffers[key].dtype if place is None else getattr(torch, place.dtype)
            specs.append(_spec(key, shape, own, self._dtype))
        self.specs = tuple(specs)


class MergedWeights(ModelWeights):
    """Weights of the base model with its LoRA adapter added, under the base's names.

    Raises:
        CheckpointLayoutError: the adapter is missing, or is more than LoRA on linear layers; or base weights are missing.

    Source: PEFT 0.21 ``tuners.lora.layer.Linear.get_delta_weight``.
    """

    def _select(self, saved: SavedEngine) -> None:
        adapter = _adapter(saved)
        super()._select(saved)
        self._deltas: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = {}
        for layer, (scaling, is_transposed, name) in adapter["linear"].items():
            factors = [f"{layer}.lora_{factor}.{name}.weight" for factor in "AB"]
            first, second = (saved.full(factor).float() for factor in factors)
            self._deltas[_merged_name(f"{layer}.base_layer.weight")] = (
                first,
                second * scaling,
                is_transposed,
            )
        plain = {
            f"{layer}.lora_{factor}.{one[2]}.weight"
            for layer, one in adapter["linear"].items()
            for factor in "AB"
        }
        specs = []
        for spec in self.specs:
            if spec.name in plain or ".original_module." in spec.name:
                continue
            if _NOT_MERGED.search(spec.name) or adapter["config"]["peft_type"] != "LORA":
                raise CheckpointLayoutError(
                    f"{spec.name!r} is of an adapter that is more than LoRA on linear layers; expected one that can be added "
                    "here. Export it with --format adapter, and merge it with PEFT's merge_and_unload()."
                )
            name = _merged_name(spec.name)
            specs.append(dataclasses.replace(spec, name=name))
            self._sources[name] = spec.name
        self._buffers = {_merged_name(name): buffer for name, buffer in self._buffers.items()}
        self.specs = (*specs, *self._untie({spec.name: spec for spec in self.specs}))
        if lost := self._deltas.keys() - {spec.name for spec in self.specs}:
            raise CheckpointLayoutError(
                f"{min(lost)!r} has an adapter, but is no weight of the base model; expected one for each adapter. Export it "
                "with --format adapter."
            )

    def _untie(self, saved_specs: Mapping[str, TensorSpec]) -> Iterator[TensorSpec]:
        """Yield an entry for each tied weight that merging makes different from its owner.

        The owner is the weight whose storage the tied weight shares in the checkpoint.
        """
        # LoRA changes one of two tied layers, ``modules_to_save`` replaces one. Names of other tied weights stay in ``aliases``.
        tied, self.aliases = self.aliases, {}
        for alias, owner in tied.items():
            if ".original_module." in alias:
                continue
            name, its_owner = _merged_name(alias), _merged_name(owner)
            if name in self._deltas or its_owner in self._deltas or ".original_module." in owner:
                self._sources[name] = owner
                yield dataclasses.replace(saved_specs[owner], name=name)
            else:
                self.aliases[name] = its_owner

    def _copy(self, name: str, begin: int, piece: torch.Tensor) -> None:
        if name not in self._deltas:
            super()._copy(name, begin, piece)
            return
        first, second, is_transposed = self._deltas[name]
        weight = torch.empty(piece.numel())
        super()._copy(name, begin, weight)
        left, right = (first.T, second.T) if is_transposed else (second, first)
        columns = right.shape[1]
        rows = slice(begin // columns, -(-(begin + piece.numel()) // columns))
        start = begin - rows.start * columns
        delta = (left[rows] @ right).reshape(-1)[start : start + piece.numel()]
        piece.copy_(weight + delta)


def _adapter(saved: SavedEngine) -> Mapping[str, Any]:
    if not saved.layout.adapter:
        raise CheckpointLayoutError(
            "the checkpoint has no adapter of PEFT that can be exported; expected one of a model that peft.get_peft_model has "
            "made, no prompt tuning, and no AdaLoRA whose ranks have been reduced. Export all of its weights: --format "
            "safetensors, torch or hf, without --merged."
        )
    return saved.layout.adapter


def _merged_name(name: str) -> str:
    """Convert a parameter's name in the PEFT model to its name in the base model."""
    own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", own)


def write_safetensors(
    weights: ModelWeights,
    path: pathlib.Path,
    specs: Sequence[TensorSpec] | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Write the tensors ``specs`` (None: all tensors) to a new safetensors file.

    The metadata maps aliases of tied weights to names in the file. ``on_bytes`` is called with the number of bytes written
    since the previous call.

    Raises:
        FileExistsError: ``path`` exists.
    """
    ordered = in_file_order(weights.specs if specs is None else specs)
    names = {spec.name for spec in ordered}
    aliases = {alias: name for alias, name in weights.aliases.items() if name in names}
    with path.open("xb") as file:
        file.write(header_bytes(ordered, {"format": "pt", **aliases}))
        _write_tensors(file, weights, ordered, on_bytes)
        os.fsync(file.fileno())


def write_torch(weights: ModelWeights, path: pathlib.Path, on_bytes: OnBytes | None = None) -> None:
    """Write a new file with a ``state_dict``, in which tied weights share storage.

    The file can be read with ``torch.load``. All tensors are in memory at the same time. ``on_bytes`` is called with the number
    of bytes read since the previous call.

    Raises:
        FileExistsError: ``path`` exists.
    """
    state: dict[str, torch.Tensor] = {}
    for spec in weights.specs:
        whole = bytearray()
        for piece in weights.pieces(spec):
            whole += piece
            if on_bytes is not None:
                on_bytes(len(piece))
        flat = (
            torch.frombuffer(whole, dtype=DTYPES[spec.dtype])
            if whole
            else torch.empty(0, dtype=DTYPES[spec.dtype])
        )
        state[spec.name] = flat.reshape(spec.shape)
    state |= {alias: state[name] for alias, name in weights.aliases.items()}
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_hugging_face(
    weights: ModelWeights,
    directory: pathlib.Path,
    *,
    max_shard_bytes: int,
    files: Sequence[pathlib.Path] = (),
    on_bytes: OnBytes | None = None,
) -> None:
    """Write a new model directory in the format of Transformers' ``save_pretrained``.

    ``directory`` must not exist. If all tensors together exceed ``max_shard_bytes``, they are divided into several files with
    an index. ``files`` are config and tokenizer files to copy into ``directory``.

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


def write_adapter(weights: AdapterWeights, directory: pathlib.Path, on_bytes: OnBytes | None = None) -> None:
    """Write a new directory that ``PeftModel.from_pretrained`` can load.

    ``directory`` must not exist.
    """
    directory.mkdir()
    write_safetensors(weights, directory / "adapter_model.safetensors", on_bytes=on_bytes)
    text = json.dumps(weights.config, indent=2, sort_keys=True) + "\n"
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


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


_CONFIG_NAME = "config.json"

_OTHER_NAMES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def find_model_files(directories: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the config and tokenizer files that are in ``directories``.

    If several directories have a file of the same name, the first directory's file is returned. A ``config.json`` without
    ``model_type`` and ``architectures`` is ignored.
    """
    found: dict[str, pathlib.Path] = {}
    for directory in directories:
        for name in (_CONFIG_NAME, *_OTHER_NAMES):
            path = directory / name
            if path.is_file() and (name != _CONFIG_NAME or _is_model_config(path)):
                found.setdefault(name, path)
    return list(found.values())


def _is_model_config(path: pathlib.Path) -> bool:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and ("model_type" in values or "architectures" in values)
