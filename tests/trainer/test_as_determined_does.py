"""Compatibility with Determined: error types, callbacks, checkpoint names."""

import collections

import platformdirs
import pytest
from determined import errors
from in_process_fits import fit, trial_class, values

from dstrial import Batch, DataLoader, Epoch, PyTorchCallback
from dstrial.errors import CheckpointLayoutError, DataError, DstrialError, TrialContractError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


class Counter(PyTorchCallback):
    def __init__(self):
        self.calls = collections.Counter()

    def __getattribute__(self, name):
        if name.startswith("on_") and name != "on_checkpoint_end":
            return lambda *args, **kwargs: self.calls.update([name])
        return super().__getattribute__(name)


def count_callbacks(num_records=64, **arguments):
    counter = Counter()
    fit(
        trial_class(build_callbacks=lambda self: {"counter": counter}),
        {"num_records": num_records},
        **arguments,
    )
    return counter.calls


def test_two_epochs_call_callbacks_as_determined():
    calls = count_callbacks(max_length=Epoch(2))
    # Determined 0.38.1, harness/tests/experiment/pytorch/test_deepspeed_trial.py, test_callbacks.
    assert calls["on_trial_startup"] == calls["on_training_start"] == calls["on_trial_shutdown"] == 1
    assert calls["on_training_epoch_start"] == calls["on_training_epoch_end"] == 2
    assert calls["on_training_workload_end"] == 2
    assert calls["on_validation_start"] == calls["on_validation_end"] == 1
    assert calls["on_checkpoint_write_end"] == calls["on_checkpoint_upload_end"] == 1


@pytest.mark.parametrize(
    ("arguments", "num_reports"),
    [
        ({"max_length": Batch(16)}, 1),
        ({"max_length": Epoch(2), "reporting_period": None}, 2),
        ({"max_length": Epoch(2), "reporting_period": Batch(100)}, 1),
        ({"max_length": Epoch(2), "reporting_period": Batch(3)}, 6),
        ({"max_length": Epoch(1), "num_records": 8 * 130}, 2),
    ],
)
def test_workload_end_is_called_per_report(arguments, num_reports):
    assert count_callbacks(**arguments)["on_training_workload_end"] == num_reports


def fit_with(**overrides):
    return lambda: fit(trial_class(**overrides))


def without_engine():
    def __init__(self, context):  # noqa: N807
        self.context = context

    fit(trial_class(__init__=__init__))


@pytest.mark.parametrize(
    ("go", "kind", "message"),
    [
        (without_engine, errors.InvalidExperimentException, "no wrapped model engine"),
        (
            fit_with(train_batch=lambda self, items, e, b: next(items) and 3),
            errors.InvalidExperimentException,
            "train_batch must return a dictionary .* returned 3 of type int",
        ),
        (
            fit_with(evaluate_batch=lambda self, items, b: [1]),
            errors.InvalidExperimentException,
            r"evaluate_batch must return a dictionary .* returned \[1\] of type list",
        ),
        (
            fit_with(
                evaluate_batch=lambda self, items, b: {
                    "validation_loss": float(len(next(items))),
                    f"extra{b}": 1.0,
                }
            ),
            ValueError,
            "Validation metric names must match across all batches of data: ",
        ),
        (
            fit_with(build_training_data_loader=lambda self: [1, 2]),
            RuntimeError,
            r"returned a builtins.list; expected dstrial.DataLoader.* reproducibility "
            r".* disable this check by calling context\.disable_dataset_reproducibility_checks\(\)",
        ),
        (
            fit_with(evaluate_batch=lambda self, items, b: {"other": float(len(next(items)))}),
            RuntimeError,
            r"searcher's metric is 'validation_loss', but validation returned \['other'\]",
        ),
        (
            fit_with(evaluate_full_dataset=lambda self, loader: 3),
            TypeError,
            r"eval\(\) must return a dictionary.*, got int\.",
        ),
        (
            fit_with(evaluate_batch=lambda self, items, b: {"validation_loss": "low"}),
            errors.InvalidExperimentException,
            r"no numbers: \['validation_loss'\]",
        ),
        # Determined has no specific error types for these cases.
        (
            fit_with(evaluation_reducer=lambda self: "mean"),
            TrialContractError,
            "expected a determined.pytorch.Reducer",
        ),
        (fit_with(build_training_data_loader=lambda self: None), DataError, "returned None on every rank"),
        (
            fit_with(build_training_data_loader=lambda self: DataLoader([], batch_size=4)),
            DataError,
            "has 0 records",
        ),
        (
            fit_with(build_validation_data_loader=lambda self: DataLoader([], batch_size=4)),
            DataError,
            "validation loader of rank 0 is empty",
        ),
    ],
)
def test_errors_have_determined_types(go, kind, message):
    with pytest.raises(kind, match=message) as caught:
        go()
    assert isinstance(caught.value, (DstrialError, ValueError))
    assert not str(caught.value).startswith("Internal error")


def test_wrong_manual_accumulation_raises_assertion_error():
    import small_trials

    with pytest.raises(AssertionError, match="did not train for gradient accumulation steps") as caught:
        fit(small_trials.ByHandTrial, {"micro_batches": 1})
    assert isinstance(caught.value, TrialContractError)


def test_checkpoint_of_other_engines_raises_assertion_error():
    first = fit(max_length=Batch(1))

    def with_two_engines(self, context):
        original(self, context)
        original(self, context)

    original = trial_class().__init__
    with pytest.raises(AssertionError, match="holds 1 engine") as caught:
        fit(
            trial_class(__init__=with_two_engines),
            max_length=Batch(2),
            latest_checkpoint=first.result.checkpoint_uuid,
        )
    assert isinstance(caught.value, CheckpointLayoutError)


def test_checkpoint_is_found_by_uuid_or_path():
    first = fit(max_length=Batch(3), reporting_period=Batch(1))
    assert (first.result.checkpoint_path / "COMPLETE").is_file()
    whole = fit(max_length=Batch(6), reporting_period=Batch(1))
    # Determined's tests expect checkpoints of runs without a cluster at the last path.
    determined = platformdirs.user_data_path("determined") / str(first.result.checkpoint_uuid)
    for name in (first.result.checkpoint_uuid, str(first.result.checkpoint_path), str(determined)):
        again = fit(max_length=Batch(6), reporting_period=Batch(1), latest_checkpoint=name)
        assert again.directory.path != first.directory.path
        assert values(again.rows("training"))[6] == values(whole.rows("training"))[6]
