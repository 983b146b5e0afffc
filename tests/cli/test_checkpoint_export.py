"""``dstrial checkpoint export``: exported weights equal the live weights."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dstrial.checkpoint.manifest import read_manifest, write_manifest

pytestmark = pytest.mark.ranks

Command = Callable[..., tuple[int, str, str]]
LAYOUTS = ["zero 0", "zero 2", "zero 3", "bf16", "pipeline"]
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parse a safetensors file without the library; assert that tensors fill it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = content[8 + length :]
    tensors = {}
    covered = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == covered
        covered = end
        dtype = TYPES[entry["dtype"]]
        assert end - begin == math.prod(entry["shape"]) * dtype.itemsize
        assert (8 + length + begin) % dtype.itemsize == 0
        tensors[name] = torch.frombuffer(bytearray(body[begin:end]), dtype=dtype).reshape(entry["shape"])
    assert covered == len(body)
    return tensors, metadata


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("case", LAYOUTS)
def test_torch_export_equals_live_state_dict(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path, case: str
) -> None:
    made = checkpoints[case]
    output = tmp_path / "weights.pt"
    exit_code, out, err = dstrial_command(
        "checkpoint", "export", made.latest, output, "--format", "torch", "--dtype", "module"
    )
    assert (exit_code, err) == (0, "")
    exported = torch.load(output, weights_only=True)
    (live,) = made.live
    assert exported.keys() == live.keys()
    assert [name for name in live if not same(exported[name], live[name])] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights.pt"]
    if case != "pipeline":
        assert exported["unembed.weight"].data_ptr() == exported["embed.weight"].data_ptr()
        assert "tied: unembed.weight" in out


@pytest.mark.parametrize("case", LAYOUTS)
def test_safetensors_export_has_master_weights_without_duplicates(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path, case: str
) -> None:
    made = checkpoints[case]
    output = tmp_path / "model.safetensors"
    assert dstrial_command("checkpoint", "export", made.run_path, output)[0] == 0
    tensors, metadata = read_safetensors(output)
    by_library = load_file(output)
    assert by_library.keys() == tensors.keys()
    assert all(same(by_library[name], tensors[name]) for name in tensors)
    (live,) = made.live
    aliases = {} if case == "pipeline" else {"unembed.weight": "embed.weight"}
    assert metadata == {"format": "pt", **aliases}
    assert tensors.keys() == live.keys() - aliases.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if live[name].is_floating_point() else live[name].dtype)
        assert torch.equal(tensor.to(live[name].dtype), live[name]), name
    if case == "bf16":
        assert not torch.equal(tensors["head.weight"], live["head.weight"].float()), "only the rounded ones"


def test_hf_export_has_shards_index_and_model_files(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text('{"model_type": "wide"}')
    (files / "tokenizer.json").write_text("{}")
    (files / "notes.txt").write_text("not the model's")
    output = tmp_path / "model"
    exit_code, _, err = dstrial_command(
        *("checkpoint", "export", checkpoints["zero 2"].latest, output, "--format", "hf"),
        *("--dtype", "bf16", "--max-shard-size", "500B", "--files-from", files),
    )
    assert (exit_code, err) == (0, "")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in output.glob("*.safetensors"))
    assert shards == [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    assert len(shards) > 1
    (live,) = checkpoints["zero 2"].live
    assert index["weight_map"].keys() == live.keys() - {"unembed.weight"}
    total = 0
    for shard in shards:
        tensors, metadata = read_safetensors(output / shard)
        size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        assert size <= 500 or len(tensors) == 1
        total += size
        assert metadata.get("unembed.weight") == ("embed.weight" if "embed.weight" in tensors else None)
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == shard
            wanted = live[name].bfloat16() if live[name].is_floating_point() else live[name]
            assert same(tensor, wanted), name
    assert index["metadata"]["total_size"] == total
    others = {path.name for path in output.iterdir()} - set(shards)
    assert others == {"model.safetensors.index.json", "config.json", "tokenizer.json"}
    small = ("checkpoint", "export", checkpoints["zero 0"].latest, tmp_path / "small", "--format", "hf")
    assert dstrial_command(*small)[0] == 0
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.safetensors"]


def test_export_of_several_engines_requires_engine_option(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    made = checkpoints["two engines"]
    output = tmp_path / "small.safetensors"
    exit_code, _, err = dstrial_command("checkpoint", "export", made.latest, output)
    assert exit_code == 1
    assert "holds 2 engines; expected one of 0 to 1" in err
    for engine_idx in (0, 1):
        path = tmp_path / f"{engine_idx}.safetensors"
        assert dstrial_command("checkpoint", "export", made.latest, path, "--engine", engine_idx)[0] == 0
        tensors, metadata = read_safetensors(path)
        live = made.live[engine_idx]
        assert tensors.keys() == live.keys() - metadata.keys()
        assert all(torch.equal(tensors[name], live[name]) for name in tensors)


def test_export_to_invalid_output_writes_nothing(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for output, options, exit_code, message in (
        (mine, (), 1, "which exists; expected a path where nothing is"),
        (tmp_path / "no" / "directory", (), 1, "is no directory; expected one to write into"),
        (
            tmp_path / "x",
            ("--max-shard-size", "1GB"),
            2,
            "--max-shard-size is given without --format; expected --format hf.\n",
        ),
    ):
        done = dstrial_command("checkpoint", "export", checkpoints["zero 0"].latest, output, *options)
        assert done[0] == exit_code
        assert message in done[2]
    assert {path: path.read_text() for path in tmp_path.iterdir()} == {mine: "precious"}


@pytest.mark.parametrize("output_format", ["safetensors", "torch", "hf"])
def test_export_rejects_damaged_checkpoint(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path, output_format: str
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(checkpoints["zero 2"].latest, path)
    file = path / "model0" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    options = ("checkpoint", "export", path, tmp_path / "output", "--format", output_format)
    exit_code, _, err = dstrial_command(*options)
    assert exit_code == 1
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is changed: SHA-256" in err
    file.write_bytes(content[:-900])
    exit_code, _, err = dstrial_command(*options, "--no-verify")
    assert exit_code == 1
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be read" in err
    assert [found.name for found in tmp_path.iterdir()] == ["damaged"]


def test_export_rejects_checkpoint_in_custom_format(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "own"
    shutil.copytree(checkpoints["zero 2"].latest, path)
    manifest = read_manifest(path)
    others = {name: entry for name, entry in manifest.files.items() if not name.startswith("model0/")}
    write_manifest(path, dataclasses.replace(manifest, files=others))
    exit_code, _, err = dstrial_command("checkpoint", "export", path, tmp_path / "x")
    assert exit_code == 1
    assert "because its trial writes its checkpoints itself" in err


def test_export_of_experts_is_complete_or_rejected(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    whole, spread = checkpoints["whole experts"], checkpoints["spread experts"]
    output = tmp_path / "whole.safetensors"
    assert dstrial_command("checkpoint", "export", whole.latest, output)[0] == 0
    tensors, _ = read_safetensors(output)
    assert tensors.keys() == whole.live[0].keys()
    assert sum("deepspeed_experts" in name for name in tensors) == 8
    assert all(same(tensors[name], value) for name, value in whole.live[0].items())
    exit_code, _, err = dstrial_command(
        "checkpoint", "export", spread.latest, tmp_path / "spread.safetensors"
    )
    assert exit_code == 1
    assert "its experts are spread over 2 ranks" in err
    assert [path.name for path in tmp_path.iterdir()] == ["whole.safetensors"]


def test_export_warns_of_diverged_tied_layer_copies(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    made = checkpoints["loose pipeline"]
    output = tmp_path / "model.safetensors"
    exit_code, _, err = dstrial_command("checkpoint", "export", made.latest, output)
    assert exit_code == 0
    assert (
        "the copies of tied_modules.plain.bias, tied_modules.called.bias on the pipeline's stages differ"
        in err
    )
    tensors, _ = read_safetensors(output)
    assert all(torch.equal(tensors[name], made.live[0][name]) for name in tensors)
