"""Trials that are forked from a fork server, a process with preloaded modules."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import submitting
import yaml
from chaos import children_of
from submitting import config, log_of, steps_of, submit, trials, wait_until
from waiting import wait_for
from warm_start import SWITCH

from dstrial.fork_server import is_free
from dstrial.harness_paths import WARM_VARIABLE
from dstrial.master.backends.status import shown_servers
from dstrial.master.backends.supervisor import descendants, members_of_session
from dstrial.master.state_directory import process_start_time
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = [pytest.mark.process, pytest.mark.ranks, pytest.mark.timeout(600)]

DEADLINE_S = 240.0
SMALL = Path(__file__).parents[1] / "programs"
# /proc/self/environ is the environment at exec time: in a fork, it is the server's and has no RANK.
PRINT_START_METHOD = """
import pathlib
_variables = pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0")
print("started as", "a new process" if any(one.startswith(b"RANK=") for one in _variables) else "a fork")
"""
HELP_ENTRYPOINT = "python3 -m dstrial.launch --trial train:main --help"
"""Fast entrypoint for which the master starts a fork server, as for any trial class."""
PORTS = ("DTRAIN_SSH_PORT", "INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2")
RECORD_STATE = """
import json, os, pathlib, random, signal, sys
MODULES = {name: getattr(getattr(module, "__spec__", None), "origin", None) for name, module in sys.modules.items()}
os.environ["HF_HOME"] = "/set/by/the/definition"
import determined.constants, huggingface_hub.constants, numpy, torch
GENERATOR = numpy.random.default_rng()
SEEN = {
    "modules": MODULES,
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "path": sys.path,
    "words": [sys.argv, sys.orig_argv],
    "flags": list(sys.flags),
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), len(os.listdir("/proc/self/task"))],
    "cores": sorted(os.sched_getaffinity(0)),
    "handlers": {int(one): str(signal.getsignal(one)).partition(" at ")[0] for one in signal.valid_signals()},
    "draws": [random.random(), numpy.random.rand(), torch.rand(()).item(), torch.initial_seed(), GENERATOR.random()],
    "random": [random.getstate()[0], numpy.random.get_state()[0], torch.random.default_generator.device.type],
    "HF_HOME": huggingface_hub.constants.HF_HOME,
    "RANK": os.environ.get("RANK", "-1"),
    "ports": [getattr(determined.constants, name) for name in %r],
}
NAME = f"{os.environ['DET_TRIAL_ID']}-{os.environ['RANK']}.json"
pathlib.Path("<seen>", NAME).write_text(json.dumps(SEEN))
""" % (PORTS,)  # noqa: UP031  # the code contains braces


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """A master with its own fork server."""
    directory = tmp_path_factory.mktemp("master")
    with master_for_test(directory, num_slots=4, env={SWITCH: "0"}) as running:
        yield running


def start_trial(master: MasterForTest, steps: int = 2, sleep_s: float = 0.0) -> int:
    search = {"name": "single", "metric": "validation_loss", "max_length": {"batches": steps}}
    return submit_small(master, small(searcher=search, hyperparameters={"batch_sleep_s": sleep_s}))


def wait_for_log(master: MasterForTest, experiment_id: int, state: str = "COMPLETED") -> str:
    """Wait until an experiment has the final ``state``; return its log."""
    wait_until(master, experiment_id, state, deadline_s=DEADLINE_S)
    return log_of(master, experiment_id)


def wait_for_server(master: MasterForTest) -> int:
    """Return the fork server's pid once it is ready; the next trial is then forked."""
    if not servers_of(master):
        wait_for_log(master, submit(master, config(HELP_ENTRYPOINT)))
    wait_for(lambda: ready_servers_of(master), "no server", deadline_s=DEADLINE_S)
    (server,) = servers_of(master)
    return server


def start_forked_trial(master: MasterForTest, steps: int, sleep_s: float) -> tuple[int, int]:
    """Start a forked trial; return experiment and trial id after its first report."""
    wait_for_server(master)
    experiment_id = start_trial(master, steps, sleep_s)
    wait_for(lambda: trials(master, experiment_id), "there is no trial", deadline_s=DEADLINE_S)
    (trial,) = trials(master, experiment_id)
    wait_for(lambda: steps_of(master, trial["id"]), "it does not report", deadline_s=DEADLINE_S)
    assert "started as a fork" in log_of(master, experiment_id)
    return experiment_id, trial["id"]


def command_line_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def servers_of(master: MasterForTest) -> list[int]:
    """Return the pids of a master's fork servers."""
    return [
        pid for pid in children_of(master.record.pid) if "dstrial.fork_server.server" in command_line_of(pid)
    ]


def ready_servers_of(master: MasterForTest) -> list[int]:
    return [one.pid for one in shown_servers(master.state.path) if one.state == "ready" and is_alive(one.pid)]


def is_alive(pid: int) -> bool:
    return process_start_time(pid) is not None


def supervisor_of(master: MasterForTest, trial_id: int) -> int:
    """Return the pid of the supervisor of a trial's allocation."""
    for directory in (master.state.path / "allocations").iterdir():
        spec = json.loads((directory / "spec.json").read_text())
        if spec["environment"].get("DET_TRIAL_ID") == str(trial_id):
            return int(json.loads((directory / "supervisor.json").read_text())["pid"])
    raise AssertionError(f"no allocation of trial {trial_id}")


def small(**changes: Any) -> dict[str, Any]:
    """Return the config of a small trial with a DeepSpeed engine."""
    hyperparameters = {
        "deepspeed_config": {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        },
        "num_records": 40,
        "batch_sleep_s": 0.0,
        "dropout": {"type": "double", "minval": 0.1, "maxval": 0.5},
    }
    return {
        "name": "small",
        "entrypoint": "python3 -m dstrial.launch --trial witnessed:DataParallelTrial",
        "hyperparameters": {**hyperparameters, **changes.pop("hyperparameters", {})},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 6}},
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 3},
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": 7},
        **changes,
    }


def submit_small(
    master: MasterForTest,
    given: dict[str, Any],
    first_line: str = "",
    more: Mapping[str, str] = MappingProxyType({}),
) -> int:
    contents = {path.name: path.read_bytes() for path in SMALL.glob("small_*.py")}
    contents |= {name: text.encode() for name, text in more.items()}
    contents["witnessed.py"] = (
        first_line + PRINT_START_METHOD + "from small_trials import DataParallelTrial\n"
    ).encode()
    files = [
        {"path": name, "type": 48, "content": base64.b64encode(data).decode(), "mtime": "0", "mode": 420}
        for name, data in contents.items()
    ]
    message = {"activate": True, "config": yaml.safe_dump(given), "modelDefinition": files}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


def reports_of(master: MasterForTest, experiment_id: int) -> dict[str, list[Any]]:
    """Return the reported metrics of each trial, keyed by its hyperparameters."""
    found = {}
    for trial in trials(master, experiment_id):
        found[json.dumps(trial["hparams"], sort_keys=True)] = [
            (group, report["totalBatches"], key, value)
            for group in ("training", "validation")
            for report in submitting.reports_of(master, trial["id"], group)
            for metrics in report["metrics"].values()  # the key differs between training and validation
            for key, value in sorted((metrics or {}).items())
            if "per_second" not in key
        ]
    return found


@pytest.mark.exhaustive("tests/trainer/test_forked_ranks.py::test_forked_ranks_train_bitwise_equally")
def test_forked_search_trains_like_new_processes(master: MasterForTest) -> None:
    search = {
        "name": "random",
        "metric": "validation_loss",
        "max_length": {"batches": 6},
        "max_trials": 4,
        "max_concurrent_trials": 1,
    }
    cold = submit_small(master, small(searcher=search, data={"dstrial": {"warm": False}}))
    text = wait_for_log(master, cold)
    assert text.count("started as a new process") == 4
    assert not servers_of(master)

    first = wait_for_log(master, submit_small(master, small()))
    assert "started as a new process" in first, "the server is importing still"
    wait_for_server(master)
    warm = submit_small(master, small(searcher=search))
    text = wait_for_log(master, warm)

    assert text.count("started as a fork") == 4
    assert len(servers_of(master)) == 1
    expected = reports_of(master, cold)
    assert len(expected) == 4
    assert all(
        {steps for _, steps, key, _ in one if key == "loss"} == set(range(1, 7)) for one in expected.values()
    )
    assert reports_of(master, warm) == expected

    again = wait_for_log(master, submit_small(master, small(data={"dstrial": {"warm": False}})))
    assert "started as a new process" in again


def test_user_modules_are_never_preimported(master: MasterForTest) -> None:
    wait_for_server(master)
    for word in ("first", "second"):
        first_line = "import helper\nprint('it says', helper.WORD)\n"
        files = {"helper.py": f"WORD = {word!r}\n"}
        text = wait_for_log(master, submit_small(master, small(), first_line, files))
        assert "started as a fork" in text
        assert f"it says {word}" in text


def test_script_runs_in_new_process(master: MasterForTest) -> None:
    """A script may set environment variables before its first import."""
    wait_for_server(master)
    script = "import sys\nBEFORE = 'torch' in sys.modules\n" + PRINT_START_METHOD + "print('torch:', BEFORE)"
    for launch in ("dstrial.launch", "dstrial.launch --slots 1"):
        text = wait_for_log(master, submit(master, config(f"python3 -m {launch} train.py"), script))
        assert "started as a new process" in text
        assert "torch: False" in text


def test_user_module_shadowing_installed_module_is_imported(master: MasterForTest) -> None:
    """The server has imported the installed module, so the trial is not forked."""
    wait_for_server(master)
    first_line = "import tabulate\nprint('it is', tabulate.__file__)\n"
    text = wait_for_log(
        master, submit_small(master, small(), first_line, {"tabulate.py": "tabulate = str\n"})
    )
    assert "started as a new process" in text
    assert "workdir/tabulate.py is named like tabulate, which is imported ahead" in text
    assert re.search(r"it is \S+/workdir/tabulate.py\n", text)


def test_forked_ranks_start_in_same_process_state(master: MasterForTest, tmp_path: Path) -> None:
    wait_for_server(master)
    state = RECORD_STATE.replace("<seen>", str(tmp_path))
    ranks = {"resources": {"slots_per_trial": 2}}
    search = {"name": "random", "metric": "validation_loss", "max_length": {"batches": 1}}
    search |= {"max_trials": 4, "max_concurrent_trials": 1}
    new = submit_small(master, small(**ranks, data={"dstrial": {"warm": False}}), state)
    assert wait_for_log(master, new).count("started as a new process") == 2
    forks = submit_small(master, small(**ranks, searcher=search), state)
    assert wait_for_log(master, forks).count("started as a fork") == 8

    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    (cold,) = trials(master, new)
    draws = [str(draw) for one in seen.values() for draw in one.pop("draws")]
    assert len(set(draws)) == len(draws) == 10 * 5
    for rank in (0, 1):
        expected = state_of(seen[f"{cold['id']}-{rank}"])
        assert expected["HF_HOME"] == "/set/by/the/definition"
        assert expected["RANK"] == str(rank)
        assert expected["ports"] == "its own"
        for fork in trials(master, forks):
            found = state_of(seen[f"{fork['id']}-{rank}"])
            assert {name: value for name, value in found.items() if value != expected[name]} == {}


def state_of(seen: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's recorded state without the values specific to its allocation."""
    variables = dict(seen.pop("environment"))
    ports = [int(variables[name]) for name in PORTS]
    home = str(Path(seen["directory"]).parent)
    text = (
        json.dumps(seen).replace(home, "<allocation>").replace("/bin/python3", "/bin/python")
    )  # python and python3 link to the same file
    variables.pop(WARM_VARIABLE, None)  # set only if forks are disabled
    return {
        **json.loads(text),
        "ports": "its own" if seen["ports"] == ports else seen["ports"],
        "names of variables": sorted(variables),
        "variables": {name: value for name, value in variables.items() if not is_free(name)},
    }


def test_successive_trials_fork_and_resume_after_pause(
    master: MasterForTest,
) -> None:
    """Modules that only the trial imports, here scikit-learn, do not prevent forks."""
    given = {"searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 9}}}
    imports = "import sklearn.datasets\n"
    server = wait_for_server(master)
    (before,) = shown_servers(master.state.path)
    whole = submit_small(master, small(**given), imports)
    text = wait_for_log(master, whole)
    assert "started as a fork" in text
    paused = submit_small(master, small(**given, hyperparameters={"batch_sleep_s": 0.5}), imports)
    wait_for(lambda: trials(master, paused), "there is no trial", deadline_s=DEADLINE_S)
    (trial,) = trials(master, paused)
    wait_for(lambda: len(steps_of(master, trial["id"])) >= 2, "it does not report", deadline_s=DEADLINE_S)

    master.client().post(f"/api/v1/experiments/{paused}/pause")
    wait_for(
        lambda: trials(master, paused)[0]["state"] == "STATE_PAUSED",
        "it is not paused",
        deadline_s=DEADLINE_S,
    )
    assert len(steps_of(master, trial["id"])) < 9
    master.client().post(f"/api/v1/experiments/{paused}/activate")

    text = wait_for_log(master, paused)
    assert text.count("started as a fork") == 2
    assert list(reports_of(master, paused).values()) == list(reports_of(master, whole).values())
    (shown,) = shown_servers(master.state.path)
    assert (shown.pid, shown.num_forks - before.num_forks) == (server, 3)


@pytest.mark.parametrize("is_supervisor_killed", [False, True], ids=["by its supervisor", "by its session"])
def test_killed_forked_trial_leaves_no_process(master: MasterForTest, is_supervisor_killed: bool) -> None:
    experiment_id, trial_id = start_forked_trial(master, steps=1000, sleep_s=0.3)
    supervisor = supervisor_of(master, trial_id)
    seen = {*descendants(supervisor), supervisor}
    assert len(seen) >= 3  # the supervisor, its launcher and its rank
    assert seen <= members_of_session(supervisor)

    if is_supervisor_killed:
        os.kill(supervisor, signal.SIGKILL)
    killed = master.det("trial", "kill", str(trial_id))

    assert is_supervisor_killed or killed.returncode == 0, killed.stderr
    wait_for(lambda: not members_of_session(supervisor) and not any(map(is_alive, seen)), "a process is left")
    ended = ("STATE_CANCELED", "STATE_ERROR")
    wait_for(lambda: trials(master, experiment_id)[0]["state"] in ended, deadline_s=DEADLINE_S)


def test_forked_trial_outlives_killed_fork_server(
    master: MasterForTest,
) -> None:
    """The next trial starts as a new process, later ones from a new fork server."""
    experiment_id, trial_id = start_forked_trial(master, steps=12, sleep_s=0.3)
    (server,) = servers_of(master)

    os.kill(server, signal.SIGKILL)

    assert wait_for_log(master, experiment_id).count("started as") == 1
    assert steps_of(master, trial_id) == list(range(1, 13))
    text = wait_for_log(master, start_trial(master))
    assert "the trial starts as a new process, not as a fork" in text
    assert wait_for_server(master) != server
    assert "started as a fork" in wait_for_log(master, start_trial(master))


@pytest.mark.exhaustive("[5]")
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_server_killed_while_forking_loses_no_trial(master: MasterForTest, seed: int) -> None:
    """Each trial starts exactly once, and no restart is counted."""
    server = wait_for_server(master)
    begun = [start_trial(master, steps=3) for _ in range(4)]
    time.sleep(random.Random(seed).uniform(0.0, 0.2))
    os.kill(server, signal.SIGKILL)
    for experiment_id in begun:
        wait_until(master, experiment_id, "COMPLETED", deadline_s=DEADLINE_S)
        (trial,) = trials(master, experiment_id)
        assert steps_of(master, trial["id"]) == [1, 2, 3]
        assert trial["restarts"] == 0
        text = log_of(master, experiment_id)
        assert text.count("started as") == 1, text


def test_stopped_server_is_killed_and_trial_starts_unforked(master: MasterForTest) -> None:
    server = wait_for_server(master)
    os.kill(server, signal.SIGSTOP)

    text = wait_for_log(master, start_trial(master))

    assert "the trial starts as a new process, not as a fork: it does not answer (timed out)" in text
    assert not is_alive(server)


def test_forked_trial_outlives_master_but_server_ends(master: MasterForTest) -> None:
    experiment_id, trial_id = start_forked_trial(master, steps=30, sleep_s=0.3)
    (server,) = servers_of(master)

    master.kill()
    wait_for(lambda: not is_alive(server), "the server outlives its master")
    master.up()

    text = wait_for_log(master, experiment_id)
    assert text.count("started as") == 1
    assert steps_of(master, trial_id) == list(range(1, 31))
    assert trials(master, experiment_id)[0]["restarts"] == 0


def test_down_leaves_no_process(master: MasterForTest) -> None:
    _, trial_id = start_forked_trial(master, steps=1000, sleep_s=0.3)
    supervisor = supervisor_of(master, trial_id)
    seen = {*descendants(supervisor), supervisor, *descendants(master.record.pid), master.record.pid}

    ended = master.dstrial("down", "--now")

    assert ended.returncode == 0, ended.stderr
    assert not members_of_session(supervisor)
    wait_for(lambda: not any(map(is_alive, seen)), f"left: {[command_line_of(pid) for pid in seen]}")
    master.up()


def test_idle_server_exits_and_can_be_disabled(tmp_path: Path) -> None:
    settings = tmp_path / "master.yaml"
    settings.write_text("warm_idle_timeout: 1\n")
    options = ("--config-file", str(settings))
    with master_for_test(tmp_path, num_slots=1, options=options, env={SWITCH: "0"}) as master:
        needs_one, needs_none = submit(master, config(HELP_ENTRYPOINT)), submit(master, config("sleep 600"))
        wait_for_log(master, needs_one)
        wait_for(lambda: ready_servers_of(master), "no server", deadline_s=DEADLINE_S)
        (server,) = servers_of(master)
        master.client().post(f"/api/v1/experiments/{needs_none}/kill")
        wait_for(lambda: not is_alive(server), "a server that is not needed is kept")
        assert not servers_of(master)

        master.kill()
        settings.write_text("warm: false\n")
        master.up()
        experiment_id = start_trial(master)
        while not has_completed(master, experiment_id):
            assert not servers_of(master)
            time.sleep(0.1)
        assert "started as a new process" in log_of(master, experiment_id)


def has_completed(master: MasterForTest, experiment_id: int) -> bool:
    found = master.client().get(f"/api/v1/experiments/{experiment_id}")["experiment"]
    assert found["state"] != "STATE_ERROR", log_of(master, experiment_id)
    return bool(found["state"] == "STATE_COMPLETED")
