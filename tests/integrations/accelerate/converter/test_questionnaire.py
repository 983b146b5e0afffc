"""The stored files are what ``accelerate config`` writes when its questionnaire is answered."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from dstrial.integrations.accelerate.convert import Choices, convert

ROOT = Path(__file__).resolve().parents[4]
CONFIGS = Path(__file__).parent / "configs"

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate]"
)


def questionnaire() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "answer_accelerate_config", ROOT / "tools/answer_accelerate_config.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stored_file_has_its_answers() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(questionnaire().ANSWERS)


@needs_accelerate
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="asks the terminal of another process for its mode")
def test_answering_the_questionnaire_makes_the_stored_file(tmp_path: Path) -> None:
    tool = questionnaire()
    name = "two_machines_slurm_inclusion"

    tool.answer(tool.ANSWERS[name], tmp_path / "made.yaml")

    made = yaml.safe_load((tmp_path / "made.yaml").read_text())
    if importlib.metadata.version("accelerate").startswith("1.15."):
        assert made == yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    # Other releases ask other questions; no key that they write is unknown.
    conversion = convert(made, Choices("train.py", 4, name), label="made.yaml")
    assert [key.key for key in conversion.keys if key.status == "unknown"] == []
    assert conversion.slots == 8
