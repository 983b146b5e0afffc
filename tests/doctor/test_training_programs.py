"""What programs of training checks decide by: bits of a checkpoint, the loss scale, real text."""

from __future__ import annotations

import types

import torch

from dstrial.doctor.training.programs.gpt import VOCABULARY_SIZE, batch, blocks, model
from dstrial.doctor.training.programs.precision import loss_scale
from dstrial.doctor.training.programs.save import _equal, _leaves


def test_one_flipped_bit_of_a_saved_tensor_is_seen_and_equal_bits_are_equal() -> None:
    tensor = torch.tensor([1.0, float("nan"), -0.0])
    same = tensor.clone()
    assert _equal(tensor, same), "NaN has the bits of NaN"
    same.view(torch.int32)[0] ^= 1
    assert not _equal(tensor, same)
    assert not _equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not _equal(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not _equal(torch.zeros(2), None)


def test_every_value_of_a_checkpoint_has_a_place_of_its_own() -> None:
    value = {"a": [torch.zeros(1), {"b": 2}], "c": (True, None, "x"), "d": object}
    assert [name for name, _ in _leaves(value, "")] == ["/a/0", "/a/1/b", "/c/0", "/c/1", "/c/2"]


def test_the_loss_scale_is_found_wherever_an_optimizer_keeps_it() -> None:
    space = types.SimpleNamespace
    assert loss_scale(space(optimizer=space(loss_scaler=space(cur_scale=8.0)))) == 8.0
    assert loss_scale(space(optimizer=space(cur_scale=4))) == 4.0
    assert loss_scale(space(optimizer=space())) == 1.0


def test_the_text_is_the_standard_librarys_and_a_model_learns_to_say_something_of_it() -> None:
    data = blocks(4, 16)
    characters, following = data[0]
    assert torch.equal(characters[1:], following[:-1])
    assert int(max(one.max() for one in data.tensors)) < VOCABULARY_SIZE
    for fused in (False, True):
        torch.manual_seed(0)
        net = model(width=16, num_layers=1, num_heads=2, block_size=16, fused=fused)
        loss = net(*data.tensors)
        assert loss.shape == ()
        assert loss.dtype is torch.float32
        assert 4 < float(loss.detach()) < 6, "about log(128) before training"
    shapes = [tuple(one.shape) for one in batch(3, block_size=16)]
    assert shapes == [(3, 16), (3, 16)]


def test_fused_and_written_out_attention_compute_the_same() -> None:
    data = blocks(2, 16)
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        losses.append(model(width=16, num_layers=2, num_heads=2, block_size=16, fused=fused)(*data.tensors))
    assert torch.allclose(*losses, rtol=1e-5)
