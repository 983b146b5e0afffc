"""The command line of ``dstrial dsat``: flags, defaults, types and problems."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from searching import settings_of, write_experiment

from dstrial import dsat
from dstrial.cli import app
from dstrial.dsat import __main__ as dsat_module
from dstrial.dsat import compat
from dstrial.dsat.backends import trial_spec
from dstrial.dsat.backends.trial_spec import training_command
from dstrial.dsat.cli import build_parser, with_method
from dstrial.errors import ConfigError

BASE: dict[str, object] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}


def _parse(*words: str) -> argparse.Namespace:
    return build_parser("dsat").parse_args(list(words))


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return _write(tmp_path, BASE)


def _write(directory: Path, base: dict[str, object] | None = None, **changes: object) -> Path:
    usual = {
        "hyperparameters": {"deepspeed_config": "ds.json", "lr": 0.1},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 10}},
        "max_restarts": 5,
        "min_validation_period": {"epochs": 1},
    }
    return write_experiment(directory, base, **{**usual, **changes})


OLD_DEFAULTS = {
    "max_trials": 64,
    "max_slots": None,
    "max_concurrent_trials": None,
    "metric": "FLOPS_per_gpu",
    "run_full_experiment": False,
    "start_profile_step": 3,
    "end_profile_step": 5,
    "random_seed": 42,
    "search_runner_config": None,
    "max_search_runner_restarts": None,
}


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_flags_without_values_have_old_defaults(method: str) -> None:
    args = _parse(method, "exp.yaml", ".")

    assert {name: getattr(args, name) for name in OLD_DEFAULTS} == OLD_DEFAULTS
    assert tuple(args.zero_stages) == (1, 2, 3)


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("asha", {"max-rungs": 4, "min-binary-search-trials": 2, "divisor": 3, "asha-early-stopping": 1}),
        ("asha", {"search-range-factor": 2.0, "max-trials": 5, "max-slots": 8, "max-concurrent-trials": 2}),
        ("asha", {"metric": "latency", "zero-stages": [3], "start-profile-step": 1, "end-profile-step": 9}),
        ("asha", {"random-seed": 7, "search-runner-config": "r.yaml", "max-search-runner-restarts": 0}),
        ("asha", {"include": ["a.py"]}),
        ("binary", {"search-range-factor": 1.5}),
        ("random", {"trials-per-random-config": 7, "early-stopping": 9}),
        ("predict", {"train-batch-size": 64, "space": "s.yaml", "output": "o", "sample-batch": 8}),
        ("plan", {"sample-batch": "batch.pt"}),
    ],
)
def test_flags_parse_in_both_spellings(method: str, flags: dict[str, object]) -> None:
    for flag, value in flags.items():
        name = flag.replace("-", "_")
        (text,) = value if isinstance(value, list) else [value]
        for spelling in (f"--{flag}", f"--{name}"):
            found = getattr(_parse(method, "exp.yaml", ".", spelling, str(text)), name)
            assert found == value
            assert type(found) is type(value)


def test_short_flags_and_switches_parse() -> None:
    words = "-mt 3 -ms 4 -mct 1 -m throughput -z 0 2 -r 1 --run_full_experiment"
    args = _parse("asha", "exp.yaml", ".", *words.split())

    found = args.max_trials, args.max_slots, args.max_concurrent_trials, args.metric
    assert found == (3, 4, 1, "throughput")
    assert (args.zero_stages, args.random_seed, args.run_full_experiment) == ([0, 2], 1, True)
    assert _parse("asha", "e", ".", "--free_batch", "--local", "--fresh").free_batch


def test_read_config_collects_all_problems(experiment: Path) -> None:
    path = _write(experiment.parent, entrypoint="python3 train.py --deepspeed x.json")
    wrong = "--max-slots 1 --start-profile-step 7 --include nothing.py --space none.yaml"

    with pytest.raises(ConfigError) as error:
        settings_of(path, *wrong.split())

    places = [problem.where for problem in error.value.problems]
    assert set(wrong.split()[::2]) <= {place.partition(" ")[0] for place in places}
    assert any(place.endswith("entrypoint") for place in places)


@pytest.mark.parametrize(
    "words",
    ["--max-trials 0", "--divisor 1", "--search-range-factor 0", "--measure-seconds -1"],
)
def test_number_out_of_range_is_wrong_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("asha", "exp.yaml", ".", *words.split())

    assert re.search(f"argument .*{words.split()[0]}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        *(
            ("budget", text, seconds)
            for text, seconds in {"30m": 1800, "90s": 90, "1h30m": 5400, "45": 45}.items()
        ),
        *(("budget", text, None) for text in ("", "0s", "-3m", "soon")),
        ("device-memory", "80GiB", 80 * 2**30),
        ("device-memory", "24G", 24 * 10**9),
        ("device-memory", "512 MiB", 2**29),
        ("device-memory", "1000", 1000),
        *(("device-memory", text, None) for text in ("", "lots", "0")),
    ],
)
def test_durations_and_sizes_parse_with_units_only(
    flag: str, text: str, value: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("predict" if flag == "budget" else "plan", "exp.yaml", ".", f"--{flag}={text}")
    if value is not None:
        assert getattr(_parse(*words), flag.replace("-", "_")) == value
        return
    with pytest.raises(SystemExit):
        _parse(*words)
    expected = {"budget": "expected a length of time", "device-memory": "expected 80GiB"}
    assert expected[flag] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--deepspeed", "--deepspeed ds.json", "--deepspeed --local", "--deepspeed_config=ds.json"]
)
def test_entrypoint_deepspeed_flag_bare_or_equal_is_accepted(experiment: Path, flag: str) -> None:
    path = _write(experiment.parent, entrypoint=f"python3 -m dstrial.launch train.py {flag}")

    assert settings_of(path).trial is None


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m dstrial.launch train.py --deepspeed ds.json",
        "python3 -m determined.launch.deepspeed -- train.py --deepspeed ds.json",
        "python3 -m determined.launch.torch_distributed train.py --deepspeed ds.json",
        "python3 -m determined.launch.torch_distributed -- python3 train.py --deepspeed ds.json",
        "python3 train.py --deepspeed ds.json",
    ],
)
def test_local_command_of_script_uses_launcher(experiment: Path, entrypoint: str) -> None:
    path = _write(experiment.parent, entrypoint=entrypoint)
    settings = settings_of(path)

    command = training_command(settings, "gen.yaml", "python")

    launch = ["python", "-m", "dstrial.launch", "--slots", "2", "--config", "gen.yaml", "--context-dir", "."]
    script = ["-m", "dstrial.dsat.rank.standalone_script", "train.py", "--deepspeed", "ds.json"]
    assert command == [*launch, *script]


def test_fingerprint_depends_on_deciding_flags_only(experiment: Path) -> None:
    def fingerprint(words: str = "", method: str = "asha") -> str:
        return settings_of(experiment, *words.split(), method=method).fingerprint

    of_the_run = "--budget 1h --output x --local --fresh --trial-timeout 5m"
    assert fingerprint(of_the_run) == fingerprint() == fingerprint("--max-rungs 5")
    deciding = (
        *("--max-trials 5", "--max-slots 4", "--max-concurrent-trials 2", "--metric latency", "-z 1"),
        *("--start-profile-step 1", "--end-profile-step 9", "--random-seed 7", "--train-batch-size 64"),
        *("--free-batch", "--measure-seconds 5", "--divisor 4", "--max-rungs 4"),
    )
    found = {fingerprint(), fingerprint(method="binary"), *(fingerprint(words) for words in deciding)}
    assert len(found) == 2 + len(deciding)
    # The sample batch changes predictions, so the fingerprint of ``predict`` depends on it.
    assert fingerprint(method="predict") != fingerprint("--sample-batch 2", method="predict")


@pytest.mark.process
def test_wrong_config_is_reported_without_torch(experiment: Path) -> None:
    program = (
        "import sys; from dstrial.dsat.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules; sys.exit(status)"
    )
    path = _write(experiment.parent, hyperparameters={"deepspeed_config": "other.json"})

    words = ["asha", str(path), str(experiment.parent / "model"), "--max-slots", "1"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1, ended.stderr
    assert "other.json" in ended.stderr


def test_space_file_typo_fails_illegal_value_warns(experiment: Path) -> None:
    path = experiment.parent / "space.yaml"
    path.write_text("zero_optimization.sub_grup_size: [1e8]\noptimiser.params.lr: [0.1, 0.2]\n")

    with pytest.raises(ConfigError) as error:
        settings_of(experiment, "--space", str(path), method="predict")

    places = [problem.where.removeprefix(f"{path}: ") for problem in error.value.problems]
    assert places == ["zero_optimization.sub_grup_size", "optimiser.params.lr"]
    path.write_text("zero_optimization.offload_optimizer.device: [cpu, cpuu]\n")
    told = [
        line
        for line in settings_of(experiment, "--space", str(path), method="predict").warnings
        if "is never tried" in line
    ]
    assert len(told) == 1
    assert "'cpuu'" in told[0]


@pytest.mark.parametrize("program", ["dstrial dsat", "python3 -m dstrial.dsat"])
@pytest.mark.parametrize("words", [["CONFIG", "DIR"], ["--budget", "5m", "CONFIG", "DIR"]])
def test_command_without_method_predicts(
    program: str, words: list[str], experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"CONFIG": str(experiment), "DIR": str(experiment.parent / "model")}
    named = [given.get(word, word) for word in words]
    # The default method reads this flag and refuses its value; nothing is started.
    refused = ["--sample-batch", "none.pt"]

    status = (
        app.main(["dsat", *named, *refused])
        if program == "dstrial dsat"
        else dsat_module.main([*named, *refused])
    )

    assert status == 1
    assert "--sample-batch is none.pt" in capsys.readouterr().err
    assert with_method(named)[0] == "predict"
    assert with_method(["asha", *named])[0] == "asha"
    assert with_method(["--help"]) == ["--help"]


def test_compat_has_constants_of_determined_dsat() -> None:
    assert set(dsat.__all__) <= set(dir(dsat))
    assert (compat.CONFIG_KEY, compat.OVERWRITE_KEY) == ("deepspeed_config", "overwrite_deepspeed_args")
    assert (compat.USE_DSAT_MODE_KEY, compat.GAS_DEFAULT) == ("_use_dsat_mode", 1)


def test_of_pool_selects_agents_of_pool_or_all() -> None:
    from determined.common.api import bindings

    from dstrial.dsat.backends.cluster import of_pool

    stats = bindings.v1SlotStats(brandStats={}, typeStats={})
    agents = [bindings.v1Agent(id=pool, resourcePools=[pool], slotStats=stats) for pool in ("gpus", "cpus")]

    assert [agent.id for agent in of_pool(agents, "cpus")] == ["cpus"]
    assert of_pool(agents, "") == of_pool(agents, "other") == agents


@pytest.mark.parametrize(
    ("changes", "flags", "problem"),
    [
        ({"hyperparameters": {"lr": 1}}, [], r"hyperparameters\.deepspeed_config is not given"),
        ({}, ["none.pt"], "none.pt; expected a number of batches, or the file of one"),
        ({"entrypoint": "python3 train.py --deepspeed ds.json"}, ["8"], "a script has no loader"),
    ],
)
def test_missing_deepspeed_config_or_sample_batch_is_refused(
    changes: dict[str, object], flags: list[str], problem: str, experiment: Path
) -> None:
    path = _write(experiment.parent, **changes)
    sample = [word for value in flags for word in ("--sample-batch", value)]

    with pytest.raises(ConfigError, match=f"--sample-batch is .*{problem}" if sample else problem):
        settings_of(path, *sample, method="predict")


def test_modules_in_written_configs_exist() -> None:
    tree = ast.parse(inspect.getsource(trial_spec))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    modules = {
        text.partition(":")[0]
        for text in texts
        if isinstance(text, str) and re.fullmatch(r"dstrial(\.\w+)+(:\w+)?", text)
    }
    assert {"dstrial.dsat.search_trial", "dstrial.dsat.rank.context"} <= modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
