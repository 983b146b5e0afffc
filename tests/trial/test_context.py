"""The trial context on one rank: Determined's API, and errors of premature calls."""

import inspect

import determined.pytorch.deepspeed as upstream
import pytest
import torch
from determined import errors

import dstrial
from dstrial.errors import DstrialError, TrialContractError
from dstrial.trial.context import runtime_of

pytestmark = pytest.mark.ranks

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
EXP_CONF = {"name": "context", "data": {"path": "here"}, "reproducibility": {"experiment_seed": 5}}


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hparams = {
        "deepspeed_config": CONFIG,
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 3},
        "global_batch_size": 12,
    }
    with dstrial.init(hparams=hparams, exp_conf=EXP_CONF) as made:
        yield made


@pytest.fixture
def engine(context):
    import deepspeed

    model = torch.nn.Linear(2, 1)
    made, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=context.get_deepspeed_config()
    )
    return made


def refuse(kind, message, call, *args):
    """Assert that a call raises Determined's ``kind`` of error, which is dstrial's too."""
    with pytest.raises(kind, match=message) as caught:
        call(*args)
    assert isinstance(caught.value, (DstrialError, ValueError))
    assert not str(caught.value).startswith("Internal error")


@pytest.mark.parametrize("name", ["DeepSpeedTrialContext", "DeepSpeedTrial", "Trainer", "ModelParallelUnit"])
def test_public_members_match_determined_signatures(name):
    theirs, ours = getattr(upstream, name), getattr(dstrial, name)
    public = [member for member in dir(theirs) if not member.startswith("_")]
    missing = [member for member in public if not hasattr(ours, member)]
    assert not missing
    for member in public:
        if inspect.isfunction(getattr(theirs, member)):
            expected = list(inspect.signature(getattr(theirs, member)).parameters)
            given = list(inspect.signature(getattr(ours, member)).parameters)
            assert given[: len(expected)] == expected, member


@pytest.mark.parametrize(
    "name", ["init", "overwrite_deepspeed_config", "make_data_parallel_mpu", "make_deepspeed_mpu"]
)
def test_functions_match_determined_signatures(name):
    expected = inspect.signature(getattr(upstream, name)).parameters
    given = inspect.signature(getattr(dstrial, name)).parameters
    assert list(given)[: len(expected)] == list(expected)
    assert {k: p.default for k, p in expected.items()} == {k: given[k].default for k in expected}


def test_every_public_name_resolves():
    for name in dstrial.__all__:
        assert getattr(dstrial, name) is not None
    from attrdict import AttrDict

    assert dstrial.AttrDict is AttrDict


def test_deepspeed_config_resolves_auto_without_mutation(context):
    config = context.get_deepspeed_config()
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (12, 3)
    assert context.get_hparam("deepspeed_config") == CONFIG


def test_batch_sizes_come_from_first_engine(context, engine):
    for asked in (context.get_train_micro_batch_size_per_gpu, context.get_num_micro_batches_per_slot):
        refuse(
            errors.InvalidExperimentException, "before an engine is wrapped.*Call wrap_model_engine", asked
        )
    assert context.wrap_model_engine(engine) is engine
    assert context.models == [engine]
    assert (context.get_train_micro_batch_size_per_gpu(), context.get_num_micro_batches_per_slot()) == (4, 3)
    with pytest.warns(FutureWarning, match="get_train_micro_batch_size_per_gpu"):
        assert context.train_micro_batch_size_per_gpu == 4
    with pytest.warns(FutureWarning, match="get_num_micro_batches_per_slot"):
        assert context.num_micro_batches_per_slot == 3


@pytest.mark.parametrize("setter", ["set_train_batch_size", "set_train_micro_batch_size"])
def test_wrapped_engine_refuses_other_batch_size(context, engine, setter):
    context.wrap_model_engine(engine)
    before = engine.train_batch_size()
    with pytest.raises(TrialContractError, match=f"{setter} is called on a wrapped engine"):
        getattr(engine, setter)(2 * before)
    assert engine.train_batch_size() == before


def test_wrap_model_engine_refuses_plain_module(context):
    with pytest.raises(TrialContractError, match="is a Linear; expected the engine"):
        context.wrap_model_engine(torch.nn.Linear(1, 1))


def test_set_mpu_needs_engine_and_works_once(context, engine):
    unit = dstrial.ModelParallelUnit(0, 1, should_report_metrics=True, should_build_data_loader=True)
    refuse(errors.InvalidExperimentException, "Call wrap_model_engine first", context.set_mpu, unit)
    context.wrap_model_engine(engine)
    context.set_mpu(unit)
    twice = r"^Only one MPU can be passed to DeepSpeedTrialContext\. .*a second time"
    refuse(errors.InvalidExperimentException, twice, context.set_mpu, unit)


def test_position_is_known_only_during_training(context):
    for asked in (context.current_train_batch, context.is_epoch_start):
        refuse(errors.InternalException, "before training", asked)
    context._current_batch_idx, context._epoch_len = 9, 5
    assert (context.current_train_batch(), context.current_train_epoch()) == (9, 1)
    assert (context.is_epoch_start(), context.is_epoch_end()) == (False, True)


def test_config_getters_name_missing_hyperparameter(context):
    assert context.get_data_config() == {"path": "here"}
    assert context.get_trial_seed() == 5
    assert (context.get_experiment_id(), context.get_trial_id(), context.get_initial_batch()) == (0, 0, 0)
    assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (12, 12)
    with pytest.raises(ValueError, match="hyperparameter 'lr' does not exist; expected one of"):
        context.get_hparam("lr")


def test_missing_config_error_names_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dstrial.init() as bare:
        for asked, missing in [
            (bare.get_hparams, "pass hparams"),
            (bare.get_experiment_config, "pass exp_conf"),
            (bare.get_global_batch_size, "global_batch_size"),
        ]:
            with pytest.raises(ValueError, match=missing):
                asked()
        refuse(errors.InternalException, "no trial seed.*experiment_seed", bare.get_trial_seed)


def test_to_device_keeps_structure(context):
    moved = context.to_device({"a": [torch.ones(2), (torch.zeros(1),)]})
    assert moved["a"][0].device == context.device
    assert isinstance(moved["a"][1], tuple)


def test_stop_and_tensorboard_flags_require_booleans(context):
    assert context.get_stop_requested() is False
    context.set_stop_requested(True)
    assert context.get_stop_requested() is True
    with pytest.raises(AssertionError):
        context.set_stop_requested("yes")
    with pytest.raises(AssertionError):
        context.set_enable_tensorboard_logging(1)


def test_tensorboard_writer_writes_to_tensorboard_path(context):
    context.get_tensorboard_writer().add_scalar("x", 1.0, 1)
    context.get_tensorboard_writer().flush()
    assert list(context.get_tensorboard_path().glob("events*"))


def test_private_attributes_mirror_loop_state(context, engine):
    """Code written for Determined reads and sets these attributes."""
    context.wrap_model_engine(engine)
    runtime = runtime_of(context)
    values = {
        "_core": runtime.core,
        "_exp_conf": EXP_CONF,
        "_hparams": context.get_hparams(),
        "_trial_seed": 5,
        "_steps_completed": 0,
        "_mpu": runtime.mpu,
        "_current_batch_idx": None,
        "_epoch_len": None,
        "_manual_grad_accumulation": False,
        "_data_repro_checks_disabled": False,
        "_enable_tensorboard_logging": True,
        "_stop_requested": False,
    }
    assert {name: getattr(context, name) for name in values} == values
    context.set_stop_requested(True)
    context.disable_auto_grad_accumulation()
    context.disable_dataset_reproducibility_checks()
    assert (context._stop_requested, context._manual_grad_accumulation) == (True, True)
    assert (runtime.is_stop_requested, runtime.repro_checks_disabled) == (True, True)
    assert runtime.train_calls_per_batch == 1
    context._manual_grad_accumulation = False
    assert runtime.train_calls_per_batch == 3
