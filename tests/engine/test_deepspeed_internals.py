"""Undocumented DeepSpeed names exist in the installed release and stay isolated."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed_release import needs_0_19_8

import dstrial
from dstrial.engine.checkpoint_reader.safe_load import LISTED
from dstrial.engine.deepspeed_internals import PUBLIC_MODULES, engines, optimizers, process
from dstrial.resume.metadata import EngineRecord
from dstrial.trial.runtime import ModelParallelUnit

PACKAGE = Path(dstrial.__file__).parent
INTERNALS = PACKAGE / "engine" / "deepspeed_internals"
TEMPLATES = PACKAGE / "cli" / "templates"  # users' code
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.is_relative_to(INTERNALS) and not path.is_relative_to(TEMPLATES)
]

# ---- only deepspeed_internals uses undocumented names ---------------------------------------------------------------------


def trees() -> Iterator[tuple[str, ast.AST]]:
    """Yield modules whose text contains a word of ``SAID``; parsing all is slow."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if any(said in "".join(text.split()) for said in SAID):
            yield str(path.relative_to(PACKAGE)), ast.parse(text)


def first_name(node: ast.AST | None) -> str | None:
    """Return the name that an expression begins with: ``a`` of ``a.b(c)[d].e``."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def imported(node: ast.AST) -> list[str]:
    """Return the DeepSpeed modules that a node imports or names in a string."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        found = [node.module or ""]
    elif (
        isinstance(node, ast.Attribute)
        and first_name(node) == "deepspeed"  # unparsing takes long
        and ast.unparse(node).startswith("deepspeed.runtime.")
    ):
        found = [ast.unparse(node)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = [node.value] if re.fullmatch(r"deepspeed(\.\w+)+", node.value) else []
    else:
        found = []
    return [name for name in found if name.split(".")[0] == "deepspeed"]


def names_in(*sources: str) -> set[str]:
    """Return the public attributes that DeepSpeed's modules define."""
    root = Path(deepspeed.__file__).parent / "runtime"
    text = "".join((root / source).read_text(encoding="utf-8") for source in sources)
    return {name for name in re.findall(r"(?:self\.|def )(\w+)", text) if not name.startswith("_")}


# Variables called engine may also be an ``EngineRecord``, the description in a checkpoint.
ENGINE_NAMES = names_in("engine.py", "pipe/engine.py") | set(dir(torch.nn.Module())) | set(dir(EngineRecord))
ENGINE_NAMES |= {field.name for field in dataclasses.fields(EngineRecord)}
GRID_NAMES = names_in("pipe/topology.py")
KNOWN = {
    "engine": ENGINE_NAMES,
    "optimizer": {"param_groups", "state", "get"},
    "engine.module": names_in("pipe/module.py") | set(dir(torch.nn.Module())),
    "grid": GRID_NAMES,
    "mpu": GRID_NAMES | {field.name for field in dataclasses.fields(ModelParallelUnit)},
    "topology": GRID_NAMES,
}
"""Attributes that may be read from variables with these names."""
SAID = ("deepspeed", ".ds_", *(f"{name}." for name in KNOWN))


def known_of(node: ast.expr) -> Any:
    """Return the attributes that may be read from an expression; None if unknown."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    name = node.id if isinstance(node, ast.Name) else node.attr
    if name == "module" and isinstance(node, ast.Attribute):
        name = ".".join(ast.unparse(node).replace("_engine", "engine").split(".")[-2:])
    return KNOWN.get(name.removeprefix("_") if name in ("_engine", "_optimizer") else name)


@pytest.fixture(scope="module")
def undocumented() -> tuple[list[str], list[str]]:
    """Return where other packages use undocumented modules, and attributes."""
    # Strings that name classes in checkpoints, and a call in users' scripts.
    texts = {*LISTED, "deepspeed.initialize"}
    modules, attributes = [], []
    for name, tree in trees():
        for node in ast.walk(tree):
            modules += [
                f"{name}:{node.lineno}: {module}"
                for module in imported(node)
                if module not in PUBLIC_MODULES and module not in texts
            ]
            # The master imports no DeepSpeed; its engines are Slurm and Ray.
            if (
                isinstance(node, ast.Attribute)
                and not name.startswith("master/")
                and (node.attr.startswith("ds_") or node.attr not in (known_of(node.value) or {node.attr}))
            ):
                attributes.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return modules, attributes


def test_undocumented_modules_are_imported_by_internals_only(
    undocumented: tuple[list[str], list[str]],
) -> None:
    assert undocumented[0] == []


def test_undocumented_attributes_are_read_by_internals_only(
    undocumented: tuple[list[str], list[str]],
) -> None:
    assert undocumented[1] == []


# ---- the process -----------------------------------------------------------------------------------------------------------


def test_no_compatible_ops_disables_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    module, name = process.SHARED_MEMORY_OP
    from deepspeed import ops

    before = vars(ops).get(process.COMPATIBLE_OPS)
    with process.no_compatible_ops():
        assert getattr(importlib.import_module(module), name)() is None
    assert vars(ops).get(process.COMPATIBLE_OPS) is before


def test_replaced_functions_have_expected_signatures() -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    source = inspect.getsource(process.torch_backend())

    # Decorators hide the signatures.
    assert "def send(self, tensor, dst, group=None, tag=0):" in source
    assert "def recv(self, tensor, src=None, group=None, tag=0):" in source
    assert list(inspect.signature(CUDA_Accelerator.available_memory).parameters) == ["self", "device_index"]
    assert callable(process.op_builder().load)
    assert importlib.util.find_spec(process.FUSED_ADAM_KERNEL[0]) is not None


def test_methods_of_engine_phases_exist() -> None:
    from deepspeed import DeepSpeedEngine, PipelineEngine

    for name, _ in (*process.ENGINE_PHASES, ("allreduce_gradients", "reduce")):
        assert callable(getattr(DeepSpeedEngine, name)), name
    for name in ("forward", "backward", "step"):
        assert name in vars(DeepSpeedEngine), name
    assert "train_batch" in vars(PipelineEngine)


@needs_0_19_8
def test_modules_imported_ahead_exist() -> None:
    for module in process.MODULES_OF_ENGINES:
        assert importlib.util.find_spec(module) is not None, module


def test_remedies_match_messages_of_deepspeed() -> None:
    root = Path(deepspeed.__file__).parent
    sources = [
        (root / name).read_text(encoding="utf-8")
        for name in ("__init__.py", "runtime/engine.py", "runtime/config.py")
    ]

    assert [words for words in engines.REMEDIES if not any(words in source for source in sources)] == []


def test_append_remedy_accepts_error_without_arguments() -> None:
    engines.append_remedy(KeyError())


@pytest.mark.process  # torch's build for CUDA asks nvcc for its version
def test_fused_kernel_package_exists_linear_is_not_fused() -> None:
    assert importlib.util.find_spec(engines.FUSED_KERNELS) is not None
    assert not engines.is_fused(torch.nn.Linear(1, 1))


def test_checkpointing_functions_of_backward_exist() -> None:
    checkpointing = importlib.import_module(engines.CHECKPOINT_MODULE)
    assert inspect.isfunction(checkpointing.CheckpointFunction.backward)
    assert "def checkpoint_unpack(" in inspect.getsource(checkpointing.non_reentrant_checkpoint)


@pytest.mark.process  # where there is an nvcc, DeepSpeed asks it for its release
def test_cuda_mismatch_returns_text_or_none() -> None:
    assert isinstance(process.cuda_mismatch(), str | None)


# ---- checkpoints and engine functions --------------------------------------------------------------------------------------


def test_checkpoint_classes_exist_under_saved_names() -> None:
    assert pkgutil.resolve_name("deepspeed.runtime.fp16.loss_scaler.LossScaler") is optimizers.LossScaler
    assert (
        pkgutil.resolve_name("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler")
        is optimizers.DynamicLossScaler
    )
    assert pkgutil.resolve_name("deepspeed.runtime.zero.config.ZeroStageEnum") is optimizers.ZeroStageEnum
    assert (
        pkgutil.resolve_name("deepspeed.utils.tensor_fragment.fragment_address")
        is optimizers.fragment_address
    )
    assert [field.name for field in dataclasses.fields(optimizers.fragment_address)] == ["numel", "start"]
    assert not any(
        "__setstate__" in vars(one) for one in (optimizers.LossScaler, optimizers.DynamicLossScaler)
    )
    assert [int(stage) for stage in optimizers.ZeroStageEnum][:4] == [0, 1, 2, 3]


def test_checkpoint_engine_has_expected_methods() -> None:
    own = {name for name in vars(engines.CheckpointEngine) if not name.startswith("_")}

    assert {"create", "save", "load", "commit", "is_data_parallel_writer", "preserves_storage_sharing"} <= own
    assert issubclass(engines.TorchCheckpointEngine, engines.CheckpointEngine)


def test_config_file_is_read_duplicate_keys_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3}')
    assert engines.load_config_file(str(path)) == {"train_batch_size": 3}
    path.write_text('{"train_batch_size": 3, "train_batch_size": 4}')
    with pytest.raises(ValueError, match="train_batch_size"):
        json.loads(path.read_text(), object_pairs_hook=engines.dict_raise_error_on_duplicate_keys)
