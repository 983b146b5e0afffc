"""Environments of trials: what a hook installs is the trial's, once, for all that share it, and never the master's."""

from __future__ import annotations

import base64
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from stubborn_trees import make_deep, nobody_changes
from submitting import TRAIN, config, log_of, submit, trials, wait_until
from tasks_here import TasksHere
from waiting import wait_for
from wheels import source_distribution, wheel

from dstrial.master.backends.overlay import store
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

SHOW = """
import importlib, os, sys
print("python", sys.prefix)
for name in os.environ.get("SHOWN", "tinydep").split(","):
    module = importlib.import_module(name)
    print(name, module.__version__, os.path.dirname(module.__file__))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base to which a failing test may do what it likes: an environment over the one that runs the tests."""
    directory = tmp_path_factory.mktemp("bases") / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site_packages / "these.pth").write_text("\n".join([*lines, str(Path(__file__).parents[3])]) + "\n")
    pip = directory / "bin" / "pip"
    pip.write_text(
        f"#!{directory / 'bin' / 'python3'}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    )
    pip.chmod(0o755)
    wheels = tmp_path_factory.mktemp("of base")
    subprocess.run(
        [str(directory / "bin" / "python3"), "-m", "pip", "install", "--no-index", "--no-warn-conflicts", "--quiet",
         str(wheel(wheels, "tinybase", "1.0"))],
        check=True,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        wheel(directory, "tinydep", version)
        wheel(directory, "tinybase", version)
        wheel(directory, "torch", version)
    wheel(directory, "wantsold", "1.0", requires=("torch<2",))
    return directory


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    # A path that scripts cannot name in their first line, and that PIP_CONSTRAINT would split.
    directory = tmp_path_factory.mktemp("state with spaces")
    settings = directory / "master.yaml"
    # It installs nothing: a task with no other hook runs in the base.
    hook = f"echo $DET_TASK_TYPE >> {shlex.quote(str(directory / 'hooked'))}\n"
    settings.write_text(yaml.safe_dump({"task_container_defaults": {"startup_hook": hook}}))
    options = ("--config-file", str(settings))
    with master_for_test(directory, num_slots=2, options=options) as running:
        yield running


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def given(base: Path, wheels: Path) -> Callable[..., dict[str, Any]]:
    def make(*variables: str, environment: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        lines = [
            f"DET_PYTHON_EXECUTABLE={base / 'bin' / 'python3'}",
            "PIP_NO_INDEX=1",
            f"PIP_FIND_LINKS={wheels.as_uri()}",
            "PIP_CONFIG_FILE=/dev/null",
            "PIP_NO_WARN_CONFLICTS=0",  # 0 has it not read again what everything that is installed asks for
            *variables,
        ]
        return config(environment={"environment_variables": lines, **(environment or {})}, **changes)

    return make


def files(**texts: str) -> list[dict[str, Any]]:
    named = {name.replace("__", "-").replace("_", "."): text for name, text in texts.items()}
    return [
        {
            "path": name,
            "type": 48,
            "content": base64.b64encode(text.encode()).decode(),
            "mtime": "0",
            "mode": 420,
        }
        for name, text in named.items()
    ]


def create(
    master: MasterForTest, config_: dict[str, Any], hook: str = "", script: str = SHOW, **more: str
) -> int:
    texts = {"train_py": script, **({"startup__hook_sh": hook} if hook else {}), **more}
    return submit(master, config_, modelDefinition=files(**texts))


def ended(
    master: MasterForTest,
    config_: dict[str, Any],
    hook: str = "",
    state: str = "COMPLETED",
    script: str = SHOW,
    **more: str,
) -> str:
    experiment_id = create(master, config_, hook, script, **more)
    wait_until(master, experiment_id, state, deadline_s=120)
    return log_of(master, experiment_id)


def packages_of(python: Path) -> str:
    """Names and versions of what an environment has installed."""
    program = "from importlib.metadata import distributions\n"
    program += "print(sorted((one.name, one.version) for one in distributions()))"
    return subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout


def prefix_in(log: str) -> str:
    return next(line for line in log.splitlines() if "python " in line).partition("python ")[2].strip()


def test_what_a_hook_installs_is_the_trials_and_the_base_stays_as_it_is(
    master: MasterForTest, given: Callable[..., dict[str, Any]], base: Path
) -> None:
    before = packages_of(base / "bin" / "python3")

    log = ended(master, given(), "pip install tinydep==1.0\n")

    assert packages_of(base / "bin" / "python3") == before
    assert "tinydep 1.0" in log
    assert prefix_in(log).startswith(str(master.state.path / "overlays"))


def test_two_trials_at_once_share_an_environment_that_one_of_them_makes(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    begun, may_go_on = tmp_path / "begun", tmp_path / "may go on"
    waits = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
    waits += f"while not pathlib.Path({str(may_go_on)!r}).exists(): time.sleep(0.02)"
    links = tmp_path / "links"
    links.mkdir()
    source_distribution(links, "slowdep", "1.0", build_lines=waits)
    both = given(
        f"PIP_FIND_LINKS={links}",
        "SHOWN=slowdep",
        searcher={"name": "grid", "metric": "score"},
        hyperparameters={"x": {"type": "categorical", "vals": [1, 2]}},
    )

    experiment_id = create(master, both, "pip install --no-build-isolation slowdep\n")
    wait_for(lambda: begun.exists() and "waiting for environment" in log_of_now(master, experiment_id))
    may_go_on.touch()
    wait_until(master, experiment_id, "COMPLETED", deadline_s=120)

    first, second = sorted(logs_of(master, experiment_id), key=lambda log: "waiting for environment" in log)
    assert "Successfully installed slowdep-1.0" in first
    assert "Successfully installed" not in second
    assert "pip install --no-build-isolation slowdep: done by trial" in second
    assert prefix_in(first) == prefix_in(second)


def logs_of(master: MasterForTest, experiment_id: int) -> list[str]:
    client = master.client()
    return [
        "".join(line["message"] for line in client.stream(f"/api/v1/trials/{trial['id']}/logs"))
        for trial in trials(master, experiment_id)
    ]


def log_of_now(master: MasterForTest, experiment_id: int) -> str:
    return "".join(logs_of(master, experiment_id))


def test_another_experiment_finds_installs_of_the_same_requirements_done_and_runs_the_rest_of_its_hook(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    hook = f"python -m pip install -r needs.txt\necho again >> {tmp_path}/runs\nexport FROM_HOOK=yes\n"
    script = SHOW + "print('hook', os.environ['FROM_HOOK'])\n"

    logs = [
        ended(master, given(), hook, script=script, needs_txt=f"tinydep{version}\n")
        for version in ("", "", "==1.0")
    ]

    assert (tmp_path / "runs").read_text() == "again\nagain\nagain\n"
    assert [log.count("Successfully installed") for log in logs] == [1, 0, 1]
    assert all("hook yes" in log for log in logs)
    assert ["tinydep 2.0" in log for log in logs] == [True, True, False]
    assert "tinydep 1.0" in logs[2]
    assert prefix_in(logs[0]) == prefix_in(logs[1]) != prefix_in(logs[2])


def test_requirements_that_the_config_names_are_installed_by_what_they_say(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    of_environment = given(environment={"requirements": "needs.txt"})
    of_data = given() | {"data": {"dstrial": {"requirements": "needs.txt"}}}

    logs = [
        ended(master, named, needs_txt=f"tinydep=={version}\n")
        for named, version in ((of_environment, "1.0"), (of_data, "2.0"))
    ]

    assert "tinydep 1.0" in logs[0]
    assert "tinydep 2.0" in logs[1]


@pytest.mark.parametrize(
    ("asked", "named"), [("torch==1.0", "torch==1.0"), ("wantsold", "wantsold 1.0 depends on torch<2")]
)
def test_what_contradicts_the_base_is_one_error_with_both_requirements(
    master: MasterForTest, given: Callable[..., dict[str, Any]], asked: str, named: str
) -> None:
    log = ended(master, given(), f"pip install {asked}\n", state="ERROR")

    (error,) = [line for line in log.splitlines() if "error: pip install" in line]
    from importlib.metadata import version

    assert f"asks for {named}" in error
    assert f"torch=={version('torch')}" in error
    assert "ERROR: Cannot install" in log or "ERROR: Could not find a version" in log


def test_a_package_that_hides_one_of_the_base_is_a_note_in_every_trial(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    logs = [ended(master, given("SHOWN=tinybase"), "pip install -U tinybase\n") for _ in range(2)]

    for log in logs:
        assert "note: tinybase 2.0 of this environment hides 1.0 of its base" in log
        assert "tinybase 2.0" in log


def test_what_tasks_train_with_is_not_changed_by_a_hook_that_takes_another_turn(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    hook = 'pip install tinydep==1.0 && if [ -n "$MORE" ]; then pip install $MORE; fi\n'

    first = ended(master, given(), hook)
    refused = ended(master, given("MORE=tinydep==2.0"), hook, state="ERROR")
    added = ended(master, given("MORE=tinybase==2.0"), hook)

    assert prefix_in(first) == prefix_in(added)
    assert (
        "error: pip install tinydep==2.0 asks for tinydep==2.0; expected what agrees with tinydep==1.0"
        in refused
    )
    assert "tinydep 1.0" in added


def test_commands_of_the_base_see_what_was_installed(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    log = ended(master, given(entrypoint=["tinybase"]), "pip install tinydep==1.0\n")

    assert f"tinybase of {master.state.path / 'overlays'}" in log


def test_a_trial_in_an_environment_of_its_own_reports_and_saves(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    experiment_id = create(
        master, given(hyperparameters={"steps": 2}), "pip install tinydep==1.0\n", script=TRAIN
    )
    wait_until(master, experiment_id, "COMPLETED")

    (saved,) = master.client().get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    assert saved["state"] == "STATE_COMPLETED"


def test_a_command_with_a_hook_has_an_environment_of_its_own_too(
    master: MasterForTest, given: Callable[..., dict[str, Any]], base: Path, tmp_path: Path
) -> None:
    before = packages_of(base / "bin" / "python3")
    here, files_ = TasksHere(master, tmp_path), tmp_path / "files"
    files_.mkdir()
    (files_ / "startup-hook.sh").write_text("pip install tinydep==1.0\n")
    (files_ / "show.py").write_text(SHOW)

    task_id = here.run(
        "--context",
        str(files_),
        "python3",
        "show.py",
        environment=given()["environment"],
        resources={"slots": 0},
    )
    here.wait(task_id, "TERMINATED")

    assert any("tinydep 1.0" in line for line in here.log(task_id)), here.log(task_id)
    assert packages_of(base / "bin" / "python3") == before


def test_the_startup_hook_of_the_settings_runs_for_a_tensorboard_too(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    experiment_id = create(master, given(hyperparameters={"steps": 2}), script=TRAIN)
    wait_until(master, experiment_id, "COMPLETED")
    hooked = master.state.path.parent / "hooked"

    task_id = (
        TasksHere(master, tmp_path).ok("tensorboard", "start", "--detach", str(experiment_id)).split()[-1]
    )
    try:
        wait_for(lambda: "TENSORBOARD" in hooked.read_text())
    finally:
        master.client().post(f"/api/v1/tensorboards/{task_id}/kill")

    assert "TRIAL" in hooked.read_text()


@pytest.mark.parametrize("entrypoint", ["pip install tinydep && python3 train.py", "python3 installs.py"])
def test_an_installation_without_a_hook_does_not_reach_the_base_either(
    master: MasterForTest, given: Callable[..., dict[str, Any]], base: Path, entrypoint: str
) -> None:
    before = packages_of(base / "bin" / "python3")
    installs = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'tinydep'])\n"
    is_script = entrypoint.startswith("python3")

    log = ended(master, given(entrypoint=entrypoint), installs_py=installs)

    assert packages_of(base / "bin" / "python3") == before
    assert ("Put it into startup-hook.sh" in log) is is_script
    assert ("tinydep 2.0" in log) is not is_script


@pytest.mark.exhaustive("[--user]", "[conda]")
@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("pip install --user tinydep", "--user, which is not supported"),
        ("pip install --target=here tinydep", "--target, which is not supported"),
        ("conda install -y tinydep", "conda install is not supported"),
        ("apt-get install -y tinydep", "apt-get install is not supported"),
    ],
    ids=["--user", "--target", "conda", "apt-get"],
)
def test_what_a_hook_cannot_do_is_refused_when_it_runs_and_warned_of_at_submission(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path, line: str, what: str
) -> None:
    log = ended(master, given(), f"{line}\n", state="ERROR")

    assert what in log


def test_an_index_that_does_not_answer_is_named(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        index = f"PIP_INDEX_URL=http://127.0.0.1:{taken.getsockname()[1]}/simple"
        log = ended(
            master, given("PIP_NO_INDEX=0", "PIP_FIND_LINKS=", index), "pip install fardep\n", state="ERROR"
        )

    assert "error: pip install fardep reaches no package index" in log
    assert "PIP_INDEX_URL" in log


def test_an_index_that_says_nothing_ends_with_the_time_for_installing(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    # The kernel takes the connection, and nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        index = f"PIP_INDEX_URL=http://127.0.0.1:{mute.getsockname()[1]}/simple"
        settings = given("PIP_NO_INDEX=0", "PIP_FIND_LINKS=", index)
        settings["data"] = {"dstrial": {"install_timeout_s": 3}}
        log = ended(master, settings, "pip install mutedep\n", state="ERROR")

    assert "error: pip install mutedep has run for 3 s" in log
    assert "data.dstrial.install_timeout_s" in log


def test_an_environment_whose_making_was_killed_is_left_alone_and_made_anew(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    begun, is_first = tmp_path / "begun", tmp_path / "first"
    is_first.touch()
    hangs = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
    hangs += f"while pathlib.Path({str(is_first)!r}).exists(): time.sleep(0.02)"
    links = tmp_path / "links"
    links.mkdir()
    source_distribution(links, "hangdep", "1.0", build_lines=hangs)
    settings = given(f"PIP_FIND_LINKS={links}", "SHOWN=hangdep")
    hook = "pip install --no-build-isolation hangdep\n"

    killed = create(master, settings, hook)
    wait_for(begun.exists)
    master.client().post(f"/api/v1/experiments/{killed}/kill")
    wait_until(master, killed, "CANCELED")
    is_first.unlink()
    log = ended(master, settings, hook)

    assert "hangdep 1.0" in log
    name = Path(prefix_in(log)).name
    assert name.endswith("-1")
    overlays = master.state.path / "overlays"
    assert (overlays / f"{name[:-1]}0").is_dir()
    assert f"{name[:-1]}0" in store.collect(overlays, unused_s=3600.0)
    assert not (overlays / f"{name[:-1]}0").exists()
    assert (overlays / name).is_dir()


def test_only_what_no_task_uses_and_none_has_started_in_for_long_is_collected(tmp_path: Path) -> None:
    def make(_overlay: store.Overlay, staging: Path) -> None:
        staging.mkdir()

    hold = "import sys; from pathlib import Path; from dstrial.master.backends.overlay import store\n"
    hold += "store.acquire(Path(sys.argv[1]), 'used', lambda _, path: path.mkdir(), 'me', print, 1.0)\n"
    hold += "print('ready', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        while "ready" not in user.stdout.readline():
            assert user.poll() is None
        for name in ("old", "recent"):
            overlay = store.Overlay(tmp_path, f"{name}-0")
            make(overlay, overlay.path)
            os.close(overlay.use())
            overlay.beside("lock").touch()
        for name in ("old-0", "used-0"):
            os.utime(tmp_path / f"{name}.use", (0, 0))

        assert store.collect(tmp_path, unused_s=3600.0) == ["old-0"]
        user.communicate("")

    assert store.collect(tmp_path, unused_s=3600.0) == ["used-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recent-0", "recent-0.lock", "recent-0.use"]


def test_environment_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    for name in ("another", "deep", "stays"):
        overlay = store.Overlay(tmp_path, f"{name}-0")
        make_deep(overlay.path, 1500 if name == "deep" else 1)
        os.close(overlay.use())
        overlay.beside("lock").touch()
        os.utime(overlay.beside("use"), (0, 0))

    with nobody_changes(tmp_path / "another-0"):
        assert store.collect(tmp_path, unused_s=3600.0) == ["deep-0", "stays-0"]

    assert store.collect(tmp_path, unused_s=3600.0) == ["another-0"]
    assert list(tmp_path.iterdir()) == []
