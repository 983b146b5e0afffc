"""Lay out a Hugging Face model directory: safetensors, config, tokenizer. Pure.

A safetensors file has the header's length (8 bytes, little endian), the header (JSON: name -> type, shape, begin and end
offset), and the bytes of all tensors, in C order and little endian. So a file can be written tensor by tensor.

Source: format of safetensors 0.4 to 0.6, its README, "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

CONFIG_NAME = "config.json"

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
    """Return config and tokenizer files; for each name, the first directory wins.

    A ``config.json`` counts only if it names a model's type or class.
    """
    found: dict[str, pathlib.Path] = {}
    for directory in directories:
        for name in (CONFIG_NAME, *_OTHER_NAMES):
            path = directory / name
            if path.is_file() and (name != CONFIG_NAME or _is_model_config(path)):
                found.setdefault(name, path)
    return list(found.values())


def _is_model_config(path: pathlib.Path) -> bool:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and ("model_type" in values or "architectures" in values)


ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
"""Name of an element type -> bytes of one element."""

_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type, shape of a tensor in a file; ``dtype`` is a key of ``ITEM_BYTES``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors by element size, largest first, so that each is aligned; stable."""
    return sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of length and header; the tensors' bytes follow in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec in specs:
        end = begin + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def shards_of(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Divide tensors into files of ``max_bytes``; a larger tensor has its own file."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    return shards
