"""Shortened tracebacks: user frames, counts of other frames, useful causes."""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch

from dstrial.errors import TrialContractError
from dstrial.launch.memory_shortage import is_memory_shortage, memory_advice
from dstrial.launch.tracebacks import ShortTraceback, short_traceback

HEAD = "Traceback (most recent call last):"


def raised(directory: Path, text: str) -> BaseException:
    """Run ``text`` as a file and return the exception it raises."""
    path = directory / "users.py"
    path.write_text(text)
    with pytest.raises(BaseException) as caught:
        runpy.run_path(str(path))
    return caught.value


def short(directory: Path, text: str) -> ShortTraceback:
    """Return the short traceback of ``text``, without frames of pytest and runpy."""
    error = raised(directory, text)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(directory / "users.py"):
        frame = frame.tb_next
    found = short_traceback(error.with_traceback(frame), directory)
    traceback.clear_frames(error.__traceback__)  # frees data loaders and their workers
    return found


def test_short_traceback_keeps_user_frames_and_counts_others(tmp_path: Path) -> None:
    found = short(tmp_path, "import torch\ndef f():\n    torch.nn.Linear(3, 4)(torch.zeros(2, 2))\n\n\nf()\n")
    lines = found.text.splitlines()
    assert lines[0] == HEAD
    assert [line.strip() for line in lines if "File" in line] == [
        'File "users.py", line 6, in <module>',
        'File "users.py", line 3, in f',
    ]
    assert re.fullmatch(r"  \[3 more frames of torch; raised in torch/nn/modules/linear\.py:\d+\]", lines[-2])
    assert lines[-1] == found.summary
    assert found.summary.startswith("RuntimeError: mat1 and mat2")
    assert not found.is_whole


def test_short_traceback_of_user_code_only_is_whole(tmp_path: Path) -> None:
    found = short(tmp_path, "{}['a']\n")
    assert found.is_whole
    assert found.summary == "KeyError: 'a'"
    assert "more frame" not in found.text


@pytest.mark.process
def test_loader_worker_error_is_merged_into_one_traceback(tmp_path: Path) -> None:
    found = short(
        tmp_path,
        "import torch\nclass Records(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, idx): raise KeyError(f'record {idx}')\n"
        "for _ in torch.utils.data.DataLoader(Records(), num_workers=1): pass\n",
    )
    assert found.text.count("Traceback") == 1
    assert 'File "users.py", line 5, in <module>' in found.text
    assert "[in DataLoader worker process 0]" in found.text
    assert found.text.rindex("line 4, in __getitem__") > found.text.index("[in DataLoader")
    assert found.text.endswith("\nKeyError: 'record 0'")
    assert found.summary == "KeyError: 'record 0'"


@pytest.mark.parametrize(
    ("text", "shown", "left_out"),
    [
        pytest.param(
            "try: {}['a']\nexcept KeyError as e: raise RuntimeError('no config') from e\n",
            "KeyError: 'a'",
            "",
            id="a stated cause",
        ),
        pytest.param(
            "try: {}['a']\nexcept KeyError: raise RuntimeError('later')\n",
            "KeyError: 'a'",
            "",
            id="raised in the user's code meanwhile",
        ),
        pytest.param(
            "try: {}['a']\nexcept KeyError: raise RuntimeError('later') from None\n",
            "RuntimeError: later",
            "KeyError: 'a'",
            id="hidden by the user",
        ),
        pytest.param(
            "try: open('/no/such')\nexcept OSError as e: raise ValueError(f'{type(e).__name__}: {e}') from e\n",
            "ValueError: FileNotFoundError:",
            "direct cause",
            id="told in the message already",
        ),
        pytest.param(
            "import json\njson.loads('{')\n",
            "JSONDecodeError: Expecting property name",
            "StopIteration",
            id="a package's own way to its error",
        ),
    ],
)
def test_short_traceback_chains_only_informative_causes(
    text: str, shown: str, left_out: str, tmp_path: Path
) -> None:
    found = short(tmp_path, text).text
    assert shown in found
    if left_out:
        assert left_out not in found


def test_recursion_traceback_is_cut_in_middle(tmp_path: Path) -> None:
    found = short(tmp_path, "def f(): g()\ndef g(): f()\nf()\n")
    assert found.text.count("File ") == 16
    assert "more frames of your code]" in found.text
    assert found.text.splitlines()[-1].startswith("RecursionError")


def test_dstrial_error_without_user_frames_is_message_only(tmp_path: Path) -> None:
    found = short_traceback(TrialContractError("train_batch is x; expected y. Return y."), tmp_path)
    assert found.text == "TrialContractError: train_batch is x; expected y. Return y."


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_exception_group_keeps_members(tmp_path: Path) -> None:
    found = short(tmp_path, "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])\n")
    assert "ValueError: a" in found.text
    assert "KeyError: 'b'" in found.text


def test_long_message_is_cut_in_middle(tmp_path: Path) -> None:
    found = short(tmp_path, "raise ValueError('begin' + 'x' * 50_000_000 + 'end')\n")

    assert not found.is_whole
    for text, limit in ((found.text, 70_000), (found.summary, 2_200)):
        assert len(text) < limit
        assert re.search(r"ValueError: beginx+ \[… 49,9\d\d,\d\d\d bytes are cut …\] x+end\Z", text)


def test_memory_shortage_is_recognized_in_exception_chain() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 50)
    assert is_memory_shortage(of_torch.value)
    outer = ValueError("could not be read")
    outer.__cause__ = MemoryError()
    assert is_memory_shortage(outer)
    assert not is_memory_shortage(ValueError("shape"))
    assert memory_advice(ValueError("shape")) == ""
    assert "of host memory; this machine has" in memory_advice(MemoryError())
