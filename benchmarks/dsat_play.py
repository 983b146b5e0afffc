"""Play search methods on anything that answers what a configuration would measure, and count what it takes them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dstrial.config import merge_deepspeed
from dstrial.dsat.core.candidate import BatchSplit, Candidate
from dstrial.dsat.core.outcome import TIE, Failure, Measured, Outcome, relative_gain
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import (
    Action,
    ConfigSearch,
    Finish,
    Measure,
    MethodOptions,
    ReportFacts,
    measures,
)
from dstrial.dsat.predictor.profiles import PredictInputs
from dstrial.dsat.space.filters import Filters
from dstrial.dsat.space.space import Space, Structure
from dstrial.search.random_state import SearchRandom

METRIC = "throughput"
MAX_TRIALS = 64
"""dsat's default of ``--max-trials``, for everybody."""
DEEPSPEED_EARLY_STOPPING = 5
"""DeepSpeed's default of ``tuner_early_stopping``."""
_UNTIL_FAILURE_S = 5.0


class Ground(Protocol):
    """What searches are played on."""

    def outcome(self, candidate: Candidate) -> Outcome:
        """Measure a configuration."""

    def throughput(self, candidate: Candidate) -> float | None:
        """Return what a configuration is truly worth, samples/s; None if it does not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that trials take on all slots.

    Attributes:
        launch_s: from the decision to the first step of a launched trial: container, imports, model, engine.
        rebuild_s: the same in a living worker, for another engine.
        steps: optimizer steps of a measurement by dstrial: one to count, warm-up, windows, three for the phases.
        steps_of_others: of a trial of dsat 0.37 and of DeepSpeed's tuner, ``end_profile_step + 1``.
    """

    launch_s: float = 60.0
    rebuild_s: float = 10.0
    steps: int = 14
    steps_of_others: int = 6


@dataclasses.dataclass(slots=True)
class Played:
    """A search that was played to its end.

    Attributes:
        trials: (configuration, its outcome, seconds on all slots) in their order.
        best: what the search would return.
    """

    trials: list[tuple[Candidate, Outcome, float]] = dataclasses.field(default_factory=list)
    best: Candidate | None = None

    @property
    def num_out_of_memory(self) -> int:
        """How many trials ended for lack of memory."""
        return sum(
            1
            for _, outcome, _ in self.trials
            if isinstance(outcome, Failure) and outcome.kind.is_out_of_memory
        )

    @property
    def seconds(self) -> float:
        """Of all trials."""
        return sum(seconds for _, _, seconds in self.trials)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is to be searched.

    Attributes:
        space: of configurations.
        ground: what answers.
        slots: devices.
        num_params: of the model, for the time that building takes.
        inputs: what ``predict`` starts from.
        activation_bytes: of one record, as DeepSpeed's profile would say.
        device_bytes: memory of one device.
    """

    space: Space
    ground: Ground
    slots: int
    num_params: float
    inputs: PredictInputs | None
    activation_bytes: float
    device_bytes: float


class RandomLegal:
    """Plain random search: the user's own configuration, then legal ones, all equally likely; no trial twice."""

    def __init__(self, space: Space, options: MethodOptions, most_positions: int) -> None:
        self._space, self._options = space, options
        self._random = SearchRandom(options.seed)
        self._positions = most_positions
        self._seen = {space.own()}

    def start(self) -> list[Action]:
        """Measure the user's own configuration."""
        return [Measure(1, self._space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Draw another one."""
        del outcome
        if trial_id >= self._options.max_trials:
            return [Finish("all trials completed")]
        while True:
            stages = self._space.stages
            stage = stages[self._random.integer_below(len(stages))]
            settings = [
                (knob.path, knob.values[self._random.integer_below(len(knob.values))])
                for knob in self._space.knobs(stage)
            ]
            structure = Structure(stage, tuple(sorted(settings)))
            candidate = self._space.candidate(structure, self._random.integer_below(self._positions))
            if candidate not in self._seen and self._space.illegal_reason(candidate) is None:
                self._seen.add(candidate)
                return [Measure(trial_id + 1, candidate, "drawn")]

    def snapshot(self) -> dict[str, Any]:
        """Nothing is kept here."""
        return {}

    def report_facts(self) -> ReportFacts:
        """Nothing is predicted here."""
        return ReportFacts()


def positions(problem: Problem) -> int:
    """Return how many positions of the ladder could fit by activations alone; all that a fixed batch has."""
    ladder = problem.space.batch_size_grid
    return 1 + min(ladder.last, ladder.position(problem.device_bytes / problem.activation_bytes))


def play_ours(problem: Problem, name: str, seed: int, cost: Cost, *, max_trials: int = MAX_TRIALS) -> Played:
    """Play ``predict``, ``asha``, ``binary``, ``random`` (``-no-gates``), or ``random-legal``."""
    space = problem.space
    options = MethodOptions(metric=METRIC, max_trials=max_trials, seed=seed)
    method: ConfigSearch
    if name == "random-legal":
        method = RandomLegal(space, options, positions(problem))
    else:
        base, _, no_gates = name.partition("-")
        method = search_method(base, space, options, Filters(space, disabled=bool(no_gates)), problem.inputs)
    played, waiting, is_living = Played(), [], False
    actions = method.start()
    while True:
        waiting += measures(actions)
        if not waiting or any(isinstance(action, Finish) for action in actions):
            break
        measure = waiting.pop(0)
        outcome = problem.ground.outcome(measure.candidate)
        begin_s = cost.rebuild_s + 1e-9 * problem.num_params if is_living else cost.launch_s
        seconds = begin_s + _steps_s(outcome, cost.steps)
        played.trials.append((measure.candidate, outcome, seconds))
        # Ranks are respawned after an out-of-memory error; only predict's worker lives on.
        is_living = name == "predict" and isinstance(outcome, Measured)
        actions = method.on_result(measure.trial_id, outcome)
    played.best = _best(played, has_own=True)
    return played


def _steps_s(outcome: Outcome, steps: int) -> float:
    return steps * outcome.metrics["latency"] * 1e-6 if isinstance(outcome, Measured) else _UNTIL_FAILURE_S


def _best(played: Played, *, has_own: bool) -> Candidate | None:
    scored = [
        (outcome.metrics[METRIC], candidate)
        for candidate, outcome, _ in played.trials
        if isinstance(outcome, Measured)
    ]
    if not scored:
        return None
    value, best = max(scored, key=lambda pair: pair[0])
    own = next((worth for worth, candidate in scored if candidate.is_own), None)
    if has_own and own is not None and relative_gain(value, own) <= TIE:
        return next(candidate for _, candidate in scored if candidate.is_own)
    return best


# ---- opponents in their own environment ----------------------------------------------------------


class Opponents:
    """The process in which opponents run.

    Args:
        python: interpreter of the environment that ``dsat_opponents_env.py`` has made.
    """

    def __init__(self, python: Path) -> None:
        program = Path(__file__).with_name("dsat_opponents.py")
        self._process = subprocess.Popen(
            [python, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def play(
        self, problem: Problem, name: str, seed: int, cost: Cost, *, max_trials: int = MAX_TRIALS
    ) -> Played:
        """Play ``determined-asha`` and the like.

        Raises:
            RuntimeError: the opponent died.
        """
        self._say(_request(problem, name, seed, max_trials))
        played = Played()
        steps = cost.steps if name == "optuna" else cost.steps_of_others
        while True:
            message = self._hear(name)
            if message.get("end"):
                played.best = _best(played, has_own=False)
                return played
            candidate = candidate_of(problem.space, message["measure"])
            if name == "optuna" and problem.space.illegal_reason(candidate) is not None:
                self._say({"illegal": True})
                continue
            outcome = problem.ground.outcome(candidate)
            seconds = cost.launch_s + _steps_s(outcome, steps)
            played.trials.append((candidate, outcome, seconds))
            self._say(_answer(problem, outcome, is_profile=message["profile"]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self, name: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended with status {self._process.wait()}; expected an answer.")
        return dict(json.loads(line))


def _request(problem: Problem, name: str, seed: int, max_trials: int) -> dict[str, Any]:
    space = problem.space
    own = space.own().batch
    config = merge_deepspeed(space.base, {"train_micro_batch_size_per_gpu": own.micro_batch_size})
    config |= dataclasses.asdict(own) | {"gradient_accumulation_steps": own.accumulation}
    config = {key: value for key, value in config.items() if key not in ("micro_batch_size", "accumulation")}
    return {
        "opponent": name,
        "seed": seed,
        "max_trials": max_trials,
        "early_stopping": DEEPSPEED_EARLY_STOPPING,
        "config": config,
        "slots": problem.slots,
        "stages": list(space.stages),
        "knobs": {
            str(stage): {
                knob.path.removeprefix("zero_optimization."): list(knob.values) for knob in space.knobs(stage)
            }
            for stage in space.stages
        },
        "batches": {str(stage): _batches(problem, stage, name) for stage in space.stages},
    }


def _batches(problem: Problem, stage: int, name: str) -> list[dict[str, int]]:
    """What may be tried of a stage: all that activations allow, or for DeepSpeed's tuners three near the largest that runs.

    DeepSpeed's autotuner finds that one by running; here it is told for nothing.
    """
    space, chosen = problem.space, list(range(positions(problem)))
    if name.startswith("deepspeed"):
        plain = Structure(stage, ())
        runs = [at for at in chosen if problem.ground.throughput(space.candidate(plain, at)) is not None]
        largest = space.batch_size_grid.split(max(runs, default=0)).micro_batch_size
        chosen = sorted({space.batch_size_grid.position(largest * share) for share in (0.5, 0.75, 1.0)})
    return [
        {
            "train_batch_size": split.train_batch_size,
            "train_micro_batch_size_per_gpu": split.micro_batch_size,
            "gradient_accumulation_steps": split.accumulation,
        }
        for split in (space.batch_size_grid.split(position) for position in chosen)
    ]


def _answer(problem: Problem, outcome: Outcome, *, is_profile: bool) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failed": True}
    if is_profile:
        metrics = outcome.metrics
        return {
            "num_params": int(metrics["num_params"]),
            "trainable_num_params": int(metrics["num_trainable_params"]),
            "activation_mem_per_gpu": int(metrics["activation_bytes_per_record"]),
            "gpu_mem": int(problem.device_bytes),
        }
    names = ("throughput", "FLOPS_per_gpu", "latency")
    return {name: outcome.metrics[name] for name in names if name in outcome.metrics}


def candidate_of(space: Space, config: Mapping[str, Any]) -> Candidate:
    """Return a whole DeepSpeed config as a candidate."""
    zero = config.get("zero_optimization", {})
    settings = []
    for key, value in zero.items():
        path = f"zero_optimization.{key}"
        if isinstance(value, Mapping):
            settings += [(f"{path}.{inner}", each) for inner, each in value.items()]
        elif key not in ("stage", "allgather_partitions"):
            settings.append((path, int(value) if isinstance(value, float) and value >= 1000 else value))
    stage = int(zero.get("stage", 0))
    paths = {knob.path for knob in space.knobs(stage)}
    batch = BatchSplit(
        int(config["train_micro_batch_size_per_gpu"]),
        int(config["gradient_accumulation_steps"]),
        int(config["train_batch_size"]),
    )
    return Candidate(stage, tuple(sorted(pair for pair in settings if pair[0] in paths)), batch)
