"""Configurations trained without interruption, and killed and resumed, are equal."""

import dataclasses
import json
import math
import shutil

import pytest
import yaml
from deepspeed_release import needs_0_19_8
from small_runs import DEFINITIONS, deepspeed_config, experiment, train

from dstrial.checkpoint.integrity import check_integrity
from dstrial.cli.app import main
from dstrial.config.experiment_config.config import load_experiment

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

BATCHES, REPORT, VALIDATE, CHECKPOINT, KILL_AT, EPOCH_LENGTH = 20, 7, 8, 6, 13, 5
TIMES = {"batch_ms", "data_wait_ms", "forward_ms", "backward_ms", "step_ms", "other_ms"}
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
MODEL_BYTES = 4 * (8 * 16 + 16 + 16 * 4 + 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration; ``resumed_on``: changed (ranks, ZeRO stage) after the kill."""

    stage: int = 0
    ranks: int = 2
    trial: str = "DataParallelTrial"
    module: str = "small_trials"
    sizes: dict = dataclasses.field(default_factory=dict)
    hparams: dict = dataclasses.field(default_factory=dict)
    section: dict = dataclasses.field(default_factory=dict)
    micro_batch: int = 32
    predicts_memory: bool = False
    resumed_on: tuple[int, int] | None = None

    @property
    def is_pipeline(self):
        return "pipeline_stages" in self.section

    def config(self, stage, ranks, telemetry=True, **hparams):
        replicas = 1 if self.is_pipeline else ranks
        global_batch = self.sizes.get("train_batch_size", self.micro_batch * 2 * replicas)
        # An epoch has 5 batches, of which the last is short; a pipeline drops a short sixth batch instead.
        num_records = (5 if self.is_pipeline else 4) * global_batch + 6
        if self.resumed_on:
            num_records = 5 * global_batch
        ds = deepspeed_config(stage, train_micro_batch_size_per_gpu=self.micro_batch) | self.sizes
        ds["zero_optimization"] |= {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
        given = {"deepspeed_config": {key: value for key, value in ds.items() if value is not None}}
        given |= {"num_records": num_records, "noise": 0.1, **self.hparams, **hparams}
        return experiment(
            given,
            BATCHES,
            REPORT,
            VALIDATE,
            CHECKPOINT,
            checkpoint_policy="none",
            entrypoint=f"{self.module}:{self.trial}",
            resources={"slots_per_trial": ranks},
            data={"dstrial": {**self.section, "telemetry": telemetry}},
        )


SOLVED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
}
# This batch can be divided by 1, 2 or 3 replicas.
SHARED = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
}
PLAIN = {"noise": 0.0, "dropout": 0.0}
TWO_STAGES = {"pipeline_stages": 2}
CASES = {
    "zero 0": Case(0, predicts_memory=True),
    "zero 1": Case(1, predicts_memory=True),
    "zero 1, loader workers": Case(1, ranks=1, micro_batch=4, hparams={"num_workers": 1}),
    "zero 1, loader workers, 2 ranks": Case(1, micro_batch=4, hparams={"num_workers": 1}),
    "zero 2": Case(2, predicts_memory=True),
    "zero 3": Case(3, predicts_memory=True),
    "zero 1 on 2 ranks, zero 0 on 3": Case(1, sizes=SHARED, hparams=PLAIN, resumed_on=(3, 0)),
    "zero 3 on 2 ranks, zero 2 on 1": Case(3, sizes=SHARED, hparams=PLAIN, resumed_on=(1, 2)),
    "pipeline": Case(1, trial="PipelineTrial", section=TWO_STAGES, predicts_memory=True),
    "pipeline, solved batch": Case(
        0, trial="SolvedPipelineTrial", section=TWO_STAGES, sizes=SOLVED, hparams={"num_workers": 1}
    ),
    "two engines, accumulation by hand": Case(
        0,
        trial="TwoEnginesByHand",
        module="odd_trials",
        micro_batch=4,
        hparams={"micro_batches": 2, "num_validation_records": 9},
    ),
}
# With DeepSpeed 0.19.0, dry runs omit the gathered weights that ZeRO 3 keeps until backward.
PARAMETERS = [pytest.param(name, marks=needs_0_19_8 if name == "zero 3" else ()) for name in CASES]


@pytest.mark.exhaustive(
    "[zero 1, loader workers]",
    "[zero 3]",
    "[zero 1 on 2 ranks, zero 0 on 3]",
    "[zero 3 on 2 ranks, zero 2 on 1]",
    "[pipeline]",
    "[two engines, accumulation by hand]",
)
@pytest.mark.parametrize("name", PARAMETERS)
def test_killed_and_resumed_run_equals_whole_run(tmp_path, capsys, name):
    case = CASES[name]
    stage, ranks = case.stage, case.ranks
    whole_config = case.config(stage, ranks, epoch_log=str(tmp_path / "whole.log"))
    whole = train(tmp_path / "whole", case.trial, whole_config, ranks=ranks, module=case.module)
    assert whole.returncode == 0, whole.output
    require_complete(whole)
    require_telemetry(whole, case)
    if case.predicts_memory:
        require_predicted_memory(whole, case, whole_config, capsys)
    if case.sizes is SOLVED:
        require_solved(tmp_path, whole_config)

    # Without telemetry, to test that telemetry does not change training.
    log = tmp_path / "killed.log"
    config = case.config(stage, ranks, telemetry=False, epoch_log=str(log))
    env = {"KILL_AT": f"{ranks - 1}:{KILL_AT}", "KILL_MARKER": str(tmp_path / "marker")}
    killed = train(tmp_path / "killed", case.trial, config, ranks=ranks, env=env, module=case.module)
    assert killed.returncode == 137, killed.output
    assert killed.checkpoints() == [6, 12]
    assert not killed.rows("telemetry")
    if case.resumed_on:
        ranks, stage = case.resumed_on
        config = case.config(stage, ranks, epoch_log=str(log))
    resumed = train(
        tmp_path / "killed", case.trial, config, ranks=ranks, env=env, module=case.module, run=killed
    )

    assert resumed.returncode == 0, resumed.output
    assert "resumed from checkpoint" in resumed.output
    assert ("is brought into another layout" in resumed.output) == bool(case.resumed_on)
    require_complete(resumed, is_resized=bool(case.resumed_on))
    # The run is killed in batch 13 of the third epoch; the start of this epoch is logged only once.
    assert log.read_text() == (tmp_path / "whole.log").read_text() == epochs()
    for group in ("training", "validation"):
        got, wanted = resumed.reports(group), whole.reports(group)
        if case.resumed_on:
            assert got.keys() == wanted.keys()
            name = "loss" if group == "training" else "validation_loss"
            wanted.pop(14, None)  # after a change of the layout, the first report only has the batches since
            for steps, metrics in wanted.items():
                assert got[steps][name] == pytest.approx(metrics[name], rel=1e-6), steps
        else:
            assert got == wanted
    if case.resumed_on:  # the resumed run has telemetry and started after batch 12
        totals = json.loads(resumed.directory.telemetry_path.read_text())
        assert totals["num_batches"] == BATCHES - 13, "the first batch of a process is left out"


def epochs():
    lines = [f"{what} {epoch}" for epoch in range(BATCHES // EPOCH_LENGTH) for what in ("start", "end")]
    return "\n".join(lines) + "\n"


def require_complete(run, *, is_resized=False):
    """Assert all reports, all checkpoints with intact files, and the final status."""
    assert list(run.reports("training")) == [7, 14, 20]
    assert list(run.reports("validation")) == [8, 16, 20]
    assert [row["epochs"] for row in run.reports("validation").values()] == [1, 3, 4]
    assert run.checkpoints() == [6, 12, 18, 20]
    reported = run.reports("training")[14]
    if "epoch_idx" in reported and not is_resized:
        assert reported["batch_idx"] == sum(range(7, 14)) / 7
        assert reported["epoch_idx"] == pytest.approx(sum(idx // EPOCH_LENGTH for idx in range(7, 14)) / 7)
    for mark in run.directory.checkpoints_path.glob("*/COMPLETE"):
        assert check_integrity(mark.parent, needs_mark=True).is_intact
    progress = json.loads(run.directory.progress_path.read_text())
    assert (progress["progress"], progress["batches_trained"]) == (1.0, BATCHES)
    assert json.loads(run.directory.status_path.read_text())["status"] == "completed"


def require_telemetry(run, case):
    """Assert times and memory of each rank in each report, and totals."""
    rows = run.rows("telemetry")
    assert [row["steps_completed"] for row in rows] == [7, 14, 20]
    metrics = rows[-1]["metrics"]
    expected = TIMES | ({"stages_ms"} if case.is_pipeline else set())
    assert {name for name in metrics if name.endswith("_ms")} == expected
    for name in (*expected, "process_peak_memory_bytes", "tensors_peak_bytes"):
        assert len(metrics["ranks"][name]) == case.ranks
        assert all(value is not None and value >= 0 for value in metrics["ranks"][name])
    for name in ("forward_ms", "backward_ms", "step_ms"):
        assert all(value > 0 for value in metrics["ranks"][name])
    assert metrics["model_tflops_per_device"] > 0
    assert math.isclose(metrics["learning_rate"], 0.01, rel_tol=0.2)
    totals = json.loads(run.directory.telemetry_path.read_text())
    assert totals["num_batches"] == BATCHES - 1
    assert len(totals["ranks"]) == len(totals["memory_bytes"]) == case.ranks


def require_predicted_memory(run, case, config, capsys):
    """Assert that ``dstrial memory`` predicts the memory that each rank has measured."""
    metrics = run.rows("telemetry")[-1]["metrics"]
    assert metrics["memory_found_by"] == "storages of tensors; activations and peak operation by operation"
    for part in PARTS:
        assert metrics[f"{part}_bytes"] == max(metrics["ranks"][f"{part}_bytes"])
    if not case.is_pipeline:
        # float32: Adam has 2 values per weight; ZeRO adds a master copy and divides all 3 by the 2 ranks.
        share = MODEL_BYTES // 2 if case.stage == 3 else MODEL_BYTES
        optimizer = 1.5 * MODEL_BYTES if case.stage else 2 * MODEL_BYTES
        assert metrics["parameters_bytes"] == pytest.approx(share, rel=0.05)
        assert metrics["optimizer_bytes"] == pytest.approx(optimizer, rel=0.05)
        if case.stage in (0, 3):
            assert metrics["gradients_bytes"] == pytest.approx(share, rel=0.05)

    capsys.readouterr()
    path = str(run.directory.experiment_config_path)
    assert main(["memory", path, str(DEFINITIONS), "--slots", "2", "--json"]) == 0
    stages = [row["largest"] for row in json.loads(capsys.readouterr().out)["devices"]]
    assert len(stages) == case.section.get("pipeline_stages", 1)
    totals = json.loads(run.directory.telemetry_path.read_text())
    for rank, counters in enumerate(totals["memory_bytes"]):
        predicted = stages[rank * len(stages) // 2]
        for part in ("parameters", "gradients", "optimizer"):
            # The prediction is for a stage's first rank; another rank's partition may differ by some weights.
            uneven = 16 if rank == 0 or len(stages) > 1 else 400
            assert counters[f"{part}_bytes"] == pytest.approx(predicted[part], rel=0.01, abs=uneven), part
        # Unlike a dry run, training has another prefetched micro batch and the order of records.
        order_bytes = 8 * config["hyperparameters"]["num_records"]
        more = counters["activations_bytes"] - predicted["activations"]
        assert -100 < more < 32 * (8 + 4) * 4 + order_bytes + 1000, rank
        assert counters["buffers_bytes"] == pytest.approx(predicted["buffers"], rel=0.25, abs=2000)
        assert counters["tensors_peak_bytes"] == pytest.approx(
            predicted["peak"], rel=0.1, abs=2000 + order_bytes
        )


def require_solved(tmp_path, config):
    """Assert that the config check resolves ``auto`` to the batch of the training."""
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(config))
    batch = load_experiment(path, DEFINITIONS).deepspeed_check.batch
    assert batch.equation.startswith(
        "train_batch_size 32 = train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 x 1"
    )


def test_ranks_exchange_rarely_and_stop_together(tmp_path):
    log = tmp_path / "watch"
    hyperparameters = {"deepspeed_config": deepspeed_config(0), "num_records": 4096}
    hyperparameters |= {"watch_log": str(log), "request_stop_at": "1:149"}
    config = experiment(hyperparameters, batches=500, report=50, validate=1000, checkpoint=1000)
    run = train(tmp_path, "DataParallelTrial", config, ranks=2)
    assert run.returncode == 0, run.output
    assert run.checkpoints() == [150]
    seen = [[json.loads(line) for line in open(f"{log}.{rank}")] for rank in (0, 1)]
    talks = [[batch for batch, _ in rows if batch < 150] for rows in seen]
    assert talks[0] == talks[1]
    assert len(talks[0]) == len(set(talks[0])), "at most one exchange per batch"
    assert {50, 100} <= set(talks[0])
    assert len(talks[0]) <= 14


@pytest.mark.exhaustive("[1]")
@pytest.mark.parametrize("stage", [1, 3])
def test_run_killed_in_saves_equals_whole_run(tmp_path, stage):
    hyperparameters = {"deepspeed_config": deepspeed_config(stage), "noise": 0.1, "num_records": 70}
    config = experiment(hyperparameters, batches=20, checkpoint=3)
    whole = train(tmp_path / "whole", "DataParallelTrial", config, ranks=2)
    assert whole.returncode == 0, whole.output

    run = None
    for kill in range(4):
        before = run.checkpoints() if run else []
        # In each attempt the first save completes, and a rank is killed in the second save.
        env = {"KILL_IN_SAVE": f"{kill % 2}:2"}
        run = train(tmp_path / "killed", "DataParallelTrial", config, ranks=2, run=run, env=env)
        assert run.returncode == 137, run.output
        assert len(run.checkpoints()) == len(before) + 1
        assert list(run.directory.checkpoints_path.glob("*.saving")) != []
    run = train(tmp_path / "killed", "DataParallelTrial", config, ranks=2, run=run)
    assert run.returncode == 0, run.output

    for group in ("training", "validation"):
        assert run.reports(group) == whole.reports(group)
    assert run.checkpoints() == whole.checkpoints()
    assert len(whole.checkpoints()) >= 6
    # Incomplete checkpoints are deleted.
    assert len(list(run.directory.checkpoints_path.iterdir())) == len(whole.checkpoints())


SETTINGS = "lr 0.0001, in the checkpoint 0.01; weight_decay 0.5, in the checkpoint 0.25"


def with_optimizer(batches, overrides=False, **settings):
    config = deepspeed_config(1, gradient_accumulation_steps=1, train_batch_size=8)
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"], config["scheduler"]
    config["optimizer"]["params"] |= {"weight_decay": 0.25, **settings}
    fields = {"data": {"dstrial": {"override_optimizer": True}}} if overrides else {}
    return experiment(
        {"deepspeed_config": config, "num_records": 64}, batches, report=2, checkpoint=2, **fields
    )


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("begun"), "DataParallelTrial", with_optimizer(2), ranks=2)
    assert run.returncode == 0, run.output
    return run


@pytest.mark.parametrize(("overrides", "ranks"), [(False, 2), (True, 2), (True, 1)])
def test_changed_optimizer_settings_at_resume_are_named(tmp_path, first_run, overrides, ranks):
    shutil.copytree(first_run.directory.path, tmp_path / "copy")
    copied = dataclasses.replace(first_run, directory=type(first_run.directory).open(tmp_path / "copy"))
    changed = with_optimizer(4, overrides, lr=0.0001, weight_decay=0.5)
    resumed = train(tmp_path / "resumed", "DataParallelTrial", changed, ranks=ranks, run=copied)

    assert resumed.returncode == 0, resumed.output
    assert f"this run sets its optimizer to {SETTINGS}; " in resumed.output
    assert ("this run's settings count" if overrides else "the checkpoint counts") in resumed.output
    rates = [row["metrics"]["learning_rate"] for row in resumed.rows("telemetry")]
    assert rates[0] == 0.01
    assert rates[-1] == (0.0001 if overrides else 0.01)
