import pytest
import small_models
from forked_ranks import RunningProgram, of_all_ranks

from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.parallel_dims import ParallelDims
from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks

NUM_RECORDS = {
    "one pipeline": 23,
    "one pipeline, seeded layers": 10,
    "two pipelines": 21,
    "two pipelines, one record left": 17,
    "two pipelines of one stage": 21,
    "fewer records than replicas": 1,
}
ROUNDS = {
    "one pipeline": [[8], [8], [4], [3]],
    "one pipeline, seeded layers": [[8], [2]],
    "two pipelines": [[8, 8], [3, 2]],
    "two pipelines, one record left": [[8, 8], [1, 0]],
    "two pipelines of one stage": [[8, 8], [3, 2]],
    "fewer records than replicas": [[1, 0]],
}


PROGRAM = ("pipeline_program", {})


@pytest.mark.parametrize("arrangement", NUM_RECORDS)
def test_pipeline_validation_leaves_training_bitwise_equal(program: RunningProgram, arrangement: str) -> None:
    result = program.result(arrangement)
    undisturbed = of_all_ranks(result.pop("none"))
    for how, ranks in result.items():
        for rank, (without, validated) in enumerate(zip(undisturbed, of_all_ranks(ranks), strict=True)):
            assert validated["losses"] == without["losses"], (how, rank)
            assert validated["digest"] == without["digest"], (how, rank)


@pytest.mark.parametrize("arrangement", NUM_RECORDS)
def test_pipeline_validation_counts_every_record_once(program: RunningProgram, arrangement: str) -> None:
    result = program.result(arrangement)
    for how in result.keys() - {"none"}:
        ranks = of_all_ranks(result[how])
        reporting = [rank for rank in ranks if rank["reports_metrics"]]
        for idx, reference in enumerate(ranks[0]["references"]):
            mine = [rank["validations"][idx] for rank in reporting]
            assert sum(one["records"] for one in mine) == NUM_RECORDS[arrangement]
            assert [list(sizes) for sizes in zip(*(one["sizes"] for one in mine), strict=True)] == ROUNDS[
                arrangement
            ]
            mean = sum(one["sum"] for one in mine) / NUM_RECORDS[arrangement]
            assert mean == pytest.approx(reference, rel=2e-6)
        for rank in ranks:
            assert {tuple(shape) for one in rank["validations"] for shape in one["shapes"]} == {()}
            same_replica = [other for other in reporting if other["replica"] == rank["replica"]]
            assert rank["validations"] == same_replica[0]["validations"]


def test_wrapped_engine_is_still_pipeline_engine(program: RunningProgram) -> None:
    first, last = of_all_ranks(program.result("one pipeline")["implicit"])
    assert first["is_pipeline_engine"]
    assert last["is_pipeline_engine"]
    assert (first["reports_metrics"], last["reports_metrics"]) == (False, True)
    assert (first["needs_loader"], last["needs_loader"], first["calls"]) == (True, True, 1)


def test_eval_batch_with_arguments_behaves_like_deepspeed(program: RunningProgram) -> None:
    first, last = of_all_ranks(program.result("pass through"))
    assert last["mean"] == pytest.approx(sum(last["each"]) / 2)
    assert last["loss"] == pytest.approx(last["mean"])
    assert first["loss"] == pytest.approx(last["mean"])
    assert first["of_one"] == last["of_one"] == pytest.approx(last["each"][0])
    assert (first["logits"], last["logits"]) == (None, [4, 3])
    assert last["unreduced"] == [[4, 3], [4, 3]]
    assert first["each"] is None


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_rank_out_of_data_raises_data_error(program: RunningProgram, call: str) -> None:
    results = program.result(call)
    named = [result for result in results if result["error"] == "DataError"]
    assert named
    assert named[0]["message"].startswith(f"{call}() on rank ")
    assert "ran out of data; expected 2 micro batches" in named[0]["message"]


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_batch_call_without_data_is_refused(program: RunningProgram, call: str) -> None:
    for result in program.result(f"{call} without data"):
        assert result["error"] == "TrialContractError"
        assert "has no data" in result["message"]


def test_deepspeed_monitor_receives_weighted_loss(program: RunningProgram) -> None:
    first, last = of_all_ranks(program.result("monitored"))
    assert first[0] == last[0]
    assert any("eval_loss" in text for text in first[1:])


def test_pipeline_ignores_sequence_parallel_size_with_warning(
    program: RunningProgram,
) -> None:
    config = small_models.ds_config(1, sequence_parallel_size=2)
    checked = check_deepspeed(config, ParallelDims(2, is_pipeline=True))

    assert checked.batch is not None
    assert program.result("sequence parallelism") == [checked.batch.train_batch_size] * 2
    assert any("sequence_parallel_size is 2, which" in warning for warning in checked.warnings)


@pytest.mark.parametrize("how", ["plain", "tied", "frozen"])
def test_parameter_shared_across_stages_requires_tied_or_frozen(how: str) -> None:
    adapter_program = pytest.importorskip("adapter_program")  # needs transformers
    errors = [result.value for result in run_function(adapter_program.share_across_stages, 2, how)]
    if how != "plain":
        assert errors == [None, None]
    else:
        assert all("layers 0 and 3 of the PipelineModule share a parameter" in error for error in errors)


def test_single_stage_accepts_different_micro_batch_shapes() -> None:
    adapter_program = pytest.importorskip("adapter_program")
    (result,) = run_function(adapter_program.train_one_stage_on_two_shapes, 1)
    assert result.value > 0
