"""Checkpoints of partly trained models: LoRA adapters and frozen parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dstrial.engine.peft_adapter import adapter_of
from dstrial.testing.ranks import run_function

peft = pytest.importorskip("peft")
adapter_trials = pytest.importorskip("adapter_trials")
adapter_program = pytest.importorskip("adapter_program")
pytestmark = pytest.mark.ranks


@pytest.mark.exhaustive("[lora-False]")
@pytest.mark.parametrize("holds_frozen", [False, True])
@pytest.mark.parametrize("kind", adapter_program.MODELS)
def test_partly_trained_model_resumes_and_reshapes_bitwise(
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


@pytest.mark.parametrize("method", ["Vera", "RandLora", "TinyLora", "Delora"])
def test_adapter_keys_with_buffers_match_peft_file(method: str) -> None:
    if not hasattr(peft, f"{method}Config"):
        pytest.skip(f"this release of PEFT has no {method}")
    config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = peft.get_peft_model(adapter_trials.base_model(), config)
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert set(adapter_of(model)["keys"].values()) == expected.keys()


def test_adalora_with_reduced_ranks_is_not_exported(caplog: pytest.LogCaptureFixture) -> None:
    """PEFT truncates the factors of AdaLoRA once their ranks are reduced."""
    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        total_step=6,
        tinit=1,
        tfinal=2,
        init_r=4,
        target_r=2,
    )
    model = peft.get_peft_model(adapter_trials.base_model(), config)
    assert adapter_of(model)["keys"]
    tokens = torch.ones(2, 8, dtype=torch.long)
    for step in range(1, 6):
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.base_model.update_and_allocate(step)
    patterns = dict(model.peft_config["default"].rank_pattern)
    assert patterns
    assert adapter_of(model) == {}
    assert "cannot be exported" in caplog.text
    assert model.peft_config["default"].rank_pattern == patterns
