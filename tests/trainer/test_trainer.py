"""``Trainer.fit`` on one rank: arguments and semantics as in Determined."""

import json
import logging
import os
import pathlib
import threading

import deepspeed
import pytest
import torch
from in_process_fits import EXP_CONF, fit, trial_class, values
from small_runs import TIMINGS, complete_steps, deepspeed_config
from torch import nn

import dstrial
from dstrial import Batch, Epoch, MetricReducer, PyTorchCallback, Reducer, init
from dstrial.checkpoint.layout import Layout
from dstrial.engine.checkpoint_reader import safe_load
from dstrial.engine.checkpoint_reader.open import open_saved_engine
from dstrial.engine.export import ModelWeights
from dstrial.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    TrialContractError,
    UntrustedCheckpointError,
)

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def test_fit_reports_validates_and_checkpoints():
    done = fit(
        reporting_period=Batch(3),
        validation_period=Epoch(1),
        checkpoint_period=Batch([2]),
        checkpoint_policy="none",
        max_length=Epoch(1),
    )
    assert done.result == dstrial.FitResult(8, 8, None, done.result.checkpoint_uuid)
    assert list(done.rows("training")) == [3, 6, 8]
    assert list(done.rows("validation")) == [8]
    assert done.checkpoints() == [2, 8]
    assert done.rows("training")[3].keys() >= {"loss", *TIMINGS}
    assert done.rows("validation")[8]["epochs"] == 1
    assert json.loads(done.directory.record_path.read_text())["state"] == "completed"


@pytest.mark.parametrize(("policy", "expected"), [("all", [2, 4, 6]), ("none", [6]), ("best", [2, 6])])
def test_checkpoint_policy_selects_saved_checkpoints(policy, expected):
    losses = iter([1.0, 2.0, 0.5])

    def evaluate_full_dataset(self, data_loader):
        return {"validation_loss": next(losses), "records": sum(len(features) for features, _ in data_loader)}

    done = fit(
        trial_class(evaluate_full_dataset=evaluate_full_dataset),
        validation_period=Batch(2),
        max_length=Batch(6),
        checkpoint_policy=policy,
    )
    assert done.checkpoints() == expected
    assert done.rows("validation")[6]["records"] == 21


def test_validation_and_reducers_count_each_record_once():
    seen = []

    class Count(MetricReducer):
        def __init__(self):
            self.reset()

        def reset(self):
            self.count = 0

        def update(self, n):
            self.count += n

        def per_slot_reduce(self):
            return self.count

        def cross_slot_reduce(self, per_slot):
            return sum(per_slot)

    def __init__(self, context):  # noqa: N807
        base.__init__(self, context)
        self.count = context.wrap_reducer(Count(), "count")

    def train_batch(self, items, epoch_idx, batch_idx):
        features, targets = next(items)
        self.count.update(len(features))
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return loss

    def evaluate_batch(self, items):
        features, _ = next(items)
        self.count.update(len(features))
        seen.append(len(features))
        return {"validation_loss": features.sum(1).mean()}

    base = trial_class()
    trial = type(
        "Counting",
        (base,),
        {"__init__": __init__, "train_batch": train_batch, "evaluate_batch": evaluate_batch},
    )
    done = fit(trial, validation_period=Batch(3), reporting_period=Batch(4), max_length=Batch(8))
    import small_trials

    expected = float(small_trials.Records(21, 2).features.sum(1).mean())
    assert done.rows("validation")[3]["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert seen[:6] == [4, 4, 4, 4, 4, 1]
    assert done.rows("validation")[3]["count"] == 21
    assert {steps: row["count"] for steps, row in done.rows("training").items()} == {4: 32, 8: 32}


def test_resume_with_load_universal_loads_own_checkpoint():
    hparams = {"deepspeed_config": deepspeed_config(1, checkpoint={"load_universal": True})}
    whole = fit(max_length=Batch(6), hparams=hparams)
    first = fit(max_length=Batch(3), hparams=hparams)
    rest = fit(max_length=Batch(6), hparams=hparams, run_dir=first.directory.path, latest_checkpoint="latest")
    assert values(rest.rows("validation"))[6] == values(whole.rows("validation"))[6]


@pytest.mark.parametrize(("stage", "resumed"), [(0, 0), (1, 1), (2, 1)])
def test_resume_with_and_without_compile_is_equal(stage, resumed, monkeypatch):
    """Compiling before ``initialize`` changes no names in checkpoints and exports."""
    hparams = {"deepspeed_config": deepspeed_config(stage)}
    plain_initialize = deepspeed.initialize

    def compiled_initialize(model, **arguments):
        first = torch.compile(model[0], backend="eager")
        model = torch.compile(nn.Sequential(first, *model[1:], nn.BatchNorm1d(4)), backend="eager")
        return plain_initialize(model=model, **{**arguments, "model_parameters": model.parameters()})

    def uncompiled_initialize(model, **arguments):
        model = nn.Sequential(*model, nn.BatchNorm1d(4))
        return plain_initialize(model=model, **{**arguments, "model_parameters": model.parameters()})

    variants = (uncompiled_initialize, compiled_initialize)
    last = []
    for before, after in (variants, variants[::-1]):
        monkeypatch.setattr(deepspeed, "initialize", before)
        first = fit(max_length=Batch(3), hparams=hparams)
        (layout,) = json.loads((newest(first) / "manifest.json").read_text())["layouts"]
        assert [place["name"] for place in layout["parameters"]][:2] == ["0.weight", "0.bias"]
        weights = ModelWeights(open_saved_engine(newest(first), 0, Layout.from_json(layout)), None)
        assert all(piece for spec in weights.specs for piece in weights.pieces(spec))
        assert not [spec.name for spec in weights.specs if "_orig_mod" in spec.name]
        monkeypatch.setattr(deepspeed, "initialize", after)
        changed = {"deepspeed_config": deepspeed_config(resumed)}
        rest = fit(
            max_length=Batch(6), hparams=changed, run_dir=first.directory.path, latest_checkpoint="latest"
        )
        last.append(values(rest.rows("validation"))[6])
    assert last[0] == last[1]


def compiled_first_layer(model):
    return nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])


def partitioned(_model):
    with deepspeed.zero.Init(config_dict_or_path=deepspeed_config(3)):
        return nn.Linear(8, 4)


COMPILED = r"wrapped by torch\.compile.*Call engine\.compile\(\) after"
PARTITIONED = r"zero_optimization\.stage is 1; expected 3, as deepspeed\.zero\.Init"


@pytest.mark.parametrize(
    ("change", "stage", "kind", "message"),
    [
        (compiled_first_layer, 3, TrialContractError, COMPILED),
        (partitioned, 1, ConfigError, PARTITIONED),
    ],
)
def test_initialize_of_unsuitable_model_is_refused(monkeypatch, change, stage, kind, message):
    plain_initialize = deepspeed.initialize

    def initialize(model, **arguments):
        model = change(model)
        return plain_initialize(model=model, **{**arguments, "model_parameters": model.parameters()})

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    with pytest.raises(kind, match=message):
        fit(hparams={"deepspeed_config": deepspeed_config(stage)})


def test_only_report_log_lines_are_truncated(caplog):
    determined_logger = logging.getLogger("determined.core")
    fit(max_length=Batch(1))
    with caplog.at_level("INFO", "determined.core"):
        determined_logger.info("report_metrics(%s)", "x" * 200)
        determined_logger.error("Error reporting metrics: %sthe reason", "x" * 200)
    cut, whole = (record.getMessage() for record in caplog.records[-2:])
    assert (cut.endswith(" …"), whole.endswith("the reason")) == (True, True)


def test_files_of_write_callback_are_in_manifest():
    class Extra(PyTorchCallback):
        def on_checkpoint_write_end(self, checkpoint_dir):
            (pathlib.Path(checkpoint_dir) / "notes.txt").write_text("mine")

    done = fit(trial_class(build_callbacks=lambda self: {"extra": Extra()}))
    manifest = json.loads((newest(done) / "manifest.json").read_text())
    assert manifest["files"]["notes.txt"]["bytes"] == 4


def test_periods_in_epochs_need_loader_length():
    class NoLength(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    trial = user_loader(training=lambda: torch.utils.data.DataLoader(NoLength(), batch_size=4))
    with pytest.raises(ValueError, match="periods to validate are counted in epochs"):
        fit(trial, validation_period=Epoch(1))


def test_initial_validation_runs_once_before_training():
    first = fit(step_zero_validation=True)
    assert list(first.rows("validation")) == [0, 4]
    again = fit(
        step_zero_validation=True,
        max_length=Batch(6),
        run_dir=first.directory.path,
        latest_checkpoint="latest",
    )
    assert list(again.rows("validation")) == [0, 4, 6]


def test_test_mode_trains_single_batch():
    done = fit(test_mode=True, max_length=Batch(100))
    assert done.result.batches_trained == 1
    assert list(done.rows("validation")) == [1]


def test_callbacks_are_called_and_restored():
    calls = []

    def recorded(name):
        return lambda self, *args, **kwargs: calls.append(name)

    told = []
    methods = {
        name: recorded(name)
        for name in dir(PyTorchCallback)
        if name.startswith("on_") and name != "on_checkpoint_end"
    }

    class Recording(type("Recorded", (PyTorchCallback,), methods)):
        count = 0

        def on_trial_startup(self, first_batch_idx, checkpoint_uuid):
            calls.append("on_trial_startup")
            told.append((first_batch_idx, checkpoint_uuid is not None))

        def on_training_workload_end(self, avg_metrics, batch_metrics):
            calls.append("on_training_workload_end")
            self.count += len(batch_metrics)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    made = []

    def build_callbacks(self):
        made.append(Recording())
        calls.clear()
        return {"recording": made[-1]}

    trial = trial_class(build_callbacks=build_callbacks)
    first = fit(trial, reporting_period=Batch(2))
    order = ["on_trial_startup", "on_training_start", "on_training_epoch_start", "on_training_workload_end"]
    order += [
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_validation_end",
    ]
    order += [
        "on_checkpoint_save_start",
        "on_checkpoint_write_end",
        "on_checkpoint_upload_end",
        "on_trial_shutdown",
    ]
    positions = [calls.index(name) for name in order if name in calls]
    assert len(positions) == len(order)
    assert positions == sorted(positions)
    fit(
        trial,
        reporting_period=Batch(2),
        max_length=Batch(6),
        run_dir=first.directory.path,
        latest_checkpoint="latest",
    )
    assert "on_checkpoint_load_start" in calls
    assert made[-1].count == 2 * 6
    assert told == [(0, False), (4, True)]


def test_misspelled_deepspeed_section_is_refused():
    with pytest.raises(ConfigError, match="zero_optimisation"):
        fit(hparams={"deepspeed_config": deepspeed_config(zero_optimisation={"stage": 2})})


def test_fit_requires_length_and_valid_policy():
    with pytest.raises(ValueError, match=r"Pass fit\(max_length"):
        fit(max_length=None)
    with pytest.raises(ValueError, match="expected 'best', 'all' or 'none'"):
        fit(checkpoint_policy="newest")


def user_loader(disable=True, **options):
    import small_trials

    def __init__(self, context):  # noqa: N807
        small_trials.DataParallelTrial.__init__(self, context)
        context.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self):
        return options["training"]()

    return trial_class(__init__=__init__, build_training_data_loader=build_training_data_loader)


def test_ended_iterator_error_names_rank_and_position():
    import small_trials

    def training():
        return iter(torch.utils.data.DataLoader(small_trials.Records(16, 1), batch_size=4))

    with pytest.raises(DataError, match="training loader of rank 0 ended in batch 2, after 4 micro batches"):
        fit(user_loader(training=training), max_length=Batch(5))


def newest(done):
    (checkpoint,) = done.directory.checkpoints_path.glob("*/COMPLETE")
    return checkpoint.parent


NO_SUCH_UUID = "00000000-0000-0000-0000-000000000000"
ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.01}}
REFUSED_RESUMES = (
    ({"latest_checkpoint": NO_SUCH_UUID}, CheckpointNotFoundError, "00000000-0000"),
    (
        {"hparams": {"deepspeed_config": deepspeed_config(0, optimizer=ADAGRAD)}},
        CheckpointLayoutError,
        r"optimizer was AdamW, is .*set it back",
    ),
    (
        {"hparams": {"num_records": 32}},
        CheckpointError,
        "epochs of 8 batches, and the training loader now has 4",
    ),
)


def test_resume_refuses_mismatches_and_skips_finished_training(caplog):
    done = fit()
    for arguments, kind, message in REFUSED_RESUMES:
        with pytest.raises(kind, match=message):
            fit(run_dir=done.directory.path, **{"latest_checkpoint": "latest", **arguments})

    again = fit(max_length=Batch(2), run_dir=done.directory.path, latest_checkpoint="latest")
    assert again.result.batches_trained == 4
    assert "nothing is left to train: 4 batches are done, and max_length is 2" in caplog.text

    (newest(done) / "COMPLETE").unlink()
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint; expected one to resume"):
        fit(run_dir=done.directory.path, latest_checkpoint="latest")


class UnlistedClass:
    """A class that safe loading refuses unless this account signed the checkpoint."""


def test_signed_checkpoint_load_leaves_process_unchanged():
    seen = []

    def build_callbacks(self):
        class Own(PyTorchCallback):
            def state_dict(self):
                return {"own": UnlistedClass()}

        return {"own": Own()}

    def load(self, context, path):
        def look():
            try:
                safe_load.load(pathlib.Path(path) / "dstrial_rank0.pt")
            except UntrustedCheckpointError as error:
                seen.append("UnlistedClass" in str(error))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(20)
        seen.append([name for name in os.environ if name.startswith("TORCH_FORCE")])
        super(kind, self).load(context, path)

    kind = trial_class(build_callbacks=build_callbacks, load=load)
    done = fit(kind, max_length=Batch(1), checkpoint_policy="none")
    path = done.directory.checkpoints_path / done.result.checkpoint_uuid
    again = fit(kind, max_length=Batch(2), checkpoint_policy="none", latest_checkpoint=str(path))

    assert again.result.batches_trained == 2
    assert seen == [True, []]


def test_failed_save_keeps_previous_checkpoint_usable():
    import resource
    import signal

    def on_checkpoint_save_start(self, checkpoint):
        if self.limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        self.limited = True

    callback = type(
        "Limit", (PyTorchCallback,), {"limited": False, "on_checkpoint_save_start": on_checkpoint_save_start}
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    trial = trial_class(build_callbacks=lambda self: {"limit": callback()})
    try:
        with pytest.raises(CheckpointError, match="checkpoint"):
            fit(trial, checkpoint_period=Batch(2), checkpoint_policy="none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old_handler)
    (record,) = pathlib.Path("runs").glob("*/*/run.json")
    assert complete_steps(record.parent) == [2]
    rest = fit(max_length=Batch(4), run_dir=record.parent, latest_checkpoint="latest")
    assert rest.result.batches_trained == 4


def test_init_does_not_mutate_hparams():
    hparams = {"deepspeed_config": deepspeed_config()}
    before = json.dumps(hparams)
    with init(hparams=hparams, exp_conf=EXP_CONF) as context:
        context.get_hparams()["new"] = 1
        trial_class()(context)
    assert json.dumps(hparams) == before


def test_evaluation_reducer_combines_validation_metrics():
    done = fit(
        trial_class(
            evaluation_reducer=lambda self: {"validation_loss": Reducer.MAX, "mean_size": Reducer.SUM}
        )
    )
    assert done.rows("validation")[4]["mean_size"] == 21.0


def test_default_gradient_clipping_is_named_once(caplog):
    for given, count in (({}, 1), ({"gradient_clipping": 0.5}, 0)):
        caplog.clear()
        with caplog.at_level("INFO", logger="dstrial"):
            fit(hparams={"deepspeed_config": deepspeed_config(0, **given)}, max_length=Batch(1))
        assert caplog.text.count("DeepSpeed's default (0.19.0 and 0.19.1 do not clip)") == count
