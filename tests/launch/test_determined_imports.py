"""Redirection of imports such as `determined.pytorch.deepspeed` to dstrial."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstrial import determined_imports

pytestmark = pytest.mark.process

SHOW = """
import json, sys
import determined.pytorch.deepspeed as ds
from determined.pytorch.deepspeed import _mpu, _deepspeed_context, _deepspeed_trial, _trainer
import dstrial

names = ["DeepSpeedTrial", "DeepSpeedTrialContext", "ModelParallelUnit", "Trainer", "init", "overwrite_deepspeed_config",
         "make_data_parallel_mpu", "make_deepspeed_mpu", "DeepSpeedTrialController"]
print(json.dumps({
    "homes": {name: getattr(ds, name).__module__.split(".")[0] for name in names},
    "submodules": [_mpu.ModelParallelUnit is ds.ModelParallelUnit, _trainer.Trainer is ds.Trainer,
                   _deepspeed_trial.DeepSpeedTrial is ds.DeepSpeedTrial,
                   _deepspeed_context.DeepSpeedTrialContext is ds.DeepSpeedTrialContext],
    "name": ds.__name__, "spec": ds.__spec__.name, "dstrial": dstrial.__spec__.name,
    "pytorch_trial": __import__("determined.pytorch").pytorch.PyTorchTrial.__module__.split(".")[0],
}))
"""
DSAT = """
from determined.pytorch import dsat
from determined.pytorch.dsat import dsat_reporting_context, get_ds_config_from_hparams, get_hf_args_with_overwrites
print(dsat.__name__, dsat_reporting_context.__module__, get_ds_config_from_hparams.__module__)
"""
SHOW_ALL_AND_START_CHILD = f"""
{SHOW}
{DSAT}
sys.stdout.flush()
import subprocess
child = "import determined.pytorch.deepspeed as d; print(d.Trainer.__module__)"
subprocess.run([sys.executable, "-c", child], check=True)
"""
OWN = """
import traceback
import determined.pytorch.deepspeed as d
try:
    from determined.pytorch import dsat
except ImportError:
    traceback.print_exc()
print(d.Trainer.__module__)
"""


def started_by_dstrial(**variables: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name != determined_imports.VARIABLE}
    environ |= variables
    return environ | determined_imports.variables(environ)


def run(
    source: str, environ: dict[str, str], *, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(arguments or ("-c", source))],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the program's own output, which follows DeepSpeed's messages."""
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def process_outputs() -> subprocess.CompletedProcess[str]:
    """Output of a process started by dstrial, followed by that of its child."""
    done = run(SHOW_ALL_AND_START_CHILD, started_by_dstrial())
    assert done.returncode == 0, done.stderr
    return done


def test_determined_deepspeed_names_resolve_to_dstrial(
    process_outputs: subprocess.CompletedProcess[str],
) -> None:
    (line,) = [line for line in process_outputs.stdout.splitlines() if line.startswith("{")]
    shown = json.loads(line)
    assert shown["homes"].pop("DeepSpeedTrialController") == "determined"  # defined in the redirected module
    assert set(shown["homes"].values()) == {"dstrial"}
    assert all(shown["submodules"])
    assert shown["name"] == shown["spec"] == "determined.pytorch.deepspeed"
    assert shown["dstrial"] == "dstrial"
    assert shown["pytorch_trial"] == "determined"


def test_import_redirection_is_logged_with_its_switch(
    process_outputs: subprocess.CompletedProcess[str],
) -> None:
    told = [line for line in process_outputs.stderr.splitlines() if "determined_imports" in line]
    assert len(told) == 1
    assert "data.dstrial.determined_imports: false" in told[0]
    assert last_line(process_outputs) == "dstrial.trainer"


@pytest.mark.parametrize("is_switched_off", [False, True])
def test_determined_stays_unchanged_outside_dstrial_or_disabled(is_switched_off: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if name != determined_imports.VARIABLE}
    if is_switched_off:
        environ = started_by_dstrial(**{determined_imports.VARIABLE: "0"})
    done = run(OWN, environ)

    assert done.returncode == 0, done.stderr
    assert last_line(done) == "determined.pytorch.deepspeed._trainer"
    assert "determined_imports" not in done.stderr
    if is_switched_off:
        assert (
            "No module named 'determined.pytorch.dsat'" in done.stderr
            or "cannot import name 'dsat'" in done.stderr
        )


def test_determined_dsat_imports_are_provided(process_outputs: subprocess.CompletedProcess[str]) -> None:
    homes = "determined.pytorch.dsat dstrial.dsat.rank.context dstrial.dsat.compat"
    assert homes in process_outputs.stdout.splitlines()
    shown = run("", started_by_dstrial(), arguments=("-m", "determined.pytorch.dsat", "--help"))
    assert shown.returncode == 0, shown.stderr
    assert "asha" in shown.stdout


def test_import_redirection_is_disabled_by_experiment_config() -> None:
    config = {"data": {"dstrial": {"determined_imports": False}}}
    assert determined_imports.variables({}, config)[determined_imports.VARIABLE] == "0"
    assert (
        determined_imports.variables({determined_imports.VARIABLE: "1"}, config)[determined_imports.VARIABLE]
        == "1"
    )
    assert determined_imports.variables({}, {"data": None})[determined_imports.VARIABLE] == "1"


def test_sitecustomize_directory_is_first_and_once_on_pythonpath() -> None:
    once = determined_imports.variables({"PYTHONPATH": "/a"})
    again = determined_imports.variables({"PYTHONPATH": once["PYTHONPATH"]})
    directory, rest = once["PYTHONPATH"].split(os.pathsep)
    assert (Path(directory) / "sitecustomize.py").is_file()
    assert rest == "/a"
    assert again["PYTHONPATH"] == once["PYTHONPATH"]
