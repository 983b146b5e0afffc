"""Pure functions of the Trainer integration: batch sizes, metrics, throughput."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from sample_layouts import plain_saved_run

from dstrial.config.command_line import CommandLine
from dstrial.errors import ConfigError, TrialContractError
from dstrial.integrations.huggingface.argument_table import solve_sizes
from dstrial.integrations.huggingface.arguments import (
    batch_problems,
    given_by_arguments,
    length_problems,
)
from dstrial.integrations.huggingface.metrics import (
    LogKind,
    Throughput,
    kind_of,
    reported,
    require_searcher_metrics,
)
from dstrial.integrations.huggingface.trial import _require_no_named_checkpoint
from dstrial.resume.metadata import SavedRun


def saved_run(accumulation: int = 1) -> SavedRun:
    given = given_by_arguments(4, accumulation)
    return plain_saved_run(replicas=2, micro=4, accumulation=accumulation, given=given)


@pytest.mark.parametrize(
    ("searcher", "max_steps", "epochs", "num_problems"),
    [
        ({}, 100, 3.0, 0),
        ({"max_length": {"batches": 100}}, 100, 3.0, 0),
        ({"max_length": {"batches": 99}}, 100, 3.0, 1),
        ({"max_length": {"epochs": 3}}, -1, 3.0, 0),
        ({"max_length": {"epochs": 3}}, 100, 3.0, 1),
        ({"max_length": {"records": 800}}, 100, 3.0, 0),
        ({"max_length": 100}, 100, 3.0, 0),
        ({"max_time": 100, "time_metric": "batches"}, 100, 3.0, 0),
        ({"max_time": 3, "time_metric": "epochs"}, 100, 3.0, 1),
        ({"max_time": 3, "time_metric": "hours"}, 100, 3.0, 0),
        ({"max_length": {"batches": 1}, "max_time": 2, "time_metric": "batches"}, 100, 3.0, 2),
    ],
)
def test_length_problems_report_searcher_trainer_mismatch(
    searcher: dict[str, object], max_steps: int, epochs: float, num_problems: int
) -> None:
    length = ("batches", max_steps) if max_steps > 0 else ("epochs", epochs)
    found = length_problems(searcher, length, train_batch_size=8)
    assert len(found) == num_problems


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        # The run started with the sizes of the DeepSpeed config, not with the Trainer's defaults.
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, [], (4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, ["--gradient_accumulation_steps=2"], (4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, ["--per_device_train_batch_size", "8"], None),
        ({"train_batch_size": 16}, [], (4, 4)),
        (
            {"train_batch_size": 16},
            ["--per_device_train_batch_size", "2"],
            None,
        ),  # gives the same total without a change
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto"}, [], (4, 4)),
        ({"train_batch_size": 32}, [], None),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}, [], None),
    ],
)
def test_solve_sizes_prefers_deepspeed_config_over_arguments(
    config: dict[str, object], words: list[str], expected: tuple[int, int] | None
) -> None:
    solution, is_kept = solve_sizes(CommandLine.of(words), config, 1, saved_run(accumulation=2))
    sizes = solution.train_micro_batch_size_per_gpu, solution.gradient_accumulation_steps
    assert (sizes if is_kept else None) == expected


def arguments(micro: int, steps: int) -> CommandLine:
    return CommandLine.of(
        [f"--per_device_train_batch_size={micro}", f"--gradient_accumulation_steps={steps}"]
    )


def test_solve_sizes_same_autotp_ranks_need_no_change() -> None:
    (engine,) = saved_run().engines
    cut = dataclasses.replace(engine, data_parallel_size=1, model_parallel_size=2)
    saved = dataclasses.replace(saved_run(), engines=(cut,))
    assert not solve_sizes(arguments(4, 1), {}, 2, saved)[1]
    assert batch_problems(4, 1, saved, num_ranks=2) == []


def test_solve_sizes_returns_equal_or_differing_batch_unchanged() -> None:
    assert not solve_sizes(arguments(8, 1), {}, 1, saved_run())[1]
    assert not solve_sizes(arguments(5, 1), {}, 1, saved_run())[1]
    assert batch_problems(8, 1, saved_run(), num_ranks=1) == []
    (problem,) = batch_problems(5, 1, saved_run(), num_ranks=1)
    assert "5 x 1 x 1 = 5; expected 8" in str(problem)


def test_kind_of_classifies_trainer_logs() -> None:
    assert kind_of({"loss": 1.0, "epoch": 0.1, "train_runtime": 1.0}) is LogKind.TRAINING
    assert kind_of({"eval_loss": 1.0, "eval_runtime": 1.0}) is LogKind.EVALUATION
    assert kind_of({"train_runtime": 1.0, "train_loss": 2.0}) is LogKind.SUMMARY
    assert kind_of({"test_loss": 1.0}) is LogKind.OTHER


def test_reported_keeps_searcher_metrics_despite_filter() -> None:
    logs = {
        "eval_loss": 1.0,
        "eval_f1": 0.5,
        "eval_runtime": 3.0,
        "epoch": 1.0,
        "eval_samples_per_second": 9.0,
    }
    assert reported(logs, None) == {"eval_loss": 1.0, "eval_f1": 0.5, "eval_samples_per_second": 9.0}
    assert reported(logs, ["f1"], ["eval_loss"]) == {"eval_loss": 1.0, "eval_f1": 0.5}
    assert "epoch" in logs


def test_missing_searcher_metrics_error_lists_available_metrics() -> None:
    wanted = [("searcher.metric", "eval_accuracy"), ("searcher.time_metric", "hours")]
    with pytest.raises(TrialContractError, match=r"eval_accuracy.*hours.*: batches, eval_loss"):
        require_searcher_metrics({"eval_loss": 1.0, "batches": 2}, wanted)


def test_throughput_excludes_paused_time() -> None:
    # start, pause, resume, and the end and start of a report
    clock = iter((100.0, 102.0, 152.0, 154.0, 154.0))
    speed = Throughput(lambda: next(clock))
    assert speed.report(4, train_batch_size=10) == {}
    speed.start(0)
    speed.pause()
    speed.resume()
    assert speed.report(4, train_batch_size=10) == {"samples_per_second": 10.0}
    assert speed.report(4, train_batch_size=10) == {}


def test_resume_variable_with_plain_core_context_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSTRIAL_RESUME", "/runs/one/checkpoints/c1")
    monkeypatch.delenv("DSTRIAL_RUN_DIR", raising=False)
    _require_no_named_checkpoint()
    monkeypatch.setenv("DSTRIAL_RUN_DIR", "/runs/two")
    with pytest.raises(ConfigError, match=r"DSTRIAL_RESUME is /runs/one.*Write `with dstrial\.integrations"):
        _require_no_named_checkpoint()


@pytest.mark.process
def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, dstrial.integrations.huggingface\n"
        "from dstrial.dsat import get_hf_args_with_overwrites as given; given([], {})\n"
        "sys.exit(bool({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.process
def test_missing_transformers_error_contains_install_command() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'transformers' else found(name, *a)\n"
        "from dstrial.integrations.huggingface import DetCallback\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "pip install 'DSTRIAL_CHECKOUT_OR_WHEEL[huggingface]'" in ended.stderr
