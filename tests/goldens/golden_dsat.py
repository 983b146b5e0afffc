"""Record dsat searches on a formula and on a recorded grid; and submissions."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from normalization import normalized
from record import ROOT, inside

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.trial_spec import (
    TrialSpec,
    full_config,
    measuring_spec,
    search_config,
    training_command,
)
from dstrial.dsat.cli import build_parser, flags_of
from dstrial.dsat.config import read_config, with_parallel
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.driver import Driver
from dstrial.dsat.predictor.inputs import PredictInputs

_SEARCH_ID = "0123abcd"
_GRID = ROOT / "benchmarks" / "dsat_recorded" / "grid.json"
_TRIAL = "class MyTrial:\n    pass\n"
_FORMULA = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
_DSAT_CONFIGS = ("dsat_core_api", "dsat_hf", "dsat_trial")


class _Answering:
    """A search backend whose trials end at once with the outcome of a function."""

    num_parallel = 2

    def __init__(self, outcome_of: Callable[[int], Outcome]) -> None:
        self._outcome_of = outcome_of
        self._waiting: list[int] = []
        self.given: list[TrialSpec] = []
        self.results: Mapping[str, str] = {}

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        self.given.append(spec)
        self._waiting.append(spec.trial_id)
        return {"n": spec.trial_id}

    def adopt(self, _spec: TrialSpec, _handle: Mapping[str, Any]) -> bool:
        return False

    def poll(self) -> list[Ended]:
        """Return the result of the trial that was started first."""
        if not self._waiting:
            return []
        trial_id = self._waiting.pop(0)
        return [Ended(trial_id, self._outcome_of(trial_id), 10.0)]

    def running_s(self, _trial_id: int) -> float:
        return 0.0

    def kill(self, trial_id: int) -> None:
        raise AssertionError(f"trial {trial_id} is to be killed")

    def publish(self, _report: Callable[[], Mapping[str, Any]]) -> bool:
        return True

    def finish(self, results: Mapping[str, str]) -> None:
        self.results = dict(results)

    def close(self) -> None:
        pass

    def describe(self) -> str:
        return "a formula"


def search(scratch: Path) -> dict[str, str]:
    """Record a search by every method: its files, submitted trials and output."""
    files: dict[str, str] = {}
    formula = _experiment(scratch / "formula", _FORMULA, slots=8)
    for method in ("asha", "binary", "random"):
        words = [method, *formula, "-m", "throughput", "--max-trials", "8"]
        texts = _searched(words, _formula, None)
        kept = list(texts) if method == "asha" else ["events.jsonl"]
        files |= {f"{method}.{name}": texts[name] for name in kept}
    sys.path.append(str(ROOT / "benchmarks"))
    from dsat_grid import RecordedGrid

    grid = RecordedGrid.read(_GRID)
    ground = grid.ground(0)
    experiment = _experiment(scratch / "grid", grid.header["base"], slots=2)
    (scratch / "space.yaml").write_text(yaml.safe_dump(grid.header["extra"]))
    known = PredictInputs.from_json(json.loads(_GRID.with_name("grid-inputs.json").read_text()))
    inputs = dataclasses.replace(known, capacity_bytes=grid.cap_bytes, is_cpu=True)
    words = ["predict", *experiment, "-m", "throughput", "--space", "space.yaml", "--max-trials", "8"]
    with inside(scratch):  # the fingerprint includes the path of space.yaml
        texts = _searched(words, ground.outcome, inputs)
    files |= {f"predict.{name}": text for name, text in texts.items()}
    return {name: normalized(text, {str(scratch): "scratch"}) for name, text in files.items()}


def submissions(scratch: Path) -> dict[str, str]:
    """Record the configs and commands that dsat submits for the shipped experiments."""
    documents: dict[str, Any] = {}
    for name in _DSAT_CONFIGS:
        words = ["predict", f"experiment_configs/{name}.yaml", f"model_defs/{name}", "--output", str(scratch)]
        settings = read_config(flags_of(build_parser("dsat").parse_args(words)))
        own, smallest = settings.space.own(), settings.space.smallest()
        found = {
            "fingerprint": settings.fingerprint,
            "trial 1": measuring_spec(settings, own, 1, _SEARCH_ID),
            "trial 3": measuring_spec(settings, smallest, 3, _SEARCH_ID),
        }
        shown = {key: _spec(value) if isinstance(value, TrialSpec) else value for key, value in found.items()}
        shown["full"] = full_config(settings, smallest)
        shown["command of a local trial"] = training_command(settings, "CONFIG", "PYTHON")
        if settings.trial is not None:
            shown["search"] = _spec(search_config(settings, _SEARCH_ID))
        documents[name] = shown
    return {"submissions.json": json.dumps(documents, indent=1) + "\n"}


def _spec(spec: TrialSpec) -> dict[str, Any]:
    return {"label": spec.label, "config": spec.config, "hparams": spec.hparams}


def _experiment(folder: Path, base: Mapping[str, Any], slots: int) -> list[str]:
    """Write an experiment; return the paths of its config and model definition."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model_def.py").write_text(_TRIAL)
    (folder / "model" / "ds.json").write_text(json.dumps(base))
    config = {
        "name": "golden",
        "entrypoint": "model_def:MyTrial",
        "hyperparameters": {"deepspeed_config": "ds.json"},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
        "resources": {"slots_per_trial": slots},
    }
    path = folder / "golden.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path), str(folder / "model")]


def _searched(
    words: list[str],
    outcome_of: Callable[[Candidate], Outcome],
    inputs: PredictInputs | None,
) -> dict[str, str]:
    """Run a search to its end; return its files, submitted trials and output as texts."""
    output = Path(words[1]).parent / f"out-{words[0]}"
    settings = with_parallel(
        read_config(flags_of(build_parser("dsat").parse_args([*words, "--output", str(output)]))), 2
    )
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    told: list[str] = []
    with record.lock():
        if inputs is not None:
            record.append("inputs", {**inputs.to_json(), "seconds": 1.0})
        backend = _Answering(lambda trial_id: outcome_of(driver.trials[trial_id].candidate))
        driver = Driver(settings, record, inputs, lambda: backend, told.append, poll_s=0.0)
        driver.run([])
    files = {path.name: path.read_text() for path in sorted(output.iterdir()) if path.suffix != ".lock"}
    files["printed.txt"] = "".join(f"{line}\n" for line in told)
    files["submitted.json"] = json.dumps([_spec(spec) for spec in backend.given], indent=1) + "\n"
    files["kept.txt"] = "".join(f"{name}\n" for name in backend.results)
    return {name: normalized(text, {record.search_id: "search id"}) for name, text in files.items()}


def _formula(candidate: Candidate) -> Outcome:
    """Return the estimated result of 1.3 B parameters, bf16, Adam, 8 devices of 40 GB."""
    micro, stage = candidate.batch.micro_batch_size, candidate.stage
    peak = 1.3e9 * {0: 16, 1: 5.5, 2: 3.75, 3: 2.0}[stage] + micro * 1.1e9 + 3.2e9
    if peak > 40e9:
        return Failure(FailureKind.DEVICE_OOM, "out of memory", "forward", int(1.1e9))
    step_s = candidate.batch.accumulation * (0.02 + 0.011 * micro) * (1.2 if stage == 3 else 1.0)
    throughput = candidate.batch.train_batch_size / step_s
    return Measured(
        {
            "throughput": throughput,
            "latency": step_s * 1e6,
            "FLOPS_per_gpu": throughput * 1e12,
            "num_params": 1.3e9,
            "num_trainable_params": 1.3e9,
            "activation_bytes_per_record": 1.1e9,
            "device_memory_bytes": 40e9,
            "peak_memory_bytes": peak - 1.2e9,
        }
    )
