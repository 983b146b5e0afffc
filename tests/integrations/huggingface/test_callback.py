"""``DetCallback`` in a real Trainer, with and without DeepSpeed, on 1 and 2 ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trainer_runs import Runs

from dstrial.checkpoint.integrity import check_integrity
from dstrial.checkpoint.manifest import read_manifest
from dstrial.local.checkpoint_directory import list_checkpoints

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(900),
]  # three launches on a busy machine

TRAIN = "dstrial.integrations.huggingface.train(trainer, callback)"
NO_FINITE_LOSS = "NonFiniteError: training has no finite loss"
OWN_LOGGERS = "which has loggers of its own: name them in args.report_to"


LENGTHS = {"metric": "eval_loss", "max_length": {"batches": 7}, "max_time": 2, "time_metric": "epochs"}
WORSE = {
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
DECAY: dict[str, Any] = {"micro": 4, "options": {"weight_decay": 0.5}}
OVERRIDE = {"dstrial": {"override_optimizer": True}}
EACH_STEP: dict[str, Any] = {"eval_steps": None, "options": {"save_strategy": "steps", "save_steps": 1}}
UNFILTERED = {**EACH_STEP, "options": {**EACH_STEP["options"], "logging_nan_inf_filter": False}}
STARTS: dict[str, Any] = {"steps": 1, "options": {"eval_on_start": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs of this module in three launches, to import transformers only 3 times."""
    made = Runs(tmp_path_factory.mktemp("trainer"))
    new = made.settings
    shared = str(made.directory / "output" / "shared")
    made.launch(
        1,
        new("alone-zero2", stage=2, micro=4),
        new("alone-zero2-paused", stage=2, micro=4, pause_at=3),
        new("alone-zero3-paused", stage=3, micro=4, pause_at=3),
        new("late", micro=4, pause_at=6, options={"eval_strategy": "no", "save_strategy": "steps"}),
        new("early", micro=4, eval_steps=2, patience=1, pause_in_evaluation=4, options=WORSE),
        new("never-evaluated", steps=1, eval_steps=None, searcher={"metric": "eval_loss"}),
        new("logged", steps=1, eval_steps=None, data={"dstrial": {"loggers": ["wandb"]}}),
        new("anywhere", steps=2, micro=4, storage=str(made.directory / "storage")),
        new("no-metric", searcher={"metric": "eval_accuracy"}, eval_steps=1, num_eval_sets=2, error=True),
        new("lengths", searcher=LENGTHS, error=True),
        new("shared", steps=2, micro=4, eval_steps=None, output=shared),
        new("shared-2", steps=2, micro=2, eval_steps=None, output=shared),
        new("shared-3", steps=3, micro=2, eval_steps=None, output=shared, saves_at=2, is_plain=True),
        new("nan-fails", nan_after=2, error=True, **EACH_STEP),
        new("nan-unfiltered", nan_after=2, error=True, **UNFILTERED),
        new("nan-warns", nan_after=2, data={"dstrial": {"non_finite": "warn"}}, **EACH_STEP),
        new("sound", **EACH_STEP),
        new("epoch", pause_at=3, micro=4, options={"eval_strategy": "epoch"}),
        new("started", pause_at=0, micro=4, options={"eval_on_start": True}),
        new("no-latest", resume="latest", error=True),
        new("sets", eval_steps=3, num_eval_sets=2, is_plain=True, callback={"filter_metrics": ["set1"]}),
    )
    of_another_trial = made.of_another_trial("alone-zero2")
    made.launch(
        2,
        new("zero2", stage=2, counts_tokens=True),
        new("zero2-paused", stage=2, pause_at=3),
        new("zero2-resumed", "zero2-paused", stage=2, resume="latest"),
        new("zero3", stage=3, micro=1, accumulation=2),
        new("zero3-paused", stage=3, micro=1, accumulation=2, pause_at=3),
        new("zero3-resumed", "zero3-paused", stage=3, micro=1, accumulation=2, resume="latest"),
        new("ddp", options={**EACH_STEP["options"], "save_steps": 2, "save_total_limit": 1}),
        new("ddp-paused", pause_at=3, options=EACH_STEP["options"]),
        new("ddp-resumed", "ddp-paused", resume_step=2, options=EACH_STEP["options"]),
        new("ended", stage=2, pause_in_evaluation=2, eval_steps=2),
        new("zero2-to-2", "alone-zero2-paused", stage=2, resume="latest"),
        new("zero3-to-2", "alone-zero3-paused", stage=3, resume="latest"),
        new("weights-zero3", stage=3, is_partitioned=True, resume=of_another_trial, **STARTS),
    )
    of_another_trial = made.of_another_trial("ddp")
    made.copied("zero2-to-1", "zero2-paused")
    made.copied("zero2-to-zero3", "zero2-paused")
    made.copied("zero3-to-1", "zero3-paused")
    made.copied("ddp-to-1", "ddp-paused")
    for name, source in (
        ("decay-overridden", "zero2-paused"),
        ("decay-kept", "zero2-paused"),
        ("decay-ddp", "ddp-paused"),
    ):
        made.copied(name, source)
    made.launch(
        1,
        new("exported", exports=[str(made.checkpoint("zero3")), str(made.directory / "exported")]),
        new("zero2-to-1", stage=2, micro=4, resume_step=3),
        new("zero2-again", "zero2-to-1", stage=2, micro=4, resume="latest"),
        new("zero2-to-zero3", stage=3, micro=4, resume_step=3),
        new("zero3-to-1", stage=3, micro=4, resume_step=3),
        new("ddp-to-1", micro=4, resume_step=3),
        new("decay-overridden", stage=2, resume_step=3, **DECAY, data=OVERRIDE),
        new("decay-kept", stage=2, resume_step=3, **DECAY),
        new("decay-ddp", resume_step=3, **DECAY, data=OVERRIDE),
        new("zero2-another-batch", "zero2-paused", stage=2, resume="latest", error=True),
        new("zero2-unresumed", "zero2-paused", stage=2, micro=4, resume="latest", is_plain=True, error=True),
        new("weights-alone", micro=4, resume=of_another_trial, **STARTS),
        new("weights-init", micro=4, has_model_init=True, resume=of_another_trial, **STARTS),
        new("weights-plain", is_plain=True, resume=of_another_trial, error=True),
    )
    return made


@pytest.mark.parametrize("kind", ["zero2", "zero3", "ddp"])
def test_trainer_paused_run_resumes_with_equal_losses(runs: Runs, kind: str) -> None:
    assert [fact["is_stopped"] for fact in runs.facts[kind]] == [False, False]
    assert runs.losses(f"{kind}-resumed") == runs.losses(kind)
    assert runs.evaluations(f"{kind}-resumed") == runs.evaluations(kind)
    assert sorted(runs.losses(kind)) == [1, 2, 3, 4, 5, 6]
    assert sorted(runs.evaluations(kind)) == [4, 6]


@pytest.mark.parametrize(
    ("resumed", "whole"),
    [
        ("zero2-to-1", "zero2"),
        ("zero2-to-zero3", "zero2"),
        ("zero3-to-1", "zero3"),
        ("ddp-to-1", "ddp"),
        ("zero2-to-2", "alone-zero2"),
        ("zero3-to-2", "alone-zero2"),
    ],
)
def test_trainer_resume_reshapes_ranks_and_stage(runs: Runs, resumed: str, whole: str) -> None:
    assert sorted(runs.losses(resumed)) == [1, 2, 3, 4, 5, 6]
    assert runs.losses(resumed) == pytest.approx(runs.losses(whole), rel=2e-6)


def test_trainer_stop_request_ends_all_ranks_same_step(runs: Runs) -> None:
    for name in ("zero2-paused", "zero3-paused", "ddp-paused", "alone-zero2-paused"):
        assert all(fact["is_stopped"] and fact["ended_at"] == 3 for fact in runs.facts[name])
    assert runs.steps_of_checkpoints("zero2-paused") == [3, 6]
    ended = runs.facts["ended"]
    assert [fact["ended_at"] for fact in ended] == [2, 2]
    assert all(fact["is_stopped"] for fact in ended)
    assert sorted(runs.losses("ended")) == [1, 2]
    assert sorted(runs.evaluations("ended")) == [2]
    assert runs.steps_of_checkpoints("ended") == [2]


def test_trainer_stop_in_last_step_completes_run(runs: Runs) -> None:
    (fact,) = runs.facts["late"]
    assert not fact["is_stopped"]
    assert sorted(runs.evaluations("late")) == [6]
    assert runs.steps_of_checkpoints("late") == [6]
    state = json.loads((runs.checkpoint("late") / "checkpoint-6" / "trainer_state.json").read_text())
    assert any("eval_loss" in entry for entry in state["log_history"])


def test_trainer_warm_start_loads_weights_resets_steps(runs: Runs) -> None:
    for name, source in (("weights-zero3", "alone-zero2"), ("weights-alone", "ddp"), ("weights-init", "ddp")):
        evaluations = runs.evaluations(name)
        assert evaluations[0] == pytest.approx(runs.evaluations(source)[6], rel=1e-6)
        assert sorted(evaluations) == [0, 1]
        assert all(fact["global_step"] == 1 for fact in runs.facts[name])


def test_callback_works_with_determined_core_off_cluster(runs: Runs) -> None:
    (fact,) = runs.facts["anywhere"]
    assert (fact["global_step"], fact["length"]) == (2, 2)
    (stored,) = (runs.directory / "storage").iterdir()
    assert read_manifest(stored).steps_completed == 2


def test_trainer_resume_of_finished_run_trains_nothing(runs: Runs) -> None:
    (fact,) = runs.facts["zero2-again"]
    assert fact["global_step"] == 6
    assert sorted(runs.losses("zero2-to-1")) == [1, 2, 3, 4, 5, 6]


def test_trainer_reports_contain_progress_and_throughput(runs: Runs) -> None:
    metrics = runs.reports("zero2", "training")[3]
    assert (metrics["batches"], metrics["epochs"]) == (3, pytest.approx(0.3))
    assert metrics["samples_per_second"] > 0
    evaluation = runs.reports("zero2", "validation")[4]
    assert evaluation["batches"] == 4
    assert {"eval_loss", "eval_samples_per_second"} < set(evaluation)
    assert not any(name.endswith("_runtime") for name in evaluation)


@pytest.mark.parametrize("name", ["alone-zero2", "zero2", "zero3"])
def test_trainer_telemetry_reported_at_each_log(runs: Runs, name: str) -> None:
    told = runs.reports(name, "telemetry")
    assert list(told) == list(runs.reports(name, "training"))
    row = told[max(told)]
    parts = ("data_wait_ms", "forward_ms", "backward_ms", "step_ms", "other_ms")
    assert sum(row[part] for part in parts) == pytest.approx(row["batch_ms"], rel=1e-6)
    assert all(row[part] > 0 for part in ("forward_ms", "backward_ms", "step_ms"))
    assert row["records_per_second"] > 0
    assert row["model_tflops_per_device"] > 0
    assert row["process_peak_memory_bytes"] > 2**20
    assert ("tokens_per_second" in row) == (name == "zero2"), "told where the Trainer counts them"
    totals = json.loads((runs.directories[name] / "telemetry.json").read_text())
    assert totals["num_batches"] == max(told) - 1, "the first step is left out"


def test_callback_alone_reports_no_telemetry(runs: Runs) -> None:
    assert runs.reports("sets", "training")
    assert not runs.reports("sets", "telemetry")


def test_evaluation_sets_are_merged_and_filtered(runs: Runs) -> None:
    reports = runs.reports("sets", "validation")
    assert sorted(reports) == [3, 6]
    assert set(reports[3]) == {"eval_set1_loss", "eval_set1_samples_per_second", "batches", "epochs"}
    assert set(runs.reports("sets", "training")[1]) == {"samples_per_second", "batches", "epochs"}


def test_checkpoint_shares_files_with_trainer_directory(runs: Runs) -> None:
    checkpoint = runs.checkpoint("zero3-resumed")
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {"checkpoint-6", "manifest.json", "metadata.json", "load_data.json", "COMPLETE"}
    assert check_integrity(checkpoint, needs_mark=True).is_intact
    manifest = read_manifest(checkpoint)
    assert manifest.layouts[0]["folder"] == "checkpoint-6/global_step6"
    shard = "checkpoint-6/global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert shard in manifest.files
    written = runs.directory / "output" / "zero3-paused" / shard
    assert written.samefile(checkpoint / shard)


def test_exported_checkpoint_loads_with_transformers(runs: Runs) -> None:
    (fact,) = runs.facts["exported"]
    assert (fact["wrong"], fact["width"]) == ([], 32)


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("no-latest", ["CheckpointNotFoundError", "has no complete checkpoint; expected one to resume from"]),
        (
            "zero2-another-batch",
            [
                "ConfigError",
                "2 x 1 x 1 = 2; expected 4",
                "--per_device_train_batch_size 2 --gradient_accumulation_steps 2",
            ],
        ),
        (
            "zero2-unresumed",
            [
                "trainer.train() starts at step 0; expected step",
                TRAIN,
                "resume_from_checkpoint=callback.checkpoint_path",
            ],
        ),
        ("weights-plain", ["starts without the weights of checkpoint", TRAIN]),
        ("no-metric", ["searcher.metric is 'eval_accuracy'", "eval_set0_loss", "eval_set1_loss"]),
        (
            "lengths",
            [
                "searcher.max_length is 7 batches; expected the length of the Trainer, 6 batches",
                "searcher.max_time is 2 epochs",
            ],
        ),
        *(
            (name, [NO_FINITE_LOSS, "since batch 3: 3 reports in a row"])
            for name in ("nan-fails", "nan-unfiltered")
        ),
    ],
)
def test_contradictory_run_fails_with_remedy(runs: Runs, name: str, fragments: list[str]) -> None:
    (fact,) = runs.facts[name]
    assert [part for part in fragments if part not in fact["error"]] == [], fact["error"]


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("never-evaluated", "training has ended without an evaluation"),
        ("logged", f"data.dstrial.loggers is not for Hugging Face's Trainer, {OWN_LOGGERS}"),
        ("nan-fails", "no loss is finite"),
        ("decay-overridden", "weight_decay 0.5, in the checkpoint 0.0; this run's settings count"),
        ("decay-kept", "weight_decay 0.5, in the checkpoint 0.0; the checkpoint counts"),
        ("decay-ddp", "override_optimizer has no effect on this Trainer"),
        ("sound", None),
    ],
)
def test_questionable_run_logs_warning(runs: Runs, name: str, warning: str | None) -> None:
    (fact,) = runs.facts[name]
    found = [text for text in fact["warnings"] if warning and warning in text]
    assert len(found) == 1 if warning else fact["warnings"] == []


def test_override_optimizer_applies_at_resume(runs: Runs) -> None:
    names = ("decay-overridden", "decay-kept", "decay-ddp")
    assert [runs.facts[name][0]["weight_decay"] for name in names] == [0.5, 0.0, 0.0]


def test_non_finite_warn_mode_trains_to_end(runs: Runs) -> None:
    assert runs.facts["nan-warns"][0]["global_step"] == runs.facts["sound"][0]["global_step"] == 6


@pytest.mark.parametrize(
    ("name", "step", "is_stopped", "evaluations"),
    [
        ("early", 4, False, 2),  # another callback ends training
        ("epoch", 3, True, 0),
        ("started", 1, True, 1),
    ],
)
def test_stopped_run_skips_further_evaluation(
    runs: Runs, name: str, step: int, is_stopped: bool, evaluations: int
) -> None:
    (fact,) = runs.facts[name]
    assert (fact["global_step"], fact["is_stopped"], fact["num_evaluations"]) == (
        step,
        is_stopped,
        evaluations,
    )


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("shared", [2]),  # three runs share one output directory
        ("shared-2", [2]),
        ("shared-3", [2, 3]),
        ("ddp", [2, 4, 6]),  # the Trainer itself keeps only its newest checkpoint
        ("ddp-paused", [1, 2, 3, 3, 4, 5, 6]),  # step 3 is trained twice
        ("early", [2, 4]),
        ("nan-fails", [1, 2]),
        ("nan-unfiltered", [1, 2]),
    ],
)
def test_stored_checkpoints_stay_intact(runs: Runs, name: str, steps: list[int]) -> None:
    assert sorted(runs.steps_of_checkpoints(name)) == steps
    for found in list_checkpoints(runs.directories[name] / "checkpoints"):
        assert check_integrity(found.path, needs_mark=True).is_intact
    if name == "ddp":
        assert [path.name for path in (runs.directory / "output" / "ddp").iterdir()] == ["checkpoint-6"]
