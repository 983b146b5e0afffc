"""Parsing and validation of the master's settings file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.cli.app import build_parser
from dstrial.errors import ConfigError
from dstrial.master.daemon import BACKENDS
from dstrial.master.settings import MasterSettings


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "master.yaml"
    path.write_text(text)
    return path


def test_defaults(tmp_path: Path) -> None:
    settings = MasterSettings.load()

    assert settings.launch_error
    assert settings.pool_name == "default"
    defaults = settings.defaults(tmp_path)
    assert defaults.checkpoint_storage["host_path"] == str(tmp_path / "checkpoints")


def test_settings_file_values_are_applied(tmp_path: Path) -> None:
    text = """
port: 9090
launch_error: false
log: {level: warn}
checkpoint_storage: {type: shared_fs, host_path: /data, save_trial_latest: 5}
resource_pools: [{pool_name: mine}]
task_container_defaults: {environment_variables: [A=1], startup_hook: "echo hi"}
retention_policy: {log_retention_days: 30}
"""
    settings = MasterSettings.load(written(tmp_path, text))

    assert (settings.port, settings.launch_error, settings.log_level) == (9090, False, "warning")
    assert settings.pool_name == "mine"
    assert settings.environment_variables == ("A=1",)
    assert settings.startup_hook == "echo hi"
    assert settings.log_retention_days == 30
    assert settings.as_config()["checkpoint_storage"]["host_path"] == "/data"
    assert settings.defaults(tmp_path).checkpoint_storage["save_trial_latest"] == 5


@pytest.mark.parametrize(("hook", "runs"), [("startup_hook: pool", "pool"), ("", "master")])
def test_pool_defaults_override_master_defaults(tmp_path: Path, hook: str, runs: str) -> None:
    text = f"""
task_container_defaults: {{environment_variables: [A=1], startup_hook: master}}
resource_pools:
- pool_name: mine
  description: of a team
  task_container_defaults: {{environment_variables: [A=2], {hook}}}
"""
    settings = MasterSettings.load(written(tmp_path, text))

    assert (settings.environment_variables, settings.startup_hook) == (("A=1", "A=2"), runs)
    wrong = (
        "resource_pools: [{pool_name: a, task_container_defaults: {environment_variables: [B], image: x}}]\n"
    )
    with pytest.raises(ConfigError) as raised:
        MasterSettings.load(written(tmp_path, wrong))
    for part in ("environment_variables[0] is", "image is not a key"):
        assert f"resource_pools[0].task_container_defaults.{part}" in str(raised.value)


def test_every_problem_is_reported_with_line(tmp_path: Path) -> None:
    text = "prot: 1\nlog: {level: loud}\ncheckpoint_storage: {host_path: data}\nresource_pools: [{name: x}, {}]\n"

    with pytest.raises(ConfigError) as raised:
        MasterSettings.load(written(tmp_path, text))

    message = str(raised.value)
    assert "master.yaml:1: prot is not a key of the embedded master's settings" in message
    assert "Write port instead" in message
    for part in ("log.level", "absolute path", "one pool", "pool_name"):
        assert part in message


def test_hostile_settings_file_raises_config_error(tmp_path: Path) -> None:
    for text in ("port: &a [*a]\n", "[" * 20_000, "log: " + "1" * 5000, "x" * 2**21):
        with pytest.raises(ConfigError, match=r"master\.yaml"):
            MasterSettings.load(written(tmp_path, text))


def test_token_lifespans_and_webhook_settings_are_validated(tmp_path: Path) -> None:
    path = tmp_path / "master.yaml"
    path.write_text(
        "security: {token: {default_lifespan_days: 9, max_lifespan_days: 7}}\n"
        "webhooks: {signing_key: short, base_url: 'ftp://x'}\n"
    )
    with pytest.raises(ConfigError) as caught:
        MasterSettings.load(path)
    assert len(caught.value.problems) == 3
    for word in ("default_lifespan_days is 9", "signing_key is 5 characters long", 'base_url is "ftp://x"'):
        assert word in str(caught.value), word
    assert "short" not in str(caught.value)

    path.write_text(
        "security: {token: {max_lifespan_days: 60}}\n"
        "webhooks: {signing_key: a long secret, base_url: 'http://h/'}\n"
    )
    settings = MasterSettings.load(path)
    assert (settings.token_default_days, settings.token_max_days) == (30, 60)
    assert (settings.signing_key, settings.base_url) == ("a long secret", "http://h")
    assert "a long secret" not in str(settings.as_config())


def test_slurm_is_selected_by_either_key(tmp_path: Path) -> None:
    ours = MasterSettings.load(
        written(tmp_path, "backend: slurm\nslurm: {sbatch_args: [--partition=gpu], gpu_type: a100}")
    )
    theirs = MasterSettings.load(written(tmp_path, "resource_manager: {type: slurm}"))

    assert (ours.backend, theirs.backend) == ("slurm", "slurm")
    assert ours.slurm == {"sbatch_args": ["--partition=gpu"], "gpu_type": "a100"}
    assert ours.as_config()["resource_manager"]["type"] == "slurm"
    assert MasterSettings.load().backend == "agent"


def test_settings_contradicting_slurm_are_rejected(tmp_path: Path) -> None:
    text = "backend: agent\nresource_manager: {type: slurm}\nslurm: {sbatch_args: [gpu]}"
    with pytest.raises(ConfigError) as caught:
        MasterSettings.load(written(tmp_path, text))
    assert [problem.where.partition(": ")[2] for problem in caught.value.problems] == [
        "backend",
        "slurm.sbatch_args",
    ]
    with pytest.raises(ConfigError, match="hostfile is given beside backend: slurm"):
        MasterSettings.load(written(tmp_path, "backend: slurm\nhostfile: hosts"))


def test_ray_accepts_address_but_no_hostfile(tmp_path: Path) -> None:
    found = MasterSettings.load(written(tmp_path, 'backend: ray\nray: {address: "10.0.0.11:6379"}'))
    assert (found.backend, found.ray_address) == ("ray", "10.0.0.11:6379")
    assert found.as_config()["ray"] == {"address": "10.0.0.11:6379"}
    assert MasterSettings.load(written(tmp_path, "backend: ray")).ray_address == "auto"
    with pytest.raises(ConfigError, match="hostfile is given beside backend: ray"):
        MasterSettings.load(written(tmp_path, "backend: ray\nhostfile: hosts"))


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_are_choices_of_settings_and_up(name: str, tmp_path: Path) -> None:
    assert MasterSettings.load(written(tmp_path, f"backend: {name}")).backend == name
    assert build_parser("up").parse_args(["up", "--backend", name]).backend == name
