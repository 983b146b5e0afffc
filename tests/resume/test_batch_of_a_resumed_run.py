"""Batch sizes, slots and incompatible settings of resumed runs."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.errors import ConfigError
from dstrial.resume.apply import ResumedRun
from dstrial.resume.batch import keep_batch
from dstrial.resume.metadata import EngineRecord, SavedRun, given_settings, run_metadata
from dstrial.resume.plan import resumable_slots, resume_problems

SIZES = st.integers(min_value=1, max_value=24)
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DEFAULTS = {
    "engine_kind": "data_parallel",
    "world_size": 3,
    "data_parallel_size": 3,
    "pipeline_stages": 1,
    "model_parallel_size": 1,
    "zero_stage": 1,
    "offload_optimizer": "none",
    "offload_parameters": "none",
    "optimizer": "Adam",
    "wrapper": "DeepSpeedZeroOptimizer",
    "lr_scheduler": "",
    "train_batch_size": 24,
    "micro_batch_size": 4,
    "micro_batches_per_batch": 2,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam"},
}


def engine(**changes):
    more = {"given": changes.pop("given", given_settings(CONFIG))}
    return EngineRecord.from_layout({**DEFAULTS, **changes}, more)


def run(*engines):
    return SavedRun("c1", 10, 0, engines or (engine(),))


def sizes(solution):
    return tuple(getattr(solution, key) for key in KEYS)


def keep(config, saved, replicas, **more):
    return keep_batch(config, saved, replicas, checkpoint="c1", **more)


def problem(call, *args, **more):
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    assert len(caught.value.problems) == 1
    return str(caught.value)


@given(
    SIZES,
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from([(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0), (0, 1, 0)]),
)
def test_unchanged_config_keeps_batch_without_larger_micro_batch(micro, steps, before, after, is_given):
    steps = steps if is_given[2] or all(is_given[:2]) else 1
    total = micro * steps * before
    config = {
        key: size for key, size, there in zip(KEYS, (total, micro, steps), is_given, strict=True) if there
    }
    saved = engine(
        data_parallel_size=before,
        world_size=before,
        train_batch_size=total,
        micro_batch_size=micro,
        micro_batches_per_batch=steps,
        given=config,
    )
    if total % after:
        message = problem(keep, config, saved, after)
        offered = [
            int(number) for number in re.findall(r"Go on with ([\d or]+) slots", message)[0].split(" or ")
        ]
        assert offered
        for replicas in offered:
            assert keep(config, saved, replicas).train_batch_size == total
        return
    solution = keep(config, saved, after)
    assert solution.train_batch_size == total
    assert solution.train_micro_batch_size_per_gpu * solution.gradient_accumulation_steps * after == total
    assert solution.train_micro_batch_size_per_gpu <= micro
    larger = range(solution.train_micro_batch_size_per_gpu + 1, micro + 1)
    assert not any(total // after % size == 0 for size in larger)
    if after == before:
        assert sizes(solution) == (total, micro, steps)


@pytest.mark.parametrize(
    ("config", "changes", "replicas", "expected"),
    [
        pytest.param(CONFIG, {}, 4, (24, 3, 2), id="more replicas"),
        # On four replicas the sizes in the config would give a batch of 32 instead of 24.
        pytest.param(
            CONFIG,
            {"data_parallel_size": 4, "world_size": 4, "micro_batch_size": 3},
            2,
            (24, 4, 3),
            id="second resume",
        ),
        pytest.param(
            {"train_batch_size": 24},
            {"micro_batch_size": 8, "micro_batches_per_batch": 1, "given": {"train_batch_size": 24}},
            2,
            (24, 6, 2),
            id="micro batch at most as before",
        ),
        pytest.param(
            {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1},
            {},
            4,
            (24, 6, 1),
            id="other sizes of the same batch",
        ),
        pytest.param(
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            {},
            4,
            (24, 2, 3),
            id="same batch on the saved replicas",
        ),
        pytest.param(
            {"train_batch_size": 24, "gradient_accumulation_steps": 2},
            {
                "data_parallel_size": 4,
                "world_size": 4,
                "micro_batch_size": 6,
                "micro_batches_per_batch": 1,
                "given": {"train_batch_size": 24},
            },
            4,
            (24, 3, 2),
            id="added accumulation",
        ),
        pytest.param(CONFIG, {"given": {}}, 2, (24, 4, 3), id="no given sizes"),
    ],
)
def test_resume_keeps_batch(config, changes, replicas, expected):
    assert sizes(keep(config, engine(**changes), replicas)) == expected


def test_changed_batch_is_refused_with_suggested_sizes():
    message = problem(
        keep, {**CONFIG, "train_micro_batch_size_per_gpu": 8}, engine(), 4, where={KEYS[0]: "ds.json"}
    )
    assert message.startswith(
        "ds.json is 64 (train_micro_batch_size_per_gpu 8, gradient_accumulation_steps 2 on 4 rep"
    )
    assert "expected 24, the batch of checkpoint c1" in message
    assert (
        "Set train_batch_size to 24, train_micro_batch_size_per_gpu to 6 and gradient_accumulation_steps to 1"
        in message
    )
    assert "searcher.source_checkpoint_uuid" in message
    assert "is 32; expected 24" in problem(keep, {"train_batch_size": 32}, engine(), 4)


def test_indivisible_batch_is_refused_with_nearest_alternatives():
    message = problem(keep, CONFIG, engine(), 5, ranks_per_replica=2)
    assert "24 in checkpoint c1, which 5 data-parallel replicas cannot share evenly" in message
    assert "Go on with 8 or 12 slots" in message
    assert "train_batch_size 20 or 25" in message


def test_metadata_survives_json_with_float_integers():
    metadata = {**run_metadata([engine()], 7), "steps_completed": 10}
    metadata["engines"][0] = {
        key: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in metadata["engines"][0].items()
    }
    assert SavedRun.from_metadata("c1", metadata) == SavedRun("c1", 10, 7, (engine(),))
    assert SavedRun.from_metadata("c1", {"steps_completed": 3}) is None
    assert SavedRun.from_metadata("c1", {"format": "dstrial", "engines": [{"world_size": 2}]}) is None


REFUSED = [
    ({"expert_parallel_size": 2}, "whose experts are spread over its ranks"),
    ({"optimizer": "OnebitAdam"}, "whose optimizer OnebitAdam keeps state of unknown layout"),
    ({"optimizer": "AdamW8bit"}, "whose optimizer AdamW8bit keeps state of unknown layout"),
    ({"wrapper": "MiCS_Optimizer"}, "arranges its state in its own way"),
    ({"offload_optimizer": "nvme"}, "whose state is offloaded to NVMe"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_unmappable_engine_state_requires_same_layout(changes, why):
    saved = run(dataclasses.replace(engine(), **changes))
    assert resume_problems(saved, num_slots=3) == []
    (found,) = resume_problems(saved, num_slots=2)
    assert why in str(found)
    assert "Go on with 3 slots, ZeRO stage 1" in str(found)


def test_different_optimizer_family_or_scheduler_is_refused():
    saved = run()
    (found,) = resume_problems(saved, num_slots=3, configs=[{**CONFIG, "optimizer": {"type": "Lion"}}])
    assert "deepspeed config: optimizer.type is 'Lion'; expected 'Adam'" in str(found)
    assert resume_problems(saved, num_slots=3, configs=[{**CONFIG, "optimizer": {"type": "AdamW"}}]) == []
    scheduled = engine(
        lr_scheduler="WarmupLR", given=given_settings({**CONFIG, "scheduler": {"type": "WarmupLR"}})
    )
    (found,) = resume_problems(
        run(scheduled), num_slots=3, configs=[{**CONFIG, "scheduler": {"type": "OneCycle"}}]
    )
    assert "scheduler.type is 'OneCycle'; expected 'WarmupLR'" in str(found)


def test_trial_created_optimizer_is_not_compared_with_config():
    own = engine(optimizer="SGD")
    assert resume_problems(run(own), num_slots=2, configs=[CONFIG]) == []


def test_autotp_checkpoint_refuses_other_model_parallelism():
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    saved = engine(world_size=2, data_parallel_size=1, model_parallel_size=2, given=given_settings(config))
    assert resume_problems(run(saved), num_slots=2, configs=[config]) == []
    found = resume_problems(run(saved), num_slots=2, configs=[CONFIG], extents={"model_parallel_size": 2})
    assert any("model_parallel_size is 2" in str(one) and "only AutoTP's" in str(one) for one in found)


def test_changed_autotp_size_keeps_records_per_batch():
    """With two AutoTP ranks, DeepSpeed counts 24 records as ``train_batch_size`` 48."""
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    saved = engine(world_size=4, data_parallel_size=2, model_parallel_size=2, train_batch_size=48,
                   micro_batch_size=6, micro_batches_per_batch=2, given=given_settings(config))  # fmt: skip
    assert resume_problems(run(saved), num_slots=2, configs=[CONFIG]) == []
    assert keep_batch(CONFIG, saved, 2, checkpoint="C").train_batch_size == 24
    assert keep_batch(config, saved, 4, checkpoint="C").train_batch_size == 48


def test_slots_not_multiple_of_replica_are_refused():
    piped = engine(world_size=4, data_parallel_size=2, pipeline_stages=2, engine_kind="pipeline")
    (found,) = resume_problems(run(piped), num_slots=3)
    assert "resources.slots_per_trial is 3; expected a multiple of 2, the ranks of one replica" in str(found)
    assert "Use 2 or 4 slots, or set data.dstrial.pipeline_stages" in str(found)
    assert resume_problems(run(piped), num_slots=3, extents={"pipeline_stages": 1}) == []
    (found,) = resume_problems(run(piped), num_slots=4, extents={"model_parallel_size": 2})
    assert "data.dstrial.model_parallel_size is 2; expected 1" in str(found)


@pytest.mark.parametrize(
    ("ranks", "slots", "replicas"),
    [
        pytest.param({"data_parallel_size": 1, "model_parallel_size": 2}, 2, 2, id="autotp"),
        pytest.param({"world_size": 4, "data_parallel_size": 4}, 2, 1, id="sequence"),
    ],
)
def test_resume_counts_replicas_as_deepspeed_does(ranks, slots, replicas):
    """Each AutoTP rank counts as a replica; ranks that share a sequence count as one."""
    saved = engine(**{"world_size": 2, "train_batch_size": 16, **ranks})
    assert saved.batch_replicas(slots) == replicas
    assert not any(
        "batch" in problem.where for problem in resume_problems(run(saved), num_slots=slots, configs=[CONFIG])
    )
    resumed = ResumedRun(run(saved), saved.world_size, {})
    assert resumed.hyperparameters({"deepspeed_config": CONFIG}) == {"deepspeed_config": CONFIG}


def test_resumable_slots_lists_batch_divisors_in_descending_order():
    assert list(resumable_slots(run(), at_most=5)) == [4, 3, 2, 1]
    alone = engine(
        world_size=1,
        data_parallel_size=1,
        train_batch_size=7,
        micro_batch_size=7,
        micro_batches_per_batch=1,
        given={},
    )
    assert list(resumable_slots(run(alone), at_most=6)) == [1]
    assert list(resumable_slots(run(alone), at_most=6, at_least=2)) == []
    assert list(resumable_slots(run(engine(expert_parallel_size=2)), at_most=2)) == []


def test_weights_only_resume_allows_any_batch():
    piped = engine(pipeline_stages=3, data_parallel_size=1, engine_kind="pipeline")
    assert resume_problems(dataclasses.replace(run(piped), keeps_batch=False), num_slots=2) == []
    taken = dataclasses.replace(run(), keeps_batch=False)
    assert resume_problems(taken, num_slots=5, configs=[{"train_batch_size": 35}]) == []
