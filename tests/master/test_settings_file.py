"""Settings file in ``dstrial up``; config values that are refused or reach trials."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from submitting import config, submit

from dstrial.errors import DstrialError
from dstrial.ranks.sockets import free_port
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

POLICIES = [
    {"pattern": "a("},
    {"pattern": "b", "action": {"type": "cancel_retry"}},
    {"pattern": "c", "actions": "exclude_node"},
]


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
