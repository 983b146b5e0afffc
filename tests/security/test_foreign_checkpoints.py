"""Tools and resumed runs execute no code from a foreign checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import foreign
import pytest
import warm_start

from dstrial.checkpoint.integrity import check_integrity
from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file, layouts_of, read_manifest
from dstrial.errors import CheckpointDamagedError
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

DEADLINE_S = 240


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of this account with two checkpoints."""
    return foreign.make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def home(tmp_path: Path) -> Mapping[str, str]:
    """Environment variables of an account that has signed no checkpoint."""
    return {"XDG_DATA_HOME": str(tmp_path / "data")}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The directory that exists only if the payload was executed."""
    return tmp_path / "code-was-run"


@pytest.fixture
def poisoned(run_path: Path, tmp_path: Path, marker: Path) -> Callable[[str], Path]:
    """Return a function that copies the newest checkpoint and adds the payload."""

    def make(name: str) -> Path:
        path = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")
        foreign.poison(path, name, foreign.Payload(marker))
        return path

    return make


def dstrial(*words: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env}
    return warm_start.run(
        ["dstrial.cli", *map(str, words)], env=variables, cwd=Path.cwd(), timeout=DEADLINE_S
    )


def refused(output: str, name: str) -> bool:
    """Return whether a message names the file, the class and ``--trust-code``."""
    return name in output and "os.makedirs" in output and "--trust-code" in output


TOOLS = {
    "inspect": ((), foreign.ENGINE_FILE),
    "inspect optimizer": ((), foreign.OPTIMIZER_FILE),
    "export": (("--no-verify",), foreign.ENGINE_FILE),
    "reshape": (("--slots", "1"), foreign.ENGINE_FILE),
    "reshape rank state": (("--slots", "1"), foreign.RANK_FILE),
    "verify": ((), foreign.ENGINE_FILE),
}


def words_of(tool: str, checkpoint: Path, tmp_path: Path) -> list[object]:
    options, _ = TOOLS[tool]
    action = tool.split()[0]
    more: dict[str, list[object]] = {
        "export": [tmp_path / "model.safetensors"],
        "reshape": [tmp_path / "reshaped", "--context", foreign.DEFINITIONS],
    }
    return ["checkpoint", action, checkpoint, *more.get(action, []), *options]


@pytest.mark.parametrize("tool", TOOLS)
def test_checkpoint_tool_runs_no_pickled_code(
    tool: str,
    poisoned: Callable[[str], Path],
    marker: Path,
    tmp_path: Path,
    home: Mapping[str, str],
) -> None:
    name = TOOLS[tool][1]
    checkpoint = poisoned(name)

    ended = dstrial(*words_of(tool, checkpoint, tmp_path), env=home)

    output = ended.stdout + ended.stderr
    assert not marker.exists(), output
    if tool == "verify":
        assert ended.returncode == 0, output  # verify reads no pickle, and the files match the manifest
    elif tool.startswith("inspect"):
        assert ended.returncode == 0, output  # inspect shows what it can read
        assert refused(output, name), output
    else:
        assert ended.returncode == 1, output
        assert refused(output, name), output


@pytest.mark.parametrize("name", [foreign.ENGINE_FILE, foreign.OPTIMIZER_FILE, foreign.RANK_FILE])
def test_fit_runs_no_pickled_code(
    name: str, poisoned: Callable[[str], Path], marker: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    code, output = foreign.resume(poisoned(name), tmp_path, **home)

    assert not marker.exists(), output
    assert code != 0
    assert refused(output, name), output


def test_run_resume_runs_pickled_code_only_if_trusted(
    poisoned: Callable[[str], Path], marker: Path, tmp_path: Path, shared_master: MasterForTest
) -> None:
    checkpoint = poisoned(foreign.ENGINE_FILE)
    config = foreign.write_experiment(
        tmp_path / "e.yaml", foreign.experiment_config(3, resources={"slots_per_trial": 2})
    )
    context = shutil.copytree(foreign.DEFINITIONS, tmp_path / "context")

    words = ("run", config, context, "--runs-dir", tmp_path / "runs")

    ended = dstrial(*words, "--resume", checkpoint, env=shared_master.env)
    output = ended.stdout + ended.stderr
    assert not marker.exists(), output
    assert ended.returncode != 0
    assert refused(output, foreign.ENGINE_FILE), output

    ended = dstrial(*words, "--resume", checkpoint, "--trust-code", env=shared_master.env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert marker.is_dir()

    ended = dstrial(*words, "--trust-code", env=shared_master.env)
    assert ended.returncode != 0
    assert "--trust-code is given without --resume" in ended.stderr


def test_trust_applies_only_to_exact_manifest(
    run_path: Path, marker: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")
    foreign.poison(checkpoint, foreign.RANK_FILE, foreign.Payload(marker))
    digest = hash_file(checkpoint / MANIFEST_NAME).sha256
    trusted = foreign.experiment_config(3, data={"dstrial": {"trust_checkpoint_code": digest}})

    def resumed() -> tuple[int, str]:
        return foreign.resume(checkpoint, tmp_path, config=trusted, **home)

    code, output = resumed()
    assert code == 0, output
    assert marker.is_dir()

    marker.rmdir()
    stray = checkpoint / "stray.pkl"
    stray.write_bytes(pickle.dumps(foreign.Payload(marker)))
    code, output = resumed()
    assert code != 0
    assert not marker.exists(), output
    assert "stray.pkl holds" in output
    stray.unlink()

    (checkpoint / "one-more").write_text("another set of files")
    foreign.add_file(checkpoint, "one-more")
    code, output = resumed()
    assert code != 0
    assert not marker.exists(), output
    assert refused(output, foreign.RANK_FILE), output


def test_signed_checkpoint_may_contain_custom_classes(run_path: Path, tmp_path: Path) -> None:
    """The signature of this account permits any object in a callback's state."""
    run_path = shutil.copytree(run_path, tmp_path / "run")
    checkpoint = foreign.latest(run_path)
    foreign.put(checkpoint, foreign.RANK_FILE, foreign.OfUser())
    foreign.remake(checkpoint, is_own=True)
    config = foreign.write_experiment(tmp_path / "e.yaml", foreign.experiment_config(3))

    code, output = foreign.fit(config, run_path, checkpoint)
    assert code == 0, output

    # The same files without a signature.
    foreign.remake(checkpoint)
    code, output = foreign.fit(config, run_path, checkpoint)
    assert code != 0
    assert "foreign.OfUser" in output, output


def test_foreign_checkpoint_without_code_resumes(
    run_path: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")

    code, output = foreign.resume(checkpoint, tmp_path, **home)

    assert code == 0, output
    assert "resumed from checkpoint" in output


def test_reshape_does_not_run_code_in_checkpoint(
    run_path: Path, marker: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")
    (checkpoint / "code").mkdir()
    (checkpoint / "code" / "wide_trials.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    foreign.add_file(checkpoint, "code/wide_trials.py")

    ended = dstrial("checkpoint", "reshape", checkpoint, tmp_path / "out", "--slots", "1", env=home)

    assert ended.returncode == 1
    assert not marker.exists()
    assert "--context" in ended.stderr
    assert "--trust-code" in ended.stderr


def test_reshape_uses_no_environment_or_command_from_checkpoint(
    run_path: Path, marker: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(
        f"import os\nos.path.exists({str(marker)!r}) or os.mkdir({str(marker)!r})\n"
    )
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")
    load_data = json.loads((checkpoint / "load_data.json").read_text())
    load_data["experiment_config"]["environment"] = {"environment_variables": [f"PYTHONPATH={evil}"]}
    (checkpoint / "load_data.json").write_text(json.dumps(load_data))
    foreign.remake(checkpoint)
    context = ("--context", foreign.DEFINITIONS)

    ended = dstrial("checkpoint", "reshape", checkpoint, tmp_path / "out", "--slots", "1", *context, env=home)
    assert ended.returncode == 0, ended.stderr
    assert not marker.exists()

    load_data["experiment_config"]["entrypoint"] = f"mkdir {marker}"
    (checkpoint / "load_data.json").write_text(json.dumps(load_data))
    foreign.remake(checkpoint)
    ended = dstrial(
        "checkpoint", "reshape", checkpoint, tmp_path / "out2", "--slots", "1", *context, env=home
    )
    assert ended.returncode == 1
    assert not marker.exists()
    assert "mkdir" in ended.stderr


PATHS = ["../outside", "/etc/hostname", "model0/../../outside", "a\0b"]


@pytest.mark.parametrize("action", ["verify", "inspect", "export", "reshape"])
def test_manifest_path_outside_checkpoint_is_rejected(
    action: str, run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dstrial.cli.app import main

    (tmp_path / "outside").write_text("secret")
    for idx, path in enumerate(PATHS):
        checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / f"checkpoint{idx}")
        foreign.rename_in_manifest(checkpoint, foreign.RANK_FILE, path)
        more = {"export": [tmp_path / "o"], "reshape": [tmp_path / "o", "--slots", "1"]}

        code = main(["checkpoint", action, str(checkpoint), *map(str, more.get(action, []))])

        assert code in (1, 2)
        assert "without a usable entry of files" in capsys.readouterr().err


def test_symlink_out_of_checkpoint_is_integrity_fault(run_path: Path, tmp_path: Path) -> None:
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "checkpoint")
    outside = (checkpoint / foreign.RANK_FILE).rename(tmp_path / "outside.pt")
    (checkpoint / foreign.RANK_FILE).symlink_to(outside)

    (fault,) = check_integrity(checkpoint).faults

    assert (fault.path, fault.kind) == (foreign.RANK_FILE, "unreadable")
    assert "leads out of the checkpoint" in fault.got


def test_engine_folder_outside_checkpoint_is_rejected(run_path: Path, tmp_path: Path) -> None:
    checkpoint = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "checkpoint")
    manifest = read_manifest(checkpoint)
    for folder in ("../other", "/tmp", "model0/../../x"):
        changed = dataclasses.replace(manifest, layouts=({**manifest.layouts[0], "folder": folder},))
        with pytest.raises(CheckpointDamagedError, match="outside of the checkpoint"):
            layouts_of(changed, checkpoint)


def test_verify_compares_manifest_with_master_registration(
    tmp_path: Path, shared_master: MasterForTest
) -> None:
    config = foreign.write_experiment(tmp_path / "e.yaml", foreign.experiment_config(1))
    context = shutil.copytree(foreign.DEFINITIONS, tmp_path / "context")
    ran = dstrial("run", config, context, "--runs-dir", tmp_path / "runs", env=shared_master.env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (checkpoint,) = (tmp_path / "runs").glob("*/*/checkpoints/[!.]*")
    digest = hash_file(checkpoint / MANIFEST_NAME).sha256
    client = shared_master.client()
    answer = client.get(f"/api/v1/checkpoints/{checkpoint.name}")["checkpoint"]
    assert answer["metadata"]["manifest_sha256"] == digest

    def verified(path: Path) -> tuple[int, str]:
        ended = dstrial("checkpoint", "verify", path, env=shared_master.env)
        return ended.returncode, ended.stdout + ended.stderr

    code, output = verified(checkpoint)
    assert (code, "as registered by the master" in output) == (0, True), output

    # A client with a token may change metadata, but not the digest of the manifest.
    client.post(
        f"/api/v1/checkpoints/{checkpoint.name}/metadata",
        {"checkpoint": {"uuid": checkpoint.name, "metadata": {"manifest_sha256": "0" * 64, "mine": 1}}},
    )
    metadata = client.get(f"/api/v1/checkpoints/{checkpoint.name}")["checkpoint"]["metadata"]
    assert metadata == {"manifest_sha256": digest, "mine": 1}

    copied = foreign.foreign_copy(checkpoint, tmp_path / "copied")
    with (copied / foreign.RANK_FILE).open("ab") as stream:
        stream.write(b"x")
    code, output = verified(copied)
    assert code == 1, output
    assert f"{foreign.RANK_FILE} is longer" in output, output

    foreign.remake(copied)
    code, output = verified(copied)
    assert code == 1, output
    assert "is intact" in output
    assert "manifest changed since the master" in output, output

    other = shutil.copytree(copied, tmp_path / "other")
    foreign.write_marker(
        other, {**foreign.read_marker(other), "uuid": "11111111-2222-4333-8444-555555555555"}
    )
    code, output = verified(other)
    assert code == 0, output
    assert "not registered here: the master at" in output, output
    assert "does not bear this account's signature" in output, output


KEEPING = """
import os
import pathlib

from dstrial import PyTorchCallback
from wide_trials import WideTrial


class Best:
    value = 3.5


class Keeping(PyTorchCallback):
    def state_dict(self):
        return {"best": Best()}

    def load_state_dict(self, state):
        print("came back:", type(state["best"]).__name__, flush=True)

    def on_checkpoint_upload_end(self, uuid):
        marker = pathlib.Path(os.environ["FAILED_ONCE"])
        if not marker.exists():
            marker.touch()
            os._exit(3)


class KeepingTrial(WideTrial):
    def build_callbacks(self):
        return {"keeping": Keeping()}
"""


def test_restart_trusts_unsigned_checkpoint_registered_with_master(
    tmp_path: Path, shared_master: MasterForTest
) -> None:
    """With a file as ``XDG_DATA_HOME``, the trial cannot sign its checkpoints."""
    context = shutil.copytree(foreign.DEFINITIONS, tmp_path / "context")
    (context / "keeping.py").write_text(KEEPING)
    (tmp_path / "no-home").write_text("")
    variables = [f"FAILED_ONCE={tmp_path / 'failed-once'}", f"XDG_DATA_HOME={tmp_path / 'no-home'}"]
    values = foreign.experiment_config(
        2,
        entrypoint="keeping:KeepingTrial",
        resources={"slots_per_trial": 1},
        max_restarts=1,
        environment={"environment_variables": variables},
    )
    config = foreign.write_experiment(tmp_path / "e.yaml", values)

    ran = dstrial("run", config, context, "--runs-dir", tmp_path / "runs", env=shared_master.env)

    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert (tmp_path / "failed-once").exists()
    assert "came back: Best" in output, output
    manifests = list((tmp_path / "runs").glob(f"*/*/checkpoints/*/{MANIFEST_NAME}"))
    assert manifests
    assert not any("signature" in json.loads(path.read_text()) for path in manifests)
