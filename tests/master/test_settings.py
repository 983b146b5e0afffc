"""The master's settings file: parsing, problems, and its effect on a master."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from submitting import config, submit

from dstrial.cli.app import build_parser
from dstrial.errors import ConfigError, DstrialError
from dstrial.master.daemon import BACKENDS
from dstrial.master.settings import MasterSettings
from dstrial.ranks.sockets import free_port
from dstrial.testing.master import MasterForTest, master_for_test


def loaded(tmp_path: Path, text: str) -> MasterSettings:
    path = tmp_path / "master.yaml"
    path.write_text(text)
    return MasterSettings.load(path)


def test_defaults(tmp_path: Path) -> None:
    settings = MasterSettings.load()

    assert settings.launch_error
    assert (settings.pool_name, settings.backend) == ("default", "agent")
    assert settings.defaults(tmp_path).checkpoint_storage["host_path"] == str(tmp_path / "checkpoints")


def test_settings_file_values_are_applied(tmp_path: Path) -> None:
    text = """
port: 9090
launch_error: false
log: {level: warn}
checkpoint_storage: {type: shared_fs, host_path: /data, save_trial_latest: 5}
resource_manager: {default_compute_resource_pool: mine}
task_container_defaults: {environment_variables: [A=1], startup_hook: "echo hi"}
retention_policy: {log_retention_days: 30}
webhooks: {base_url: 'http://h/'}
"""
    settings = loaded(tmp_path, text)

    assert (settings.port, settings.launch_error, settings.log_level) == (9090, False, "warning")
    assert (settings.pool_name, settings.base_url) == ("mine", "http://h")
    assert (settings.environment_variables, settings.startup_hook) == (("A=1",), "echo hi")
    assert settings.log_retention_days == 30
    assert settings.as_config()["checkpoint_storage"]["host_path"] == "/data"
    assert settings.defaults(tmp_path).checkpoint_storage["save_trial_latest"] == 5


def test_every_problem_is_reported_with_line(tmp_path: Path) -> None:
    text = "prot: 1\nlog: {level: loud}\ncheckpoint_storage: {host_path: data}\nwebhooks: {base_url: 'ftp://x'}\n"

    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, text)

    message = str(raised.value)
    assert "master.yaml:1: prot is not a key of the embedded master's settings" in message
    assert "Write port instead" in message
    for part in ("log.level", "absolute path", 'base_url is "ftp://x"'):
        assert part in message


@pytest.mark.parametrize("text", ["port: &a [*a]\n", "[" * 20_000, "log: " + "1" * 5000, "x" * 2**21])
def test_hostile_settings_file_raises_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"master\.yaml"):
        loaded(tmp_path, text)


def test_slurm_and_ray_settings_are_applied(tmp_path: Path) -> None:
    slurm = loaded(tmp_path, "backend: slurm\nslurm: {sbatch_args: [--partition=gpu], gpu_type: a100}")
    ray = loaded(tmp_path, 'backend: ray\nray: {address: "10.0.0.11:6379"}')

    assert slurm.slurm == {"sbatch_args": ["--partition=gpu"], "gpu_type": "a100"}
    assert slurm.as_config()["resource_manager"]["type"] == "slurm"
    assert ray.as_config()["ray"] == {"address": "10.0.0.11:6379"}
    assert loaded(tmp_path, "resource_manager: {type: slurm}").backend == "slurm"


def test_settings_contradicting_slurm_are_rejected(tmp_path: Path) -> None:
    text = "backend: agent\nresource_manager: {type: slurm}\nslurm: {sbatch_args: [gpu]}"
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert [problem.where.partition(": ")[2] for problem in caught.value.problems] == [
        "backend",
        "slurm.sbatch_args",
    ]


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_are_choices_of_settings_and_up(name: str, tmp_path: Path) -> None:
    assert loaded(tmp_path, f"backend: {name}").backend == name
    assert build_parser("up").parse_args(["up", "--backend", name]).backend == name
    if name != "agent":
        with pytest.raises(ConfigError, match=f"hostfile is given beside backend: {name}"):
            loaded(tmp_path, f"backend: {name}\nhostfile: hosts")


POLICIES = [
    {"pattern": "a("},
    {"pattern": "b", "action": {"type": "cancel_retry"}},
    {"pattern": "c", "actions": "exclude_node"},
]


@pytest.mark.process
def test_up_reads_settings_file(tmp_path: Path) -> None:
    settings, port = tmp_path / "master.yaml", free_port()
    settings.write_text(yaml.safe_dump({"log": {"level": "error"}}))
    with master_for_test(tmp_path, num_slots=1, options=("--config-file", str(settings))) as master:
        assert "serving at" not in master.state.log_path.read_text()
        assert master.dstrial("down").returncode == 0
        settings.write_text("launch_eror: false\nlog: {levle: info}\n")
        refused = master.dstrial("up", "--config-file", str(settings))
        assert refused.returncode != 0
        assert "launch_error" in refused.stderr
        assert "level" in refused.stderr

        settings.write_text(yaml.safe_dump({"port": port, "launch_error": False, "log": {"level": "info"}}))
        up = master.dstrial("up", "--slots", "1", "--config-file", str(settings))
        assert (up.returncode, master.record.port) == (0, port), up.stdout + up.stderr
        assert "serving at" in master.state.log_path.read_text()
        again = master.dstrial("up", "--config-file", str(settings))
        assert (again.returncode, "already running" in again.stdout) == (0, True)
        assert "--config-file changes nothing" in again.stderr

        # The file sets another port than that of DET_MASTER, so pass the address.
        (tmp_path / "exp.yaml").write_text(yaml.safe_dump(config("true", resources={"slots_per_trial": 3})))
        address = ("-m", f"http://localhost:{port}")
        created = master.det(*address, "e", "create", str(tmp_path / "exp.yaml"))
        assert created.returncode == 0, created.stdout + created.stderr
        assert "slots" in created.stdout + created.stderr
        assert "administrator" in master.det(*address, "master", "config", "show").stderr
        shown = master.client("admin").get("/api/v1/master/config")["config"]
        assert (shown["port"], shown["launch_error"]) == (port, False)


@pytest.mark.process
def test_unsatisfiable_or_ineffective_config_is_refused(shared_master: MasterForTest) -> None:
    good = [{"name": "CUDA OOM", "pattern": None}, {"pattern": "d", "action": "exclude_node"}]
    few = {"slots_per_trial": 2, "max_slots": 1}
    with pytest.raises(DstrialError) as raised:
        submit(shared_master, config("true", resources=few, log_policies=[*POLICIES, *good]))

    text = str(raised.value)
    assert "resources.max_slots is 1; expected at least 2" in text
    assert 'log_policies[0].pattern is "a("; expected a regular expression' in text
    assert "log_policies[1].action is" in text
    assert "log_policies[2].actions" in text
    assert "log_policies[3]" not in text
    assert "log_policies[4]" not in text
    with pytest.raises(DstrialError, match=r"resources\.slots_per_trial is 5; expected at most 4"):
        submit(shared_master, config("true", resources={"slots_per_trial": 5}))
