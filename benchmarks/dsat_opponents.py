"""The opponents of the autotuner's benchmark, asked through lines of JSON. Runs in their own environment, without dstrial.

One line in begins a search (``SearchRequest`` of ``dsat_play``, as JSON). For every trial the opponent prints
``{"measure": <whole DeepSpeed config>, "profile": <bool>}`` and reads ``{"throughput": ..., "FLOPS_per_gpu": ...}``,
``{"failed": true}`` or, for a profile, the model's numbers. ``{"end": true}`` ends a search. None of the searching code is ours:

- ``determined-*``: ``determined.pytorch.dsat`` 0.37.0, its search-method classes fed with the searcher events that its
  master would send;
- ``deepspeed-*``: ``deepspeed.autotuning.tuner``, its classes' own ``tune()`` over the templates of
  ``deepspeed.autotuning``, with a resource manager that asks instead of launching;
- ``optuna``: ``TPESampler`` with default arguments over the same knobs as ours.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

_OUT = sys.stdout


def say(message: dict[str, Any]) -> None:
    """Print a line for the benchmark."""
    _OUT.write(json.dumps(message) + "\n")
    _OUT.flush()


def hear() -> dict[str, Any]:
    """Read a line of the benchmark's."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    return dict(json.loads(line))


def ask(config: dict[str, Any], *, is_profile: bool = False) -> dict[str, Any]:
    """Have a configuration measured."""
    say({"measure": config, "profile": is_profile})
    return hear()


# ---- determined.pytorch.dsat 0.37.0 --------------------------------------------------------------


def determined_search(request: dict[str, Any], method: str) -> None:
    """Play a search method of dsat 0.37.0."""
    import yaml
    from determined import searcher
    from determined.pytorch import dsat

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "ds.json").write_text(json.dumps(request["config"]), encoding="utf-8")
        experiment = {
            "name": "benchmark",
            "entrypoint": "python3 train.py",
            "hyperparameters": {"deepspeed_config": "ds.json"},
            "resources": {"slots_per_trial": request["slots"]},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 100}},
        }
        config_path = directory / "experiment.yaml"
        config_path.write_text(yaml.safe_dump(experiment), encoding="utf-8")
        arguments = [method, str(config_path), name, "-m", "throughput", "-r", str(request["seed"])]
        arguments += ["-mt", str(request["max_trials"]), "-mct", "1"]
        arguments += ["-z", *(str(stage) for stage in request["stages"])]
        args = dsat.get_full_parser().parse_args(arguments)
        args.experiment_id = 1
        search = dsat.get_search_method_class(method)(
            args=args, exp_config=dsat.get_custom_dsat_exp_conf_from_args(args)
        )
        state = searcher.SearcherState()
        waiting = list(search.initial_operations(state))
        while waiting:
            operation = waiting.pop(0)
            if isinstance(operation, searcher.Shutdown):
                break
            if isinstance(operation, searcher.Create):
                state.trials_created.add(operation.request_id)
                waiting += search.on_trial_created(state, operation.request_id)
            elif isinstance(operation, searcher.ValidateAfter):
                waiting += _validated(search, state, operation)
            elif isinstance(operation, searcher.Close):
                state.trials_closed.add(operation.request_id)
                waiting += search.on_trial_closed(state, operation.request_id)


def _validated(search: Any, state: Any, operation: Any) -> list[Any]:
    """Run a trial, and return what the method does when its master tells it of the end."""
    from determined import searcher
    from determined.pytorch.dsat import DSATModelProfileInfoTrial

    trial = search.trial_tracker[operation.request_id]
    answer = ask(trial.ds_config, is_profile=isinstance(trial, DSATModelProfileInfoTrial))
    if answer.get("failed"):
        state.failures.add(operation.request_id)
        state.trials_closed.add(operation.request_id)
        reason = searcher.ExitedReason.ERRORED
        after = list(search.on_trial_exited_early(state, operation.request_id, reason))
        return [*after, *search.on_trial_closed(state, operation.request_id)]
    return list(search.on_validation_completed(state, operation.request_id, answer, operation.length))


# ---- DeepSpeed's tuners --------------------------------------------------------------------------


class Asking:
    """What a tuner needs of DeepSpeed's resource manager; asks where that one launches."""

    def __init__(self, directory: Path) -> None:
        self.exps_dir = str(directory)
        self.finished_experiments: dict[int, tuple[dict[str, Any], str | None]] = {}
        self._scheduled: list[dict[str, Any]] = []
        self._values: dict[int, float] = {}
        self._count = 0

    def schedule_experiments(self, paths: list[str]) -> None:
        """Take files that ``write_experiments`` has written."""
        import hjson

        self._scheduled = [hjson.loads(Path(path).read_text(encoding="utf-8")) for path in paths]

    def run(self) -> None:
        """Have them measured."""
        for experiment in self._scheduled:
            self._count += 1
            config = {key: value for key, value in experiment["ds_config"].items() if key != "autotuning"}
            answer = ask(config)
            failed = "out of memory" if answer.get("failed") else None
            if failed is None:
                path = Path(self.exps_dir) / f"metrics_{self._count}.json"
                path.write_text(json.dumps(answer), encoding="utf-8")
                experiment["ds_config"]["autotuning"]["metric_path"] = str(path)
                self._values[self._count] = answer["throughput"]
            experiment["result_dir"] = self.exps_dir
            self.finished_experiments[self._count] = (experiment, failed)

    def parse_results(self, metric: str) -> tuple[dict[str, Any] | None, float | None]:
        """Return the best of what finished."""
        del metric
        best: tuple[dict[str, Any] | None, float | None] = (None, None)
        for number, (experiment, failed) in self.finished_experiments.items():
            value = self._values.get(number)
            if failed is None and value is not None and (best[1] is None or value > best[1]):
                best = experiment, value
        return best

    def clear(self) -> None:
        """Forget what finished."""
        self.finished_experiments = {}


def deepspeed_search(request: dict[str, Any], kind: str) -> None:
    """Play a tuner of DeepSpeed's over the combinations of its own templates."""
    import numpy as np
    from deepspeed.autotuning import constants, tuner

    random.seed(request["seed"])
    np.random.seed(request["seed"])
    templates = (
        constants.DEFAULT_TUNING_SPACE_ZERO_0,
        constants.DEFAULT_TUNING_SPACE_ZERO_1,
        constants.DEFAULT_TUNING_SPACE_ZERO_2,
        constants.DEFAULT_TUNING_SPACE_ZERO_3,
    )
    experiments, spaces = [], {}
    for stage in request["stages"]:
        zero = templates[stage]["zero_optimization"]
        lists = {key: value for key, value in zero.items() if isinstance(value, list)}
        spaces.update(lists)
        for values in itertools.product(*lists.values()):
            for batch in request["batches"][str(stage)]:
                config = copy.deepcopy(request["config"]) | batch
                config["zero_optimization"] = {"stage": stage, **dict(zip(lists, values, strict=True))}
                # Its cost model wants numbers at the same places in every configuration.
                for key in ("overlap_comm", "reduce_scatter", "contiguous_gradients", "allgather_partitions"):
                    config["zero_optimization"].setdefault(key, key != "overlap_comm")
                for key in ("reduce_bucket_size", "allgather_bucket_size"):
                    config["zero_optimization"].setdefault(key, 500_000_000)
                config["autotuning"] = {"enabled": True, "metric_path": ""}
                experiments.append({"name": f"e{len(experiments)}", "ds_config": config})
    with tempfile.TemporaryDirectory() as name:
        manager = Asking(Path(name))
        classes = {"grid": tuner.GridSearchTuner, "random": tuner.RandomTuner}
        if kind == "model":
            chosen = tuner.ModelBasedTuner(experiments, manager, "throughput", {"zero_optimization": spaces})
        else:
            chosen = classes[kind](experiments, manager, "throughput")
        chosen.tune(sample_size=1, n_trials=request["max_trials"], early_stopping=request["early_stopping"])


# ---- Optuna --------------------------------------------------------------------------------------


def optuna_search(request: dict[str, Any]) -> None:
    """Play Optuna's TPE over stages, live knobs and batches."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=request["seed"])
    )
    ask(request["config"])
    num_measured = 1
    while num_measured < request["max_trials"]:
        trial = study.ask()
        stage = trial.suggest_categorical("stage", request["stages"])
        config = copy.deepcopy(request["config"])
        zero: dict[str, Any] = {"stage": stage}
        for path, values in request["knobs"][str(stage)].items():
            name = f"{path} ({stage})"
            value = values[trial.suggest_categorical(name, list(range(len(values))))]
            section, _, key = path.partition(".")
            if key:
                zero.setdefault(section, {})[key] = value
            else:
                zero[section] = value
        batches = request["batches"][str(stage)]
        config |= batches[trial.suggest_int("batch", 0, len(batches) - 1)]
        config["zero_optimization"] = zero
        say({"measure": config, "profile": False})
        answer = hear()
        if answer.get("illegal"):
            # DeepSpeed would refuse it at once, so that it costs nothing here.
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        num_measured += 1
        study.tell(trial, answer.get("throughput", 0.0))


def main() -> None:
    """Answer requests until there are no more."""
    logging.disable(logging.CRITICAL)
    # DeepSpeed and Determined print; the benchmark reads only what we say.
    with contextlib.redirect_stdout(io.StringIO()):
        while True:
            request = hear()
            package, _, kind = request["opponent"].partition("-")
            if package == "determined":
                determined_search(request, kind)
            elif package == "deepspeed":
                deepspeed_search(request, kind)
            else:
                optuna_search(request)
            say({"end": True})


if __name__ == "__main__":
    main()
