"""Find what a Hugging Face model directory has besides its weights: config and tokenizer files; pure."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

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
    """Return the config and tokenizer files of the first directories that have them.

    Args:
        directories: looked through in this order, not below them; those that do not exist have none.

    Returns:
        At most one file of each name. A ``config.json`` counts only if it names a model's type or class.
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
