"""``dstrial doctor --train``: a short end-to-end test of training on this machine.

It trains a small GPT, resumes it in the same ZeRO stage (bitwise equal) and another stage, and measures a larger GPT's speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dstrial.doctor import devices
from dstrial.doctor.finding import NoAnswerError, within
from dstrial.errors import DstrialError
from dstrial.file_writes import replace_file
from dstrial.launch.output import tail
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.json_files import read_json_lines
from dstrial.local.run_directory import RunDirectory
from dstrial.telemetry.summary import summary_rows

RESULT_NAME = "result.json"

StepStatus = Literal["ok", "failed", "not reached"]

_SAVED_AT, _END = 7, 12  # batches
_STAGE, _OTHER_STAGE = 1, 3
# Maximum relative difference of losses in another ZeRO stage, which sums fp32 gradients in another order.
_STAGE_TOLERANCE = 1e-4
_MIN_MFU, _MAX_MFU = 0.05, 0.7  # fraction of the data sheet's peak, on accelerators
_MIN_STEP_S = 5.0  # minimum time left for starting a step
_ENDING_S = 10.0  # grace period for a launcher after Ctrl-C
_SHOWN_LINES = 40
# Linux's PR_SET_PDEATHSIG: if the doctor is killed, the launcher and its ranks end too.
_WITH_PARENT = """
import ctypes, runpy, sys
ctypes.CDLL(None).prctl(1, 15)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_SMALL = {"width": 128, "num_layers": 2, "num_heads": 4, "block_size": 64, "is_fused": True}
_LARGE = {"width": 1024, "num_layers": 16, "num_heads": 8, "block_size": 1024, "is_fused": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of ``doctor --train`` and its result, as in ``result.json``."""

    name: str
    status: StepStatus
    what: str
    seconds: float
    output: str = ""  # last output lines of a failed step


class StepFailedError(Exception):
    """A step of ``doctor --train`` failed, found a wrong result, or was not reached."""

    def __init__(self, reason: str, output: str = "", status: StepStatus = "failed") -> None:
        super().__init__(reason)
        self.output, self.status = output, status


def _out_of_time(output: str = "") -> StepFailedError:
    return StepFailedError("the time limit was reached; raise --minutes", output, "not reached")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Kind and number of the devices on which ``doctor --train`` trains."""

    kind: str  # cpu, cuda or rocm
    num_ranks: int
    precision: str  # of the larger model's training
    is_roomy: bool = False  # whether every device has more than 40 GiB

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Target:
        """Choose 1 or 2 accelerators of this machine, or else 2 CPU ranks."""
        try:
            hardware = within(30.0, devices.measure)
        except NoAnswerError as error:
            raise DstrialError(
                f"the driver of the devices gives {error}; `dstrial doctor` says more."
            ) from error
        seen = set(devices.visible(hardware, environ)[0])
        if environ.get("DS_ACCELERATOR") == "cpu" or not (seen or hardware.num_amd):
            return cls("cpu", 2, "fp32")
        if not seen:
            return cls("rocm", min(hardware.num_amd, 2), "bf16")
        chosen = [one for one in hardware.devices if {one.uuid, *one.mig_uuids} & seen]
        has_bf16 = all(one.capability is None or one.capability >= (8, 0) for one in chosen)
        is_roomy = all(one.total_bytes > 40 << 30 and not one.is_mig for one in chosen)
        # CUDA uses only one MIG instance per process.
        num_ranks = 1 if any(one.is_mig for one in chosen) else min(len(seen), 2)
        return cls("cuda", num_ranks, "bf16" if has_bf16 else "fp32", is_roomy)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"{ranks} on {'the CPU' if self.kind == 'cpu' else self.kind}"


class Proof:
    """Runs the steps of ``doctor --train``; shows and stores each result at once."""

    def __init__(
        self, target: Target, scratch: Path, output: Path | None, minutes: float, show: Callable[[Step], None]
    ) -> None:
        self._target, self._scratch, self._output, self._show = target, scratch, output, show
        self._ends_at_s = time.monotonic() + 60 * minutes
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}

    def run(self) -> None:
        trained = self._step("train and save", self._train)
        if trained is not None:
            self._step("resume", lambda: self._resume(trained, _STAGE, 0.0))
            self._step("reshape", lambda: self._resume(trained, _OTHER_STAGE, _STAGE_TOLERANCE))
        self._step("speed and memory", self._speed)

    def _step(self, name: str, call: Callable[[], tuple[str, Any]]) -> Any:
        """Run a step and record its result; return its value, or None if it failed."""
        began_s = time.monotonic()
        status: StepStatus = "failed"
        found, output = None, ""
        try:
            what, found = call()
            status = "ok"
        except StepFailedError as error:
            status, what, output = error.status, str(error), error.output
        except (LookupError, OSError, ValueError) as error:  # an output file or line of the step is missing
            what = f"{type(error).__name__}: {error}"
        step = Step(name, status, what, round(time.monotonic() - began_s, 1), output)
        self.steps.append(step)
        if self._output is not None:
            replace_file(self._output / RESULT_NAME, json.dumps(self.to_json(), indent=2) + "\n")
        self._show(step)
        return found

    def to_json(self) -> dict[str, Any]:
        steps = [dataclasses.asdict(step) for step in self.steps]
        return {"target": dataclasses.asdict(self._target), "steps": steps, "facts": self.facts}

    def _train(self) -> tuple[str, RunDirectory]:
        run = self._launch("train", _STAGE)
        losses = _losses(run)
        if sorted(losses) != list(range(1, _END + 1)) or not all(map(math.isfinite, losses.values())):
            raise StepFailedError(f"the losses of {_END} batches are {list(losses.values())}")
        if not losses[_END] < losses[1]:
            raise StepFailedError(f"the loss does not fall: {losses[1]:g} -> {losses[_END]:g}")
        self.facts["losses"] = losses
        fell = f"loss {losses[1]:.4g} -> {losses[_END]:.4g}"
        return f"{_END} batches of ZeRO {_STAGE}, {self._target}: {fell}, saved at {_SAVED_AT}", run

    def _resume(self, trained: RunDirectory, stage: int, bound: float) -> tuple[str, None]:
        """Resume in ZeRO ``stage``; require losses within relative ``bound`` (0: bitwise)."""
        checkpoint = _checkpoint_at(trained, _SAVED_AT)
        run = self._launch(f"stage-{stage}", stage, DSTRIAL_RESUME=str(checkpoint))
        expected = {batch: loss for batch, loss in _losses(trained).items() if batch > _SAVED_AT}
        found = _losses(run)
        difference = max(
            (abs(found.get(batch, math.inf) - loss) / abs(loss) for batch, loss in expected.items()),
            default=math.inf,
        )
        how = f"ZeRO {_STAGE}" + (f" -> {stage}" if stage != _STAGE else "")
        if set(found) != set(expected) or not difference <= bound:
            raise StepFailedError(
                f"{how}: losses after batch {_SAVED_AT} are {found}; expected {expected} within {bound:g}"
            )
        equal = "equal to the last bit" if bound == 0 else f"equal within {difference:.2g} (bound {bound:g})"
        return f"{how}: the losses of batches {_SAVED_AT + 1} to {_END} are {equal}", None

    def _speed(self) -> tuple[str, None]:
        run = self._launch("speed", _STAGE, is_large=True)
        telemetry = json.loads(run.telemetry_path.read_text(encoding="utf-8"))
        self.facts["telemetry"] = telemetry
        mfu = telemetry.get("mfu")
        if mfu is not None and not _MIN_MFU <= mfu <= _MAX_MFU:
            raise StepFailedError(
                f"MFU is {mfu:.3g}; expected {_MIN_MFU:g} to {_MAX_MFU:g}. See whether others use the device (nvidia-smi), "
                "and whether its clocks are limited."
            )
        shown = "\n".join(f"  {name:<15}{text}" for name, text in summary_rows(telemetry))
        return f"a GPT of {self._target.precision}, {self._target}\n{shown}", None

    def _launch(self, name: str, stage: int, *, is_large: bool = False, **variables: str) -> RunDirectory:
        config = self._scratch / f"{name}.yaml"
        document = experiment(name, self._target, stage, is_large=is_large)
        config.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
        words = ["dstrial.launch", "--slots", str(self._target.num_ranks), "--config", str(config)]
        words += ["--trial", "dstrial.doctor.proof_trial:TextTrial"]
        self._run(words, name, **variables)
        (record,) = self._scratch.glob(f"runs/{name}/*/run.json")
        return RunDirectory.open(record.parent)

    def _run(self, words: Sequence[str], name: str, **variables: str) -> str:
        """Run ``python -m`` with ``words`` and environment variables; return the output."""
        left_s = self._ends_at_s - time.monotonic()
        if left_s < _MIN_STEP_S:
            raise _out_of_time()
        log = (self._output or self._scratch) / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._scratch,
                env={
                    **_environment(os.environ, self._target.kind),
                    "DSTRIAL_RUNS_DIR": str(self._scratch / "runs"),
                    **variables,
                },
                start_new_session=True,
            )
            try:
                exit_code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                raise _out_of_time(tail(log, _SHOWN_LINES)) from None
            finally:
                _end(process)
        if exit_code != 0:
            raise StepFailedError(
                f"`python -m {' '.join(words)}` ended with {exit_code}", tail(log, _SHOWN_LINES)
            )
        return log.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for _ in range(2):  # a second Ctrl-C kills the ranks
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(environ: Mapping[str, str], kind: str) -> dict[str, str]:
    """Return the environment without variables of ranks and runs, with absolute paths."""
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in ranks and (not name.startswith(("DSTRIAL_", "DET_")) or name == "DSTRIAL_SHARE_DEVICE")
    }
    own = str(Path(__file__).resolve().parents[2])
    given = [str(Path(word).absolute()) for word in kept.get("PYTHONPATH", "").split(os.pathsep) if word]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([own, *given]))
    kept["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # makes cuBLAS deterministic
    if kind == "cpu":
        # On busy cores, several torch threads are many times slower than one, because they wait for each other.
        kept |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}
    return kept


def experiment(name: str, target: Target, stage: int, *, is_large: bool = False) -> dict[str, Any]:
    """Return a step's experiment config: a large GPT, or a small deterministic one."""
    shape: dict[str, Any] = {"dropout": 0.1}
    records = 4
    if is_large:
        shape = _SMALL if target.kind == "cpu" else _LARGE
        records = 16 if target.is_roomy else 4
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": records,
        "gradient_accumulation_steps": 1,
        # Does not need a compiled operator.
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        # DeepSpeed's default buckets of 500 million elements would exceed the models' memory.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }
    if is_large and target.precision == "bf16":
        config["bf16"] = {"enabled": True}
    num_batches = 28 if is_large else _END
    return {
        "name": name,
        "entrypoint": "python3 -m dstrial.launch --trial dstrial.doctor.proof_trial:TextTrial",
        "hyperparameters": {
            "deepspeed_config": config,
            "shape": shape,
            "num_blocks": 64 * records,
            "is_deterministic": not is_large,
        },
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "smaller_is_better": True,
            "max_length": {"batches": num_batches},
        },
        "resources": {"slots_per_trial": target.num_ranks},
        "scheduling_unit": num_batches // 2 if is_large else 1,
        "min_checkpoint_period": {"batches": num_batches if is_large else _SAVED_AT},
        "reproducibility": {"experiment_seed": 3},
        "max_restarts": 0,
        # No fork server, which would outlive its launcher if an import hangs.
        "data": {"dstrial": {"warm": False}},
    }


def _losses(run: RunDirectory) -> dict[int, float]:
    return {
        int(row["steps_completed"]): float(row["metrics"]["loss"])
        for row in read_json_lines(run.metrics_path)
        if row["group"] == "training"
    }


def _checkpoint_at(run: RunDirectory, batch: int) -> Path:
    for found in list_checkpoints(run.checkpoints_path):
        if found.steps_completed == batch:
            return found.path
    raise StepFailedError(f"there is no complete checkpoint of batch {batch} in {run.checkpoints_path}")


def prove(*, minutes: float, output: Path | None, show: Callable[[Step], None]) -> dict[str, Any]:
    """Run all steps within ``minutes``; return the content of ``result.json``.

    ``output`` is a directory for that file and a log of each step; if None, nothing is kept.
    """
    if output is not None:
        output = output.absolute()
    scratch = Path(tempfile.mkdtemp(prefix="doctor-"))
    try:
        proof = Proof(Target.here(os.environ), scratch, output, minutes, show)
        proof.run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return proof.to_json()
