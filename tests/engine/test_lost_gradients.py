"""Calls of ``backward`` are refused if DeepSpeed would lose their gradients."""

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks

SEQUENCES = (
    # f0 is a forward pass of loss 0, b0 its backward, s a step.
    (1, "f0 b0 s"),
    (1, "f0 b0 f1 b1 s"),
    (1, "f0 f1 b0 b1 s"),
    (1, "f0 b0 s f1 b1 s"),
    (2, "f0 b0 s f1 b1 s"),
    (2, "f0 b0 f1 b1 s f2 b2 s"),
    (2, "f0 b0 s f1 b1 f2 b2 s"),
    (2, "f0 f1 b0 b1 s f2 b2 s"),
    (2, "f0 b0 s f1 f2 b1 b2 s"),
)


def weights_and_refusals():
    """Train all sequences in all stages; return (weights, refusal) of each pair."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    from dstrial.engine.engine_hooks import LostGradientCheck, observe_engines
    from dstrial.errors import TrialContractError
    from dstrial.ranks.process_group import without_compiled_collectives

    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")

    def make_engine(accumulation, stage):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, bias=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(engine, sequence):
        losses = {}
        for word in sequence.split():
            if word == "s":
                engine.step()
            elif word[0] == "f":
                losses[word[1]] = engine(torch.eye(4)[[int(word[1])]]).sum()
            else:
                engine.backward(losses[word[1]])

    found = {}
    for accumulation, sequence in SEQUENCES:
        for stage in (0, 1, 2, 3):
            engine = make_engine(accumulation, stage)
            train(engine, sequence)
            parameter = next(engine.module.parameters())
            weights = safe_get_full_fp32_param(parameter) if stage else parameter.detach()
            refusal = ""
            try:
                with observe_engines(LostGradientCheck()):
                    train(make_engine(accumulation, stage), sequence)
            except TrialContractError as error:
                refusal = str(error)
            found[f"{accumulation}: {sequence}", stage] = (
                [round(w, 4) for w in weights.flatten().tolist()],
                refusal,
            )
    return found


def test_backward_losing_gradients_is_refused():
    (result,) = run_function(weights_and_refusals, 1)

    lost = {key for key, (weights, _) in result.value.items() if weights != result.value[key[0], 0][0]}
    refused = {key for key, (_, refusal) in result.value.items() if refusal}
    assert refused == lost
    assert len(lost) == 10
    assert "called backward 2 times" in result.value["1: f0 b0 f1 b1 s", 2][1]
    assert (
        "ZeRO stage 2, which keeps the gradients of the last call only"
        in result.value["1: f0 b0 f1 b1 s", 2][1]
    )
