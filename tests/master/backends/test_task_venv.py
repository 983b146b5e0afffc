"""Python environments of tasks: installed once, shared, apart from the base."""

from __future__ import annotations

import base64
import fcntl
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stubborn_trees import make_deep, nobody_changes
from submitting import TRAIN, config, log_of, submit, trials, wait_until
from waiting import wait_for
from wheels import source_distribution, wheel

from dstrial.master.backends import task_venv
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

SHOW = """
import importlib, os, sys
print("python", sys.prefix, os.environ.get("VIRTUAL_ENV"))
for name in os.environ.get("SHOWN", "tinydep").split(","):
    module = importlib.import_module(name)
    print("has", name, module.__version__, os.path.dirname(module.__file__))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a disposable base environment with the packages of the test run."""
    directory = tmp_path_factory.mktemp("bases") / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site_packages / "these.pth").write_text("\n".join([*lines, str(Path(__file__).parents[3])]) + "\n")
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
    for release in ("1.0", "2.0"):
        wheel(directory, "tinydep", release)
        wheel(directory, "tinybase", release)
        wheel(directory, "torch", release)
    wheel(directory, "wantsold", "1.0", requires=("torch<2",))
    return directory


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    # A path with spaces: invalid in a shebang line, and PIP_CONSTRAINT would split it.
    with master_for_test(tmp_path_factory.mktemp("state with spaces"), num_slots=2) as running:
        yield running


@pytest.fixture
def given(base: Path, wheels: Path) -> Callable[..., dict[str, Any]]:
    def make(*variables: str, environment: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        lines = [
            f"DET_PYTHON_EXECUTABLE={base / 'bin' / 'python3'}",
            "PIP_NO_INDEX=1",
            f"PIP_FIND_LINKS={wheels.as_uri()}",
            "PIP_CONFIG_FILE=/dev/null",
            "PIP_NO_WARN_CONFLICTS=0",  # 0 skips the check of all installed requirements
            "PIP_NO_BUILD_ISOLATION=0",  # 0 disables build isolation
            *variables,
        ]
        return config(environment={"environment_variables": lines, **(environment or {})}, **changes)

    return make


def create(
    master: MasterForTest,
    config_: dict[str, Any],
    hook: str = "",
    script: str = SHOW,
    files: dict[str, str | bytes] | None = None,
) -> int:
    """Submit an experiment with these files (content by path); return its id."""
    named = {"train.py": script, **({"startup-hook.sh": hook} if hook else {}), **(files or {})}
    definition = [
        {
            "path": path,
            "type": 48,
            "content": base64.b64encode(text.encode() if isinstance(text, str) else text).decode(),
            "mtime": "0",
            "mode": 420,
        }
        for path, text in named.items()
    ]
    return submit(master, config_, modelDefinition=definition)


def ended(
    master: MasterForTest, config_: dict[str, Any], hook: str = "", state: str = "COMPLETED", **given: Any
) -> str:
    experiment_id = create(master, config_, hook, **given)
    wait_until(master, experiment_id, state, deadline_s=120)
    return log_of(master, experiment_id)


def logs_of(master: MasterForTest, experiment_id: int) -> list[str]:
    client = master.client()
    return [
        "".join(line["message"] for line in client.stream(f"/api/v1/trials/{trial['id']}/logs"))
        for trial in trials(master, experiment_id)
    ]


def packages_of(python: Path) -> str:
    program = "from importlib.metadata import distributions\n"
    program += "print(sorted((one.name, one.version) for one in distributions()))"
    return subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout


def shown(log: str, name: str = "tinydep") -> tuple[str, str]:
    """Return the version and directory of a package that a trial imported."""
    (line,) = (line for line in log.splitlines() if f"has {name} " in line)
    release, directory = line.partition(f"has {name} ")[2].split(" ", 1)
    return release, directory


def test_hook_installs_into_task_environment_not_base(
    master: MasterForTest, given: Callable[..., dict[str, Any]], base: Path
) -> None:
    before = packages_of(base / "bin" / "python3")
    settings = given(entrypoint="python3 train.py && tinybase && tinydep", hyperparameters={"steps": 2})

    experiment_id = create(master, settings, "pip install tinydep==1.0\n", script=SHOW + TRAIN)
    wait_until(master, experiment_id, "COMPLETED", deadline_s=120)

    log = log_of(master, experiment_id)
    assert packages_of(base / "bin" / "python3") == before
    assert shown(log)[0] == "1.0"
    assert shown(log)[1].startswith(str(master.state.path / "venvs"))
    # Commands of the base and newly installed commands run in the task's environment.
    (prefix,) = {
        line.partition(" of ")[2]
        for line in log.splitlines()
        if "tinybase of" in line or "tinydep of" in line
    }
    assert prefix.startswith(str(master.state.path / "allocations"))
    assert f"python {prefix} {prefix}" in log
    (saved,) = master.client().get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    assert saved["state"] == "STATE_COMPLETED"


def test_concurrent_trials_install_shared_requirements_once(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    begun, may_go_on = tmp_path / "begun", tmp_path / "may go on"
    waits = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
    waits += f"while not pathlib.Path({str(may_go_on)!r}).exists(): time.sleep(0.02)"
    source_distribution(tmp_path, "slowdep", "1.0", build_lines=waits)
    both = given(
        f"PIP_FIND_LINKS={tmp_path}",
        "SHOWN=slowdep",
        data={"dstrial": {"requirements": "needs.txt"}},
        searcher={"name": "grid", "metric": "score"},
        hyperparameters={"x": {"type": "categorical", "vals": [1, 2]}},
    )

    experiment_id = create(master, both, files={"needs.txt": "slowdep\n"})
    wait_for(lambda: begun.exists() and "waiting for environment" in "".join(logs_of(master, experiment_id)))
    may_go_on.touch()
    wait_until(master, experiment_id, "COMPLETED", deadline_s=120)

    first, second = sorted(logs_of(master, experiment_id), key=lambda log: "waiting for environment" in log)
    assert "Successfully installed slowdep-1.0" in first
    assert "which trial " in second
    assert "slowdep-1.0" not in second
    assert shown(first, "slowdep") == shown(second, "slowdep")


def test_same_hook_shares_environment_but_runs_each_time(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    hook = f"python -m pip install -r needs.txt\necho again >> {tmp_path}/runs\nexport FROM_HOOK=yes\n"
    script = SHOW + "print('hook', os.environ['FROM_HOOK'])\n"

    logs = [
        ended(master, given(), hook, script=script, files={"needs.txt": f"tinydep{release}\n"})
        for release in ("", "", "==1.0")
    ]

    assert (tmp_path / "runs").read_text() == "again\nagain\nagain\n"
    assert [log.count("Successfully installed") for log in logs] == [1, 0, 1]
    assert all("hook yes" in log for log in logs)
    assert [shown(log)[0] for log in logs] == ["2.0", "2.0", "1.0"]
    assert shown(logs[0]) == shown(logs[1])


@pytest.mark.parametrize("directory", ["./own", "-r more.txt"])
def test_requirements_named_are_shared_local_are_per_task(
    directory: str, master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with tarfile.open(source_distribution(tmp_path, "localdep", "1.0", build_lines="")) as archive:
        archive.extractall(tmp_path, filter="data")
    local = {f"own/{path.name}": path.read_bytes() for path in (tmp_path / "localdep-1.0").iterdir()}
    local["more.txt"] = b"./own\n"
    variables, needs = ("SHOWN=tinydep,localdep",), f"tinydep==1.0\n{directory}\n"
    settings = given(*variables, data={"dstrial": {"requirements": "needs.txt"}})

    logs = [ended(master, settings, files={"needs.txt": needs, **local}) for _ in range(2)]

    assert [shown(log)[0] for log in logs] == ["1.0", "1.0"]
    assert shown(logs[0]) == shown(logs[1])
    assert shown(logs[0], "localdep")[1].startswith(str(master.state.path / "venvs"))
    assert shown(logs[1], "localdep")[1].startswith(str(master.state.path / "allocations"))


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ("torch==1.0", "The user requested (constraint) torch=="),
        ("wantsold", "wantsold 1.0 depends on torch<2"),
        ("nowhere", "No matching distribution found for nowhere"),
    ],
)
def test_failed_requirements_install_shows_pip_error(
    master: MasterForTest, given: Callable[..., dict[str, Any]], needs: str, words: str
) -> None:
    settings = given(data={"dstrial": {"requirements": "needs.txt"}})

    log = ended(master, settings, state="ERROR", files={"needs.txt": f"{needs}\n"})

    error = log.partition("error: needs.txt cannot be installed; pip ends with exit code 1:")[2]
    assert words in error
    assert "PIP_INDEX_URL" in error
    assert "DET_PYTHON_EXECUTABLE" in error


def test_later_installs_stay_in_own_task_environment(
    master: MasterForTest, given: Callable[..., dict[str, Any]]
) -> None:
    hook = 'pip install tinydep==1.0 && if [ -n "$MORE" ]; then pip install $MORE; fi\n'
    installs = "import subprocess, sys\n"
    installs += "subprocess.run([sys.executable, '-m', 'pip', 'install', '-U', 'tinydep'], check=True)\n"

    first = ended(master, given(), hook, script=installs + SHOW)
    changed = ended(master, given("MORE=tinydep==2.0 tinybase==2.0", "SHOWN=tinydep,tinybase"), hook)
    last = ended(master, given(), hook)

    own, shared = str(master.state.path / "allocations"), str(master.state.path / "venvs")
    for log, name in ((first, "tinydep"), (changed, "tinydep"), (changed, "tinybase")):
        assert shown(log, name)[0] == "2.0"
        assert shown(log, name)[1].startswith(own)
    assert shown(last)[0] == "1.0"
    assert shown(last)[1].startswith(shared)


@pytest.mark.parametrize("entrypoint", ["pip install tinydep && python3 train.py", "python3 installs.py"])
def test_install_without_hook_does_not_reach_base(
    master: MasterForTest, given: Callable[..., dict[str, Any]], base: Path, entrypoint: str
) -> None:
    before = packages_of(base / "bin" / "python3")
    installs = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'tinydep'])\n"
    is_script = entrypoint.startswith("python3")

    log = ended(master, given(entrypoint=entrypoint), files={"installs.py": installs})

    assert packages_of(base / "bin" / "python3") == before
    assert ("Put it into startup-hook.sh" in log) is is_script
    assert ("has tinydep 2.0" in log) is not is_script


def test_killed_installation_is_discarded_and_repeated(
    master: MasterForTest, given: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    begun, is_first = tmp_path / "begun", tmp_path / "first"
    is_first.touch()
    hangs = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
    hangs += f"while pathlib.Path({str(is_first)!r}).exists(): time.sleep(0.02)"
    source_distribution(tmp_path, "hangdep", "1.0", build_lines=hangs)
    settings = given(f"PIP_FIND_LINKS={tmp_path}", "SHOWN=hangdep")
    hook = 'touch "$VIRTUAL_ENV/half-made"; pip install hangdep; rm "$VIRTUAL_ENV/half-made"\n'

    killed = create(master, settings, hook)
    wait_for(begun.exists)
    (half_made,) = (master.state.path / "venvs").glob("*/half-made")
    half_made.with_name("old").touch()
    master.client().post(f"/api/v1/experiments/{killed}/kill")
    wait_until(master, killed, "CANCELED")
    is_first.unlink()
    log = ended(master, settings, hook)

    assert shown(log, "hangdep")[1].startswith(str(half_made.parent))
    assert (half_made.parent / "complete").exists()
    assert not half_made.with_name("old").exists()


def test_collect_removes_only_unused_environments(tmp_path: Path) -> None:
    def make(name: str, num_levels: int = 1) -> Path:
        lock, _ = task_venv.acquire(tmp_path / name, "a task")
        make_deep(tmp_path / name, num_levels)
        (tmp_path / name / "complete").touch()
        os.close(lock)
        os.utime(tmp_path / f"{name}.lock", (0, 0))
        return tmp_path / name

    hold = "import sys; from pathlib import Path; from dstrial.master.backends import task_venv\n"
    hold += "print(*task_venv.acquire(Path(sys.argv[1]), 'me'), flush=True)\nsys.stdin.read()\n"
    make("used"), make("deep", 1500), make("old"), make("recent"), make("unfinished")
    (tmp_path / "unfinished" / "complete").unlink()
    for name in ("recent", "unfinished"):
        os.utime(tmp_path / f"{name}.lock")
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "used")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None
        assert "True" in user.stdout.readline()
        os.utime(tmp_path / "used.lock", (0, 0))
        with nobody_changes(tmp_path / "old"):
            assert task_venv.collect(tmp_path, unused_s=3600.0) == ["deep", "unfinished"]
        user.communicate("")

    assert task_venv.collect(tmp_path, unused_s=3600.0) == ["old", "used"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recent", "recent.lock"]
    with (tmp_path / "recent.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
