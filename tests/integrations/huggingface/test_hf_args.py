"""``get_hf_args_with_overwrites``: new arguments and the effective config."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import determined as det
import pytest
from sample_layouts import PLAIN_LAYOUT

from dstrial import dsat
from dstrial.checkpoint.manifest import Manifest, write_manifest
from dstrial.errors import ConfigError
from dstrial.integrations.huggingface.hf_args import effective_directory
from dstrial.resume.metadata import EngineRecord, run_metadata

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a DeepSpeed config; the environment is that of rank 0 of 2."""
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.setenv("DSTRIAL_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def test_hf_args_without_deepspeed_config_unchanged() -> None:
    given = ["--learning_rate", "1"]

    returned = dsat.get_hf_args_with_overwrites(given, {"learning_rate": 2, "overwrite_deepspeed_args": {}})

    assert returned == given
    assert returned is not given


def test_hf_args_point_to_effective_config_copy(directory: Path) -> None:
    before = (directory / "ds_config.json").read_bytes()
    given = ["--output_dir", "out", "--deepspeed", "ds_config.json"]
    hparams = {
        "deepspeed_config": "ds_config.json",
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 3},
    }

    returned = dsat.get_hf_args_with_overwrites(given, hparams)

    path = Path(returned[3])
    assert path.parent == directory / "run" / "deepspeed_config"
    assert json.loads(path.read_text())["train_batch_size"] == 4 * 3 * 2
    assert returned[4:] == ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3"]
    assert given == ["--output_dir", "out", "--deepspeed", "ds_config.json"]
    assert (directory / "ds_config.json").read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("is_measured", "num_steps"), [(True, "1000"), (False, "40")])
def test_hf_args_measuring_trial_uses_search_length(
    directory: Path, is_measured: bool, num_steps: str
) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 40}}
    hparams = {
        "deepspeed_config": "ds_config.json",
        "overwrite_deepspeed_args": {"scheduler": schedule},
        "_use_dsat_mode": is_measured,
        "_dsat": {"num_batches": 1000},
    }

    returned = dsat.get_hf_args_with_overwrites(["--max_steps=40"], hparams)

    assert returned[0] == f"--max_steps={num_steps}"
    effective = json.loads(Path(returned[-1]).read_text())
    assert effective["scheduler"]["params"]["total_num_steps"] == ("auto" if is_measured else 40)


def test_hf_args_overwrites_apply_to_config_in_arguments(directory: Path) -> None:
    returned = dsat.get_hf_args_with_overwrites(
        ["--deepspeed=ds_config.json"], {"overwrite_deepspeed_args": {"train_micro_batch_size_per_gpu": 2}}
    )

    assert returned[0].startswith(f"--deepspeed={directory}")
    assert returned[1:3] == ["--per_device_train_batch_size", "2"]


def test_hf_args_batch_overwrite_without_config_sets_flags() -> None:
    kept = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    given = ["--per_device_train_batch_size=4", "--seed", "1"]

    returned = dsat.get_hf_args_with_overwrites(given, {"overwrite_deepspeed_args": kept})

    assert returned == [
        "--per_device_train_batch_size=2", "--seed", "1", "--gradient_accumulation_steps", "4"
    ]  # fmt: skip


def test_hf_args_contradictions_warn_once_on_rank_0(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--per_device_train_batch_size", "9", "--max_grad_norm", "2"]
    hparams = {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {"gradient_clipping": 1}}
    with caplog.at_level(logging.WARNING, logger="dstrial.dsat"):
        dsat.get_hf_args_with_overwrites(arguments, hparams)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "1")
        dsat.get_hf_args_with_overwrites(arguments, hparams)

    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("contradictions between arguments and DeepSpeed config:\n")
    assert (
        "ds_config.json:1: train_micro_batch_size_per_gpu is 4 and --per_device_train_batch_size is 9" in text
    )
    assert "overwrite_deepspeed_args: gradient_clipping is 1 and --max_grad_norm is 2" in text


def test_hf_args_missing_config_is_rejected(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json does not exist"):
        dsat.get_hf_args_with_overwrites([], {"deepspeed_config": "absent.json"})
    with pytest.raises(ConfigError, match="given without deepspeed_config"):
        dsat.get_hf_args_with_overwrites([], {"overwrite_deepspeed_args": {"gradient_clipping": 1}})


def test_effective_directory_is_private_to_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    directory = effective_directory({})

    assert directory == tmp_path / "cache" / "dstrial" / "deepspeed_config"
    assert not (tmp_path / "tmp").exists()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (
        effective_directory({"DSTRIAL_EXPERIMENT": str(tmp_path / "job" / "experiment.json")})
        == tmp_path / "job"
    )


def checkpoint_of_one_rank(directory: Path, trial_id: int) -> Path:
    """Write the metadata of a checkpoint of a one-rank run with batch size 4 x 2."""
    layout = dataclasses.replace(
        PLAIN_LAYOUT,
        world_size=1,
        data_parallel_size=1,
        train_batch_size=8,
        micro_batch_size=4,
        micro_batches_per_batch=2,
    ).to_json()
    given = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    checkpoint = directory / "checkpoints" / "c1"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, Manifest.build(steps_completed=10, layouts=[layout], files={}))
    engine = EngineRecord.from_layout(layout, {"given": given})
    (checkpoint / "metadata.json").write_text(json.dumps(run_metadata([engine], trial_id)))
    return checkpoint


ON_TWO_RANKS = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
BEGAN_WITH = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]


def test_hf_args_local_resume_keeps_checkpoint_batch(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRIAL_RESUME", str(checkpoint_of_one_rank(directory, trial_id=0)))

    returned = dsat.get_hf_args_with_overwrites(BEGAN_WITH, {"deepspeed_config": "ds_config.json"})

    assert returned[:4] == ON_TWO_RANKS
    assert json.loads(Path(returned[5]).read_text())["train_batch_size"] == 8


@pytest.mark.parametrize(("trial_id", "expected"), [(7, ON_TWO_RANKS), (8, BEGAN_WITH)])
def test_hf_args_cluster_trial_keeps_own_checkpoint_batch(
    directory: Path, monkeypatch: pytest.MonkeyPatch, trial_id: int, expected: list[str]
) -> None:
    monkeypatch.delenv("DSTRIAL_RUN_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    checkpoint = checkpoint_of_one_rank(directory, trial_id=7)
    storage = {"type": "directory", "container_path": str(checkpoint.parent)}
    trial = SimpleNamespace(trial_id=trial_id, _config={"checkpoint_storage": storage})
    info = SimpleNamespace(task_type="TRIAL", container_slot_counts=[2], latest_checkpoint="c1", trial=trial)
    monkeypatch.setattr(det, "get_cluster_info", lambda: info)

    returned = dsat.get_hf_args_with_overwrites(BEGAN_WITH, {"deepspeed_config": "ds_config.json"})

    assert returned[:4] == expected
