"""``dstrial doctor --train``: a short end-to-end test of training on this machine.

The test trains a small GPT and resumes it from a checkpoint. In the same ZeRO stage the losses must be bitwise equal; in
another stage they may differ by 1e-4. Then the test measures the speed of a larger GPT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from dstrial.visible_text import plural

RESULT_NAME = "result.json"  # file in `--output` with the results of all steps

StepStatus = Literal["ok", "failed", "not reached"]

_SAVED_AT, _END = 7, 12  # batches after which the small GPT is saved, and its training ends
_STAGE, _OTHER_STAGE = 1, 3  # ZeRO stages of the training, and of the second resume
# Maximum relative difference of losses in another ZeRO stage, which sums fp32 gradients in another order.
_STAGE_TOLERANCE = 1e-4
_MIN_MFU, _MAX_MFU = 0.05, 0.7  # fraction of the data sheet's peak, on accelerators
_MIN_STEP_S = 5.0  # minimum time left for starting a step
_ENDING_S = 10.0  # grace period for a launcher after Ctrl-C
_SHOWN_LINES = 40  # last lines of a failed step's output that are shown
# Linux's PR_SET_PDEATHSIG: if the doctor is killed, the launcher and its ranks end too.
_WITH_PARENT = """
import ctypes, runpy, sys
ctypes.CDLL(None).prctl(1, 15)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


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

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


class OutOfTimeError(StepFailedError):
    """The time limit of ``doctor --train`` was reached before or during a step."""

    def __init__(self, output: str = "") -> None:
        super().__init__("the time limit was reached; raise --minutes", output)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Kind and number of the devices on which ``doctor --train`` trains."""

    kind: str  # cpu, cuda or rocm
    num_ranks: int
    precision: str  # of the larger model's training
    is_roomy: bool = False  # whether every device has more than 40 GiB

    @classmethod
    def here(cls) -> Target:
        """Return what a proof trains on: up to 2 accelerators, or 2 CPU ranks if none."""
        try:
            hardware = within(30.0, devices.measure)
        except NoAnswerError as error:
            raise DstrialError(
                f"the driver of the devices gives {error}; `dstrial doctor` says more."
            ) from error
        visible, known = hardware.visible, hardware.devices
        if not visible:
            return cls("cpu", 2, "fp32")
        # CUDA uses only one MIG instance per process.
        is_mig = any(slot.visible_as.startswith("MIG") for slot in visible)
        has_bf16 = all(one.capability is None or one.capability >= (8, 0) for one in known)
        return cls(
            visible[0].kind,
            1 if is_mig else min(len(visible), 2),
            "bf16" if has_bf16 else "fp32",
            bool(known) and not is_mig and all(one.total_bytes > 40 << 30 for one in known),
        )

    def __str__(self) -> str:
        return f"{plural(self.num_ranks, 'rank')} on {'the CPU' if self.kind == 'cpu' else self.kind}"


class Proof:
    """Runs the steps of ``doctor --train``; shows and stores the result after each."""

    def __init__(
        self, target: Target, scratch: Path, output: Path | None, minutes: float, show: Callable[[Step], None]
    ) -> None:
        self._target, self._scratch, self._output, self._show = target, scratch, output, show
        self._ends_at_s = time.monotonic() + 60 * minutes
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}

    def run(self) -> None:
        if self._step("train and save", self._train):
            self._step("resume", lambda: self._resume(_STAGE, 0.0))
            self._step("reshape", lambda: self._resume(_OTHER_STAGE, _STAGE_TOLERANCE))
        self._step("speed and memory", self._speed)

    def _step(self, name: str, call: Callable[[], str]) -> bool:
        """Run a step and record its result; return whether it succeeded."""
        began_s = time.monotonic()
        status: StepStatus = "failed"
        output = ""
        try:
            what, status = call(), "ok"
        except StepFailedError as error:
            what, output = str(error), error.output
            status = "not reached" if isinstance(error, OutOfTimeError) else "failed"
        except (LookupError, OSError, ValueError) as error:  # an output file or line of the step is missing
            what = f"{type(error).__name__}: {error}"
        step = Step(name, status, what, round(time.monotonic() - began_s, 1), output)
        self.steps.append(step)
        if self._output is not None:
            replace_file(self._output / RESULT_NAME, json.dumps(self.to_json(), indent=2) + "\n")
        self._show(step)
        return status == "ok"

    def to_json(self) -> dict[str, Any]:
        steps = [dataclasses.asdict(step) for step in self.steps]
        return {"target": dataclasses.asdict(self._target), "steps": steps, "facts": self.facts}

    def _train(self) -> str:
        losses = _losses(self._launch("train", _STAGE))
        self.facts["losses"] = losses
        if sorted(losses) != list(range(1, _END + 1)) or not losses[_END] < losses[1]:
            raise StepFailedError(f"the loss does not fall in {_END} batches: {losses}")
        fell = f"loss {losses[1]:.4g} -> {losses[_END]:.4g}"
        return f"{_END} batches of ZeRO {_STAGE}, {self._target}: {fell}, saved at {_SAVED_AT}"

    def _resume(self, stage: int, bound: float) -> str:
        """Resume from the checkpoint in ZeRO ``stage``; return a line for the user.

        Raises:
            StepFailedError: losses are missing, or differ from the first training's by more than the relative ``bound``.
        """
        trained = list_checkpoints(self._run_directory("train").checkpoints_path)
        (checkpoint,) = [found.path for found in trained if found.steps_completed == _SAVED_AT]
        found = _losses(self._launch(f"stage-{stage}", stage, DSTRIAL_RESUME=str(checkpoint)))
        expected = {batch: loss for batch, loss in self.facts["losses"].items() if batch > _SAVED_AT}
        difference = max(
            abs(found.get(batch, math.inf) - loss) / abs(loss) for batch, loss in expected.items()
        )
        how = f"ZeRO {_STAGE}" + (f" -> {stage}" if stage != _STAGE else "")
        if set(found) != set(expected) or not difference <= bound:
            raise StepFailedError(
                f"{how}: losses after batch {_SAVED_AT} are {found}; expected {expected} within {bound:g}"
            )
        equal = "equal to the last bit" if bound == 0 else f"equal within {difference:.2g} (bound {bound:g})"
        return f"{how}: the losses of batches {_SAVED_AT + 1} to {_END} are {equal}"

    def _speed(self) -> str:
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
        return f"a GPT of {self._target.precision}, {self._target}\n{shown}"

    def _launch(self, name: str, stage: int, *, is_large: bool = False, **variables: str) -> RunDirectory:
        config = self._scratch / f"{name}.yaml"
        document = experiment(name, self._target, stage, is_large=is_large)
        config.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
        words = ["dstrial.launch", "--slots", str(self._target.num_ranks), "--config", str(config)]
        words += ["--trial", "dstrial.doctor.proof_trial:TextTrial"]
        self._run(words, name, **variables)
        return self._run_directory(name)

    def _run_directory(self, name: str) -> RunDirectory:
        (record,) = self._scratch.glob(f"runs/{name}/*/run.json")
        return RunDirectory.open(record.parent)

    def _run(self, words: Sequence[str], name: str, **variables: str) -> str:
        """Run ``python -m`` with arguments ``words``; return what the process prints.

        ``name`` names the log file; ``variables`` are additional environment variables.

        Raises:
            StepFailedError: the exit status is not 0, or the time limit is reached (``OutOfTimeError``).
        """
        left_s = self._ends_at_s - time.monotonic()
        if left_s < _MIN_STEP_S:
            raise OutOfTimeError
        log = (self._output or self._scratch) / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._scratch,
                env={**self._environment(), **variables},
                start_new_session=True,
            )
            try:
                exit_code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                raise OutOfTimeError(tail(log, _SHOWN_LINES)) from None
            finally:
                _end(process)
        if exit_code != 0:
            raise StepFailedError(
                f"`python -m {' '.join(words)}` ended with {exit_code}", tail(log, _SHOWN_LINES)
            )
        return log.read_text(encoding="utf-8", errors="replace")

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of a step's process.

        Inherited variables of ranks, dstrial and Determined are removed. ``PYTHONPATH`` has only absolute paths, with dstrial's
        first.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _RANK_VARIABLES and not name.startswith(("DSTRIAL_", "DET_"))
        }
        given = [Path(word).absolute() for word in kept.get("PYTHONPATH", "").split(os.pathsep) if word]
        kept["PYTHONPATH"] = os.pathsep.join(map(str, [Path(__file__).resolve().parents[2], *given]))
        kept["DSTRIAL_RUNS_DIR"] = str(self._scratch / "runs")
        kept["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # makes cuBLAS deterministic
        if self._target.kind == "cpu":
            # On busy cores, several torch threads are many times slower than one, because they wait for each other.
            kept |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}
        return kept


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


def experiment(name: str, target: Target, stage: int, *, is_large: bool = False) -> dict[str, Any]:
    """Return a step's experiment config, for a large GPT or a small deterministic GPT.

    Args:
        name: name of the experiment.
        target: the devices.
        stage: ZeRO stage.
        is_large: whether to train the large GPT, whose speed is measured.
    """
    shape: dict[str, Any] = {"dropout": 0.1}
    if is_large:
        width, num_layers, num_heads, block_size = (
            (128, 2, 4, 64) if target.kind == "cpu" else (1024, 16, 8, 1024)
        )
        shape = {"width": width, "num_layers": num_layers, "num_heads": num_heads, "block_size": block_size}
        shape["is_fused"] = True
    records = 16 if is_large and target.is_roomy else 4
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


def prove(*, minutes: float, output: Path | None, show: Callable[[Step], None]) -> dict[str, Any]:
    """Run all steps within ``minutes``; return the content of ``result.json``.

    ``output`` is a directory for that file and a log of each step; if None, no files remain.
    """
    output = None if output is None else output.absolute()
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as scratch:
        proof = Proof(Target.here(), Path(scratch), output, minutes, show)
        proof.run()
    return proof.to_json()
