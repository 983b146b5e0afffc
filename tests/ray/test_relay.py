"""Errors of the relay to Ray nodes, and of an environment without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dstrial.errors import MissingExtraError
from dstrial.master.backends.queued.ray import RayTransport
from dstrial.ray.client import require_ray


def _refusal(exit_code: int | None, errors: str) -> tuple[str, str]:
    found = RayTransport("4a99", Path("/run/relays")).start_problem(
        "10.0.0.2", "/venv/bin/python", exit_code, errors
    )
    return found.got, found.fix


def test_refusal_is_derived_from_ray_error() -> None:
    assert _refusal(None, "")[0] == "silent (Ray has started no actor there within 40 s)"
    assert "/venv/bin/python" in _refusal(127, "/venv/bin/python: No such file or directory\n")[0]
    assert "another kind of machine" in _refusal(127, "/venv/bin/python: Exec format error\n")[0]
    assert _refusal(255, "placement group 4a99 is over\n") == (
        "not the job's any more (placement group 4a99 is over)",
        "Nothing is to be done: another job is submitted.",
    )
    got, fix = _refusal(255, "the actor on 10.0.0.2 is gone: its node has died\n")
    assert got == ("not starting a program (exit code 255): the actor on 10.0.0.2 is gone: its node has died")
    assert "ray status" in fix


@pytest.mark.process
def test_relay_without_ray_connection_exits_with_error(tmp_path: Path) -> None:
    words = RayTransport("4a99", tmp_path / "relays").words("10.0.0.2", sys.executable)
    done = subprocess.run(words, input="", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (255, "")
    assert done.stderr == "dstrial is not connected to Ray (No such file or directory)\n"


def test_missing_ray_error_names_extra_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A directory named `ray` is not taken for the package.
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(
        MissingExtraError, match=r"backend: ray needs Ray.*pip install 'DSTRIAL_CHECKOUT_OR_WHEEL\[ray\]'"
    ):
        require_ray("backend: ray")
