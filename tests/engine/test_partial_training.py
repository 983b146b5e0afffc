"""Checkpoints of models of which only a part is trained: LoRA adapters, frozen parts; with and without the frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.testing.ranks import run_function

pytest.importorskip("peft")
adapter_program = pytest.importorskip("adapter_program")
pytestmark = pytest.mark.ranks


@pytest.mark.exhaustive("[lora-False]")
@pytest.mark.parametrize("holds_frozen", [False, True])
@pytest.mark.parametrize("kind", adapter_program.MODELS)
def test_partly_trained_model_resumes_and_reshapes_to_the_bit(
    tmp_path: Path, kind: str, holds_frozen: bool
) -> None:
    on_two = run_function(
        adapter_program.train_and_reload, 2, str(tmp_path), kind, holds_frozen, deadline_s=300
    )[0].value
    refusals = {key: on_two.pop(key) for key in list(on_two) if key.endswith("other base")}
    assert all(on_two.values()), on_two
    assert len(on_two) == 12
    for refusal in refusals.values():
        assert ("the checkpoint holds no frozen parameters" in refusal) is not holds_frozen, refusal

    on_one = run_function(adapter_program.load_on_one_rank, 1, str(tmp_path), kind, deadline_s=300)[0].value
    assert all(on_one.values()), on_one
