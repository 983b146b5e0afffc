"""Save and load an engine, with the state that DeepSpeed 0.19.8 does not save."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, PipelineEngine, PipelineModule, checkpointing, comm

from dstrial.checkpoint.layout import Layout
from dstrial.engine.checkpoint_reader.saved_engine import is_equal
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.engine.parameter_names import named_buffers
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointLayoutError

_SCHEDULED = ("lr", "betas", "momentum")  # optimizer settings that learning-rate schedulers change
# torch's schedulers store their base learning rate in initial_lr.
_OPTIMIZER_SETTINGS = (*_SCHEDULED, "initial_lr", "eps", "weight_decay", "dampening", "nesterov")


def save_engine(engine: DeepSpeedEngine, path: str | pathlib.Path, tag: str) -> None:
    """Save ``engine`` in ``path/tag``.

    Call between two optimizer steps.

    Raises:
        CheckpointError: a file could not be written.

    Ranks: all, collectively.
    """
    try:
        engine.save_checkpoint(str(path), tag=tag)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {path} could not be written by {describe_rank(engine)}: {error}. Make room or choose another "
            "directory, and resume from the previous checkpoint."
        ) from error


def load_engine(engine: DeepSpeedEngine, path: str | pathlib.Path, tag: str) -> None:
    """Load the checkpoint in ``path/tag`` into a new ``engine``.

    ``engine`` must have the rank layout of the engine that wrote the checkpoint; otherwise use ``load_reshaped``.

    Raises:
        CheckpointError: DeepSpeed finds nothing to load.

    Ranks: all, collectively.
    """
    loaded, _ = engine.load_checkpoint(str(path), tag=tag)
    if loaded is None:
        raise CheckpointError(
            f"Failed to load deepspeed checkpoint. {path} holds nothing under {tag!r} that DeepSpeed can load on "
            f"{describe_rank(engine)}; "
            "expected engine files. Resume from another checkpoint."
        )


def latest_tag(load_dir: str | pathlib.Path) -> str | None:
    """Return the tag in the file ``load_dir/latest``; None if the file is missing.

    Raises:
        CheckpointDamagedError: the tag is not a plain folder name. DeepSpeed does not check this: with ``../../x`` it would
            load files outside the checkpoint.

    Source: DeepSpeed 0.19.8 ``DeepSpeedEngine.load_checkpoint``.
    """
    path = pathlib.Path(load_dir) / "latest"
    if not path.is_file():
        return None
    tag = path.read_text(encoding="utf-8", errors="replace").strip()
    if pathlib.PurePosixPath(tag).name != tag or tag in ("", "..") or "\0" in tag:
        raise CheckpointDamagedError(
            f"{path} names {tag[:80]!r}; expected the name of a folder beside it, as DeepSpeed writes it. Use another checkpoint."
        )
    return tag


def describe_rank(engine: DeepSpeedEngine) -> str:
    """Return ``rank 3``, or ``rank 3 (stage 1)`` in a pipeline, for messages."""
    if isinstance(engine, PipelineEngine):
        return f"rank {comm.get_rank()} (stage {engine.stage_id})"
    return f"rank {comm.get_rank()}"


def engine_extra_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the state of this rank that DeepSpeed does not save.

    A resumed run needs this state to continue exactly. The entries are:

    - ``micro_steps``: number of micro batches that the engine has processed.
    - ``global_grad_norm``: gradient norm of the last step, as ``get_global_grad_norm`` returns it.
    - ``buffers``: this rank's module buffers. DeepSpeed saves only the persistent buffers of replica 0, and
      running statistics differ between replicas.
    - ``micro_offset``: number of forward passes of a pipeline, from which ``seed_layers`` derives seeds.
    - ``tied_modules``: layers tied between pipeline stages. DeepSpeed writes no file for a tied layer with a ``forward_fn``,
      and does not record which files have the other tied layers.
    - ``rng_tracker``: states of activation checkpointing's random generators.
    - ``grad_scalers``: state of torch autocast's gradient scalers.

    Tensors are on the CPU. All values can be loaded with ``torch.load(weights_only=True)``.
    """
    state: dict[str, Any] = {
        "micro_steps": int(engine.micro_steps),
        "global_grad_norm": _as_float(engine.get_global_grad_norm()),
        "buffers": {name: _on_cpu(buffer) for name, buffer in named_buffers(engine.module).items()},
        "rng_tracker": {
            name: _on_cpu(value) for name, value in checkpointing.get_cuda_rng_tracker().get_states().items()
        },
        "grad_scalers": {name: scaler.state_dict() for name, scaler in _grad_scalers(engine).items()},
    }
    if isinstance(engine, PipelineEngine):
        state["micro_offset"] = int(engine.module.micro_offset)
        state["tied_modules"] = {
            key: {
                name: _on_cpu(value) for name, value in engine.module.tied_modules[key].state_dict().items()
            }
            for key in sorted(engine.module.tied_modules)
        }
    return state


def restore_engine_extra_state(engine: DeepSpeedEngine, state: Mapping[str, Any]) -> None:
    """Restore a result of ``engine_extra_state``; call after loading the engine.

    Raises:
        CheckpointError: the model's buffers have other names than the saved buffers.

    Ranks: all, collectively.
    """
    engine.micro_steps = state["micro_steps"]
    engines.set_global_grad_norm(engine, state["global_grad_norm"])
    _restore_buffers(engine, state["buffers"])
    if state["rng_tracker"]:
        checkpointing.get_cuda_rng_tracker().set_states(dict(state["rng_tracker"]))
    for name, scaler in _grad_scalers(engine).items():
        if name in state["grad_scalers"]:
            scaler.load_state_dict(state["grad_scalers"][name])
    if isinstance(engine, PipelineEngine):
        engine.module.micro_offset = state["micro_offset"]
        tied = _tied_without_file(engine.module)
        for key in tied:
            engine.module.tied_modules[key].load_state_dict(state["tied_modules"][key])
    _refresh_last_learning_rates(engine)


def extra_state_for(
    engine: DeepSpeedEngine, saved: Layout, now: Layout, extras: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Build the extra state of this rank from a checkpoint with another rank layout.

    The result is an argument for ``restore_engine_extra_state``. ``extras`` has the ``engine_extra_state`` of each saved rank.
    ``saved`` is the layout in the checkpoint, ``now`` that of the engine. A replica gets the buffers of the saved replica with
    the same index, modulo the number of saved replicas; a pipeline stage gets the buffers of its layers.

    Raises:
        CheckpointLayoutError: the checkpoint lacks a buffer of the model.
    """
    replica = engines.replica(engine) % saved.data_parallel_size
    parts = [
        extras[part * saved.data_parallel_size + replica]
        for part in range(len(extras) // saved.data_parallel_size)
    ]
    buffers: dict[str, torch.Tensor] = {}
    tied: dict[str, Any] = {}
    for extra in parts:
        buffers.update(extra["buffers"])
        tied.update(extra.get("tied_modules", {}))
    wanted = list(named_buffers(engine.module))
    missing = [name for name in wanted if name not in buffers]
    if missing:
        raise CheckpointLayoutError(
            f"the checkpoint has no buffers {', '.join(missing)}; expected those of the model. Use the same model."
        )
    first = parts[0]
    state = {
        **first,
        "micro_steps": engine.global_steps * now.micro_batches_per_batch,
        "buffers": {name: buffers[name] for name in wanted},
        "tied_modules": tied,
    }
    if "micro_offset" in first:
        forwards = int(first["micro_offset"])
        state["micro_offset"] = forwards // saved.micro_batches_per_batch * now.micro_batches_per_batch
    elif now.engine_kind == "pipeline":
        state["micro_offset"] = engine.global_steps * now.micro_batches_per_batch
    return state


def merged_tied_modules(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return key of a tied layer -> the layer's state dict, merged from all ranks.

    ``extras`` has the ``engine_extra_state`` of every rank of a pipeline.

    Raises:
        CheckpointLayoutError: ranks have different values for the same tied layer.
    """
    tied: dict[str, Any] = {}
    unequal: set[str] = set()
    for extra in extras:
        for key, state in extra.get("tied_modules", {}).items():
            known = tied.setdefault(key, state)
            unequal |= {
                f"tied_modules.{key}.{name}" for name in state if not is_equal(known[name], state[name])
            }
    if unequal:
        raise CheckpointLayoutError(
            f"the checkpoint has another layout and cannot be loaded in this one: {describe_untied(sorted(unequal))}."
        )
    return tied


def describe_untied(names: Sequence[str]) -> str:
    return (
        f"the tied parameters {', '.join(names)} differ between the pipeline's stages: keep the stages, or name them in "
        "tied_weight_attr of the TiedLayerSpec in a new run"
    )


def bind_load_checkpoint(engine: PipelineEngine) -> None:
    """Fix ``load_checkpoint`` of a bfloat16 pipeline without ZeRO, in place.

    A no-op for other pipelines.

    DeepSpeed 0.19.8 wraps this pipeline's optimizer in ``BF16_Optimizer``, whose state is partitioned and saved per replica,
    but loads replica 0's state in a wrong format (``KeyError: 0``). The replacement loads each replica's own file.
    """
    if not optimizers.has_file_per_replica(engine.optimizer) or engine.zero_optimization():
        return

    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **options: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        tag = latest_tag(load_dir) if tag is None else tag
        loaded, client_state = type(engine).load_checkpoint(
            engine,
            load_dir,
            tag,
            load_module_strict,
            False,
            load_lr_scheduler_states,
            load_module_only,
            **options,
        )
        if loaded is not None and load_optimizer_states and not load_module_only:
            engines.load_zero_states(engine, load_dir, tag)
        elif loaded is not None:
            optimizers.restore_masters_from_weights(engine.optimizer)
        return loaded, client_state

    engine.load_checkpoint = load_checkpoint


@contextlib.contextmanager
def loading_with(engine: DeepSpeedEngine, load: Callable[..., Any]) -> Iterator[None]:
    """Replace an engine's ``load_checkpoint`` by ``load`` inside the block."""
    before = vars(engine).get("load_checkpoint")
    engine.load_checkpoint = load
    try:
        yield
    finally:
        del engine.load_checkpoint
        if before is not None:
            engine.load_checkpoint = before


def optimizer_settings(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    """Return the optimizer settings that loading overwrites, one dict per group.

    Each dict maps names such as ``lr`` and ``weight_decay`` to values. With a learning-rate scheduler, ``lr``, ``betas`` and
    ``momentum`` are left out: DeepSpeed's schedulers compute them from the config after a load.
    """
    scheduled = () if engine.lr_scheduler is None else _SCHEDULED
    groups = getattr(optimizers.base_optimizer(engine.optimizer), "param_groups", [])
    names = [name for name in _OPTIMIZER_SETTINGS if name not in scheduled]
    return [{name: group[name] for name in names if name in group} for group in groups]


def is_optimizer_setting(engine: DeepSpeedEngine, name: str, value: Any) -> bool:
    """Return whether the optimizer was created with ``value`` for setting ``name``.

    Only the first parameter group is compared. For ``lr``, the group's ``initial_lr`` is compared if a scheduler has set it.
    """
    group = optimizers.base_optimizer(engine.optimizer).param_groups[0]
    started = group.get("initial_lr", group["lr"]) if name == "lr" else group.get(name)
    return bool(_as_tuple(started) == _as_tuple(value))


def describe_optimizer(engine: DeepSpeedEngine) -> str:
    """Return the optimizer's class and settings: ``AdamW (lr 0.1, eps 1e-08)``."""
    optimizer = optimizers.base_optimizer(engine.optimizer)
    group = optimizer.param_groups[0]
    settings = [f"{name} {group[name]}" for name in _OPTIMIZER_SETTINGS if name in group]
    return f"{type(optimizer).__name__} ({', '.join(settings)})"


def differing_settings(
    engine: DeepSpeedEngine, before: Sequence[Mapping[str, Any]], *, overrides: bool
) -> list[str]:
    """Return the optimizer settings that loading a checkpoint has changed, as text.

    ``before`` is the result of ``optimizer_settings`` before the load. If ``overrides`` is True, the changed settings are set
    back to the values in ``before``; otherwise the optimizer is not changed.

    Returns:
        One text per difference, such as ``lr 0.0001, in the checkpoint 0.01``.

    Raises:
        CheckpointError: ``overrides`` is True, and a scheduler that the trial's code created has loaded another base learning
            rate (``initial_lr``).
    """
    found: list[str] = []
    for idx, (wanted, loaded) in enumerate(zip(before, optimizer_settings(engine), strict=False)):
        changed = {
            name: value
            for name, value in wanted.items()
            if name in loaded and _as_tuple(loaded[name]) != _as_tuple(value)
        }
        found += [f"{name} {value}, in the checkpoint {loaded[name]}" for name, value in changed.items()]
        if overrides and "initial_lr" in changed:
            raise CheckpointError(
                f"override_optimizer is set, but the lr belongs to the {type(engine.lr_scheduler).__name__} of the trial's "
                f"code, whose state is the checkpoint's ({'; '.join(found)}); expected the same lr. Set it back, or use a "
                "scheduler of the DeepSpeed config, which is read again."
            )
        if overrides:
            optimizers.base_optimizer(engine.optimizer).param_groups[idx].update(changed)
    return list(dict.fromkeys(found))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tied_without_file(module: PipelineModule) -> list[str]:
    with_file = engines.tied_layers_with_file(module)
    return sorted(key for key in module.tied_modules if key not in with_file)


def _restore_buffers(engine: DeepSpeedEngine, saved: Mapping[str, torch.Tensor]) -> None:
    buffers = named_buffers(engine.module)
    if buffers.keys() != saved.keys():
        differing = ", ".join(sorted(buffers.keys() ^ saved.keys()))
        raise CheckpointError(
            f"the model's buffers on {describe_rank(engine)} differ from the checkpoint's in {differing}; "
            "expected the same model. Resume with the model definition that wrote the checkpoint."
        )
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(saved[name])


def _refresh_last_learning_rates(engine: DeepSpeedEngine) -> None:
    """Make ``get_last_lr()`` return the optimizer's learning rates after a load."""
    # DeepSpeed's schedulers do not save the value that ``get_last_lr()`` returns.
    scheduler = engine.lr_scheduler
    if scheduler is not None and hasattr(scheduler, "_last_lr") and hasattr(scheduler, "optimizer"):
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _grad_scalers(engine: DeepSpeedEngine) -> dict[str, Any]:
    found = {
        "engine": engines.gradient_scaler(engine),
        "optimizer": optimizers.gradient_scaler(engine.optimizer),
    }
    return {name: scaler for name, scaler in found.items() if scaler is not None}


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
