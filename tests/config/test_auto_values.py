"""Values ``"auto"`` in DeepSpeed configs of HF Trainer and Accelerate scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrial.config.deepspeed_rules.check import explain
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.experiment_config.entrypoint import find_script
from dstrial.errors import ConfigError

EXPERIMENT = """\
name: test
entrypoint: python3 -m dstrial.launch train.py {arguments}
hyperparameters: {{deepspeed_config: ds.json}}
searcher: {{name: single, metric: loss, max_length: {{batches: 10}}}}
resources: {{slots_per_trial: 2}}
"""
BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
FOR_BOTH = {
    **BATCH,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
TRAINER = "from transformers import Trainer\n"
ACCELERATE = "from accelerate import Accelerator\n"

Load = Callable[..., ExperimentConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(
        config: dict[str, Any], script: str, arguments: str = "", files: dict[str, str] | None = None
    ) -> ExperimentConfig:
        for name, text in {"train.py": script, **(files or {})}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "exp.yaml").write_text(EXPERIMENT.format(arguments=arguments))
        (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
        return load_experiment(tmp_path / "exp.yaml", tmp_path)

    return loaded


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TRAINER, "trainer"),
        ("import transformers\nclass Mine(transformers.Trainer): ...\n", "trainer"),
        ("import transformers as hf\nhf.Seq2SeqTrainer()\n", "trainer"),
        ("from transformers import HfArgumentParser as Parser\n", "trainer"),
        ("def main():\n    from transformers import TrainingArguments\n", "trainer"),
        ("from trl import SFTTrainer\n", "trainer"),
        (ACCELERATE + TRAINER, "trainer"),
        (ACCELERATE, "accelerate"),
        ("import accelerate\naccelerate.Accelerator()\n", "accelerate"),
        ("from accelerate.accelerator import Accelerator\n", "accelerate"),
        ("from transformers import AutoModel\n", None),
        ("from mine import Trainer\n", None),
        ("# from transformers import Trainer\n", None),
        ("this is no Python\n", None),
        # Modules that the script imports are searched too, but not their imports.
        ({"train.py": "import training\n", "training.py": TRAINER}, "trainer"),
        ({"train.py": "from parts import training\n", "parts/training.py": TRAINER}, "trainer"),
        ({"train.py": "from parts.training import main\n", "parts/training.py": ACCELERATE}, "accelerate"),
        (
            {"train.py": "import training\n", "training.py": "import deeper\n", "deeper.py": TRAINER},
            None,
        ),
    ],
)
def test_library_is_detected_from_script_imports(
    tmp_path: Path, source: str | dict[str, str], expected: str | None
) -> None:
    for name, text in ({"train.py": source} if isinstance(source, str) else source).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    found = find_script(["python3", "train.py"], tmp_path)

    assert found is not None
    assert found.library == expected


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m dstrial.launch train.py --seed 1",
        "python3 -m dstrial.launch -- python3 train.py --seed 1",
        "python3 -m determined.launch.torch_distributed --trial python3 train.py --seed 1",
        "python3 -m dstrial.launch -m train --seed 1",
    ],
)
def test_find_script_skips_launcher_arguments(tmp_path: Path, entrypoint: str) -> None:
    (tmp_path / "train.py").write_text(TRAINER)

    found = find_script(entrypoint.split(), tmp_path)

    assert found is not None
    assert (found.path, found.arguments.words) == (tmp_path / "train.py", ("--seed", "1"))


def test_trainer_fills_in_auto_from_arguments(load: Load) -> None:
    config = {
        **FOR_BOTH,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }

    loaded = load(config, TRAINER, "--per_device_train_batch_size 4 --learning-rate=0.1 --bf16")

    assert not [warning for warning in loaded.warnings if "auto" in warning]
    assert loaded.deepspeed is not None
    assert loaded.deepspeed_check is not None
    assert loaded.deepspeed_check.batch is not None
    assert loaded.deepspeed_check.batch.train_batch_size == 4 * 2
    rows = {row.key: row for row in explain(loaded.deepspeed, loaded.deepspeed_check)}
    assert rows["gradient_clipping"].value == '"auto"'
    assert rows["gradient_clipping"].origin.startswith("Hugging Face's Trainer fills it in")


def test_given_batch_is_solved_with_trainer_arguments(load: Load) -> None:
    loaded = load({**FOR_BOTH, "train_batch_size": 32}, TRAINER, "--per_device_train_batch_size 4")
    assert loaded.deepspeed_check is not None
    assert loaded.deepspeed_check.batch is not None
    assert loaded.deepspeed_check.batch.gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match=r"ds\.json:2: train_batch_size is 33"):
        load({**FOR_BOTH, "train_batch_size": 33}, TRAINER)


def test_accelerate_fills_in_auto_from_script(load: Load) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}

    loaded = load({**FOR_BOTH, "optimizer": optimizer}, ACCELERATE)

    assert loaded.deepspeed_check is not None
    assert loaded.deepspeed_check.batch is None


@pytest.mark.parametrize(
    ("script", "more", "problem"),
    [
        (TRAINER, {"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}, "overlap_comm"),
        (TRAINER, {"prescale_gradients": "auto"}, "prescale_gradients"),
        (ACCELERATE, {"optimizer": {"type": "AdamW", "params": {"betas": "auto"}}}, "betas"),
    ],
)
def test_auto_left_unfilled_is_problem(load: Load, script: str, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf'{problem} is "auto".*does not fill (it )?in') as caught:
        load({**FOR_BOTH, **more}, script)

    assert len(caught.value.problems) == 1


def test_auto_in_unrecognised_script_warns_or_fails(load: Load) -> None:
    warnings = load({**FOR_BOTH, "train_micro_batch_size_per_gpu": 4}, "print('a script')\n").warnings
    told = 'gradient_clipping is "auto", which only another tool (Hugging Face Trainer) can fill in'
    assert told in "\n".join(warnings)
    with pytest.raises(ConfigError, match='"auto" is filled in only for an entrypoint whose script'):
        load(BATCH, "print('neither')\n")
