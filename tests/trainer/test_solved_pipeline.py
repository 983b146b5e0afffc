"""What the check says of a pipeline's batch is what its training does."""

import pytest
import yaml
from small_runs import DEFINITIONS, deepspeed_config, experiment, train

from dstrial.config.experiment_config.config import load_experiment


@pytest.mark.ranks
def test_a_pipeline_trains_with_the_batch_that_the_check_has_solved(tmp_path):
    sizes = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": "auto",
    }
    given = experiment(
        {"deepspeed_config": deepspeed_config(0) | sizes, "num_records": 64},
        batches=2,
        entrypoint="small_trials:SolvedPipelineTrial",
        data={"dstrial": {"pipeline_stages": 2}},
        resources={"slots_per_trial": 2},
    )
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(given))
    batch = load_experiment(path, DEFINITIONS).deepspeed_check.batch
    assert batch.equation.startswith(
        "train_batch_size 32 = train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 x 1"
    )

    done = train(tmp_path, "SolvedPipelineTrial", given, ranks=2)

    assert done.returncode == 0, done.output
    assert list(done.reports("training")) == [2]
