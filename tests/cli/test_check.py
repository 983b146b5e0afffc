import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_start

pytestmark = pytest.mark.process

EXPERIMENT = """\
name: test
entrypoint: model_def:MyTrial
hyperparameters:
  deepspeed_config: ds.json
  overwrite_deepspeed_args:
    zero_optimization: {stage: 2}
searcher: {name: single, metric: loss, max_length: {batches: 10}}
resources: {slots_per_trial: 2}
"""
DEEPSPEED = """\
{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {"stage": 1}
}
"""
FORBIDDEN = ("torch", "deepspeed", "determined")


@pytest.fixture
def context(tmp_path):
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    (tmp_path / "model_def.py").write_text("class MyTrial: ...\n")
    return tmp_path


def check(directory, *arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return warm_start.run(["dstrial.cli", "check", *arguments], env=env, cwd=directory, timeout=120)


def test_valid_config_exits_0_with_batch_equation(context):
    result = check(context, "exp.yaml")

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [
        "ds.json: train_batch_size 32 = train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 x "
        "2 data-parallel replicas",
        "exp.yaml: ok",
    ]
    assert result.stderr == ""


def test_invalid_config_exits_1_with_problem_per_line(context):
    result = check(context, "exp.yaml", ".", "--config", "max_restarts=-1", "--slots", "3")

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "--config: max_restarts is -1; expected an integer of at least 0. Set it to a value in that range.",
        "ds.json:2: train_batch_size is 32 = 4 (train_micro_batch_size_per_gpu) x accumulation steps x 3 (data-parallel "
        "replicas), which no whole number solves; expected a multiple of 12. Set train_batch_size to 24 or 36.",
        "exp.yaml: 2 problems",
    ]


def test_explain_shows_origins_and_all_adds_defaults(context):
    decided = {
        "gradient_accumulation_steps": ["4", "solved"],
        "train_batch_size": ["32", "ds.json:2"],
        "zero_optimization.stage": ["2", "overwrite_deepspeed_args", "(exp.yaml:6)"],
    }
    for options in (["--explain"], ["--explain", "--all"]):
        result = check(context, "exp.yaml", ".", *options)
        rows = {words[0]: words[1:] for line in result.stdout.splitlines() if (words := line.split())}
        assert decided.items() <= rows.items()
        if "--all" in options:
            assert rows["gradient_clipping"] == ["1.0", "DeepSpeed's", "default"]
        else:
            assert "gradient_clipping" not in rows
            assert len(result.stdout.splitlines()) < 17  # without DeepSpeed's hundred defaults
            hidden = r"^and \d{2,} of DeepSpeed's defaults, which --all shows$"
            assert re.search(hidden, result.stdout, re.MULTILINE)


def test_json_output_has_config_origins_and_problems(context):
    good = json.loads(check(context, "exp.yaml", ".", "--json", "--explain").stdout)
    bad = json.loads(check(context, "exp.yaml", ".", "--json", "--config", "max_restarts=-1").stdout)

    assert good["ok"] is True
    assert good["deepspeed"]["deepspeed_config"]["effective"]["zero_optimization"]["stage"] == 2
    assert good["deepspeed"]["deepspeed_config"]["origins"]["train_batch_size"] == "ds.json:2"
    assert bad["ok"] is False
    assert bad["problems"][0]["where"] == "--config: max_restarts"


def test_search_space_is_checked_with_sample(context):
    override = "+hyperparameters.lr={type: log, minval: -5, maxval: -1, base: 10}"
    result = check(context, "exp.yaml", ".", "--config", override)

    assert result.returncode == 0
    assert (
        "warning: --config: hyperparameters.lr is a search space (log); checked with 0.001 only"
        in result.stdout
    )


@pytest.mark.parametrize("arguments", [(), ("--explain",), ("--config", "max_restarts=-1")])
def test_check_imports_no_torch_deepspeed_or_determined(context, arguments):
    program = (
        "import sys; from dstrial.cli.app import main; status = main(sys.argv[1:]); "
        f"loaded = sorted(set({FORBIDDEN!r}) & set(sys.modules)); sys.exit(f'imported {{loaded}}' if loaded else status)"
    )
    command = [sys.executable, "-c", program, "check", "exp.yaml", ".", *arguments]
    result = subprocess.run(command, cwd=context, capture_output=True, text=True)

    assert "imported" not in result.stderr
    assert result.returncode in (0, 1)


def test_check_reports_context_directory_size(context):
    (context / "data").mkdir()
    (context / "data" / "large.bin").touch()
    os.truncate(context / "data" / "large.bin", 40 * 2**20)
    (context / ".venv").mkdir()
    (context / ".venv" / "pyvenv.cfg").touch()

    said = check(context, "exp.yaml", ".")
    found = json.loads(check(context, "exp.yaml", ".", "--json").stdout)

    assert re.search(
        r"^context directory: \d+ files, 40 MiB, most of it data/ \(40 MiB\); without .venv/",
        said.stdout,
        re.M,
    )
    assert (found["context"]["largest"], found["context"]["left_out"]) == ("data/", [".venv/"])
    os.truncate(context / "data" / "large.bin", 96 * 2**20)
    refused = check(context, "exp.yaml", ".")
    assert refused.returncode == 1
    assert "data/ alone 96 MB; expected a context directory of at most 95 MB" in refused.stderr


def test_every_shipped_config_passes_check():
    root = Path(__file__).resolve().parents[2]
    configs = sorted((root / "experiment_configs").glob("*.yaml"))
    assert configs
    for config in configs:
        directories = [d for d in sorted((root / "model_defs").iterdir()) if config.stem.startswith(d.name)]
        result = check(root, str(config), str(directories[-1]))
        assert result.returncode == 0, f"{config}\n{result.stderr}"
        warnings = [line for line in result.stdout.splitlines() if line.startswith("warning")]
        assert all("is a search space" in line for line in warnings), warnings


def test_explain_masks_monitor_api_keys(
    tmp_path: Path, dstrial_command: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 4,
                "train_micro_batch_size_per_gpu": 4,
                "comet": {"enabled": True, "api_key": "hunter2", "project": "mine"},
            }
        )
    )
    (tmp_path / "exp.yaml").write_text(
        "name: a\nentrypoint: python3 train.py\nhyperparameters: {deepspeed_config: ds.json}\n"
        "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n"
    )
    (tmp_path / "train.py").write_text("")
    words = ("check", tmp_path / "exp.yaml", tmp_path, "--explain")

    text, as_json = dstrial_command(*words), dstrial_command(*words, "--json")

    assert text[0] == as_json[0] == 0, text
    assert "hunter2" not in text[1] + as_json[1]
    assert "mine" in text[1]
    assert (
        json.loads(as_json[1])["deepspeed"]["deepspeed_config"]["effective"]["comet"]["api_key"] == "********"
    )
