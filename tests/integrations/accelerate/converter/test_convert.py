"""Convert ``accelerate config`` files to experiments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.cli.app import main
from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.config import load_experiment
from dstrial.errors import ConfigError
from dstrial.integrations.accelerate.convert import Choices, Conversion, convert, experiment_yaml

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.yaml"))
SCRIPT = "from accelerate import Accelerator\n\naccelerator = Accelerator()\n"
CHOICES = Choices("train.py", 4, "converted")


def converted(config: Mapping[str, Any], choices: Choices = CHOICES, **more: Any) -> Conversion:
    return convert(config, choices, label="default_config.yaml", **more)


def of_file(name: str) -> Conversion:
    return converted(yaml.safe_load((Path(__file__).parent / "configs" / f"{name}.yaml").read_text()))


def plugin(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": keys}


def converting(source: Path, directory: Path, *options: str) -> int:
    return main(["convert", "accelerate", str(source), "-o", str(directory), *options])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_convert_file_passes_check(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    given = yaml.safe_load(config.read_text())

    assert converting(config, tmp_path, "--entrypoint", "train.py") == 0
    assert json.loads((tmp_path / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == "auto"
    assert main(["check", str(tmp_path / "experiment.yaml"), str(tmp_path)]) == 0
    capsys.readouterr()

    exit_code = converting(config, tmp_path, "--entrypoint", "train.py", "--micro-batch", "4", "--force")
    printed = capsys.readouterr()
    assert exit_code == 0, printed.err
    checked = load_experiment(tmp_path / "experiment.yaml", tmp_path, require_entrypoint=True)
    assert checked.slots_per_trial == given["num_processes"]
    assert checked.deepspeed_check is not None
    assert checked.deepspeed_check.batch is not None
    assert checked.deepspeed_check.batch.train_micro_batch_size_per_gpu == 4


def test_convert_nvme_offload_keeps_paths() -> None:
    assert of_file("zero3_offload_nvme").deepspeed == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme/optimizer"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme/params"},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }


def test_convert_clipping_accumulation_precision_to_deepspeed_keys() -> None:
    half = of_file("zero2_offload_cpu_fp16").deepspeed
    assert half["gradient_clipping"] == 0.5
    assert half["fp16"] == {"enabled": True, "auto_cast": True}
    assert half["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert of_file("zero1_bf16").deepspeed["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ("zero2_offload_everything", ["deepspeed_config.offload_param_device"]),
        ("zero2_offload_nvme", ["deepspeed_config.offload_optimizer_device"]),
        ("two_machines_pdsh_hostfile", ["deepspeed_config.deepspeed_exclusion_filter", "num_machines"]),
        ("two_machines_slurm_inclusion", ["deepspeed_config.deepspeed_inclusion_filter", "num_machines"]),
        ("dynamo_debug_moe", ["dynamo_config", "deepspeed_config.deepspeed_moe_layer_cls_names"]),
        ("zero3_offload_nvme", []),
    ],
)
def test_convert_names_settings_that_are_left(config: str, left: list[str]) -> None:
    conversion = of_file(config)

    assert [line.split()[0].rstrip(":") for line in conversion.left] == left
    if config == "zero2_offload_nvme":
        assert conversion.deepspeed["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_convert_accelerate_only_keys_to_environment_variables() -> None:
    assert of_file("dynamo_debug_moe").variables == {
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }
    assert of_file("zero3_init_save16").variables["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"


def test_convert_cpu_training_keeps_deepspeed_enabled() -> None:
    variables = of_file("multi_cpu").variables
    assert variables == {"DS_ACCELERATOR": "cpu"}
    assert of_file("multi_cpu").deepspeed["zero_optimization"] == {"stage": 0}


def test_convert_deepspeed_file_overrides_plugin_keys() -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1},
    }
    config = {**plugin(deepspeed_config_file="ds.json", zero_stage=3), "mixed_precision": "bf16"}

    conversion = converted(config, deepspeed_file=content)

    assert conversion.deepspeed == content
    assert conversion.overwrites == {"train_micro_batch_size_per_gpu": 4}
    assert config["deepspeed_config"]["zero_stage"] == 3
    fp8 = {**plugin(deepspeed_config_file="ds.json"), "mixed_precision": "fp8"}
    assert converted(fp8, deepspeed_file={"train_batch_size": 8}).variables == {}


def test_convert_unused_deepspeed_section_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**plugin(deepspeed_config_file="absent.json", zero_stage=3), "distributed_type": "NO"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    assert converting(tmp_path / "config.yaml", tmp_path) == 0

    said = "note: not converted: deepspeed_config: accelerate ignores it under distributed_type NO"
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"] == {"stage": 0}


def test_convert_reports_all_invalid_values() -> None:
    config = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "FSDP",
        "num_processes": "two",
        "mixed_precision": "fp4",
    }
    with pytest.raises(ConfigError) as caught:
        converted(config)
    assert [problem.where.rpartition(" ")[2] for problem in caught.value.problems] == list(config)
    for stage in ("3", None, True, -1):
        with pytest.raises(ConfigError, match=r"zero_stage.*an integer of at least 0"):
            converted(plugin(zero_stage=stage))


def test_convert_fp16_uses_stage1_and_rejects_old_key() -> None:
    config = {"distributed_type": "MULTI_GPU", "num_processes": 2, "fp16": True}
    with pytest.raises(ConfigError, match=r"fp16 is the old key.*Write mixed_precision: fp16"):
        converted(config)
    assert converted({**config, "fp16": False}).deepspeed["zero_optimization"] == {"stage": 0}
    assert converted({**config, "mixed_precision": "fp16"}).deepspeed["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("name", ["1e5", "08", "0o7", "true", "two: words", f"{'long ' * 40}end"])
def test_experiment_yaml_name_round_trips(name: str, tmp_path: Path) -> None:
    text = experiment_yaml(converted(plugin(), Choices(None, 4, name)), "default_config.yaml")
    (tmp_path / "experiment.yaml").write_text(text)

    assert read_yaml(tmp_path / "experiment.yaml", "experiment.yaml").value["name"] == name


def test_convert_replaces_existing_files_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds_config.json").write_text("mine")
    options = ("--entrypoint", "train.py", "--micro-batch", "2")

    assert converting(CONFIGS[-1], tmp_path, *options) == 1
    assert (tmp_path / "ds_config.json").read_text() == "mine"
    assert not (tmp_path / "experiment.yaml").exists()
    assert "is there already; expected a new file" in capsys.readouterr().err
    assert converting(CONFIGS[-1], tmp_path, *options, "--force") == 0
    assert json.loads((tmp_path / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == 2


def test_convert_missing_deepspeed_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config_file.yaml"
    shutil.copy(Path(__file__).parent / "configs" / "config_file.yaml", source)

    assert converting(source, tmp_path) == 1

    assert "'ds_zero2.json', which does not exist" in capsys.readouterr().err


def test_convert_marks_values_to_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert converting(CONFIGS[-1], tmp_path) == 0

    text = (tmp_path / "experiment.yaml").read_text()
    marked = [line.split("#")[0].strip() for line in text.splitlines() if "CHOOSE:" in line]
    assert {
        "entrypoint: python3 -m dstrial.launch train.py",
        "metric: validation_loss",
        "batches: 1000",
        "min_validation_period: {batches: 100}",
    } <= set(marked)
    assert json.loads((tmp_path / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == "auto"
    printed = capsys.readouterr().out.splitlines()
    choices = [line for line in printed if line.startswith("choose: ")]
    assert len(choices) == text.count("CHOOSE:") == 8
    assert choices[0].startswith(
        "choose: experiment.yaml:3: entrypoint: python3 -m dstrial.launch train.py # CHOOSE"
    )
    # Without a script, `dstrial check` cannot tell what replaces "auto".
    assert printed[-1].startswith(
        f"next: name the script in {tmp_path / 'experiment.yaml'}, then `dstrial check"
    )


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("accelerate launch --config_file a.yaml train.py", "Leave 'accelerate' and its options away"),
        ("torchrun --nproc-per-node 2 train.py", "python3 -m dstrial.launch takes its place"),
    ],
)
def test_convert_invalid_entrypoint_writes_nothing(
    entrypoint: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    assert converting(CONFIGS[-1], Path("made"), "--entrypoint", entrypoint) == 1

    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("script", ["train.py", "not_written_yet.py"])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda path: path.stem)
def test_convert_unmet_checks_become_next_steps(
    config: Path, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")  # has nothing that replaces "auto"
    experiment = tmp_path / "experiment.yaml"

    assert converting(config, tmp_path, "--entrypoint", script) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert "does not pass" not in printed.out
    try:
        load_experiment(experiment, tmp_path, require_concrete=False, require_entrypoint=True)
    except ConfigError as error:
        missing = [f"next: {problem}" for problem in error.problems]
    else:
        missing = []
    told = [line for line in printed.out.splitlines() if line.startswith("next: ")]
    assert told[:-1] == missing
