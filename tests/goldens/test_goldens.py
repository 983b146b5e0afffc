"""Output, schemas, HTTP responses and file formats equal the committed goldens."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version
from record import RECORDERS, committed, differences, recorded

_MARKS = {
    "allocation": [pytest.mark.process, pytest.mark.timeout(400)],
    "answers": [pytest.mark.process],
    "runs": [pytest.mark.ranks, pytest.mark.timeout(600)],
}


# Golden -> first Python version with a different recording, and the reason.
_DIFFERS_FROM = {
    "help": ((3, 13), "argparse of Python 3.13 writes options otherwise"),
    "search": ((3, 12), "sum() of Python 3.12 rounds once, so that last digits differ"),
}

# The release that wrote the goldens; torch.save of other releases writes files of other sizes.
_TORCH_OF_THE_GOLDEN = (2, 13)


def _without_sizes(files: Mapping[str, str]) -> dict[str, str]:
    return {name: re.sub(r'"bytes": \d+', '"bytes": <size>', text) for name, text in files.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, [])) for name in RECORDERS])
def test_recording_equals_golden(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "DS_ACCELERATOR" not in os.environ:  # unset, DeepSpeed prints a warning into the help texts
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    version, why = _DIFFERS_FROM.get(name, ((4,), ""))
    if sys.version_info >= version:
        pytest.skip(f"{why}; the golden is that of the releases before it")
    golden, now = committed(name), recorded(name, tmp_path)
    if name == "runs" and Version(importlib.metadata.version("torch")).release[:2] != _TORCH_OF_THE_GOLDEN:
        golden, now = _without_sizes(golden), _without_sizes(now)
    difference = differences(golden, now, name)

    assert not difference, (
        f"{difference}\n\nIf this change is meant: python tests/goldens/record.py --update {name}"
    )
