"""Load a checkpoint into another layout (ranks, ZeRO, offload, pipeline stages).

Parameter by parameter, each rank copies its elements from memory-mapped files into the engine's tensors. Extra memory is at
most one shard of a parameter; if ``autotp_size`` changes, one whole parameter. Afterwards all values are compared with the
files bit by bit. The comparison locates elements by DeepSpeed's own records (``SavedEngine.recorded``), and thus verifies the
layout.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from dstrial.checkpoint.layout import (
    Layout,
    ParameterPlace,
    Shard,
    ShardMap,
    keeps_whole_matrices,
    own_shard,
    positions_in_groups,
)
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine, is_equal
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.engine.parameter_names import named_parameters
from dstrial.engine.state import describe_rank, describe_untied
from dstrial.errors import CheckpointError, CheckpointLayoutError
from dstrial.resume.plan import reshape_problems

_SCRATCH_NUMEL = 1 << 20  # elements that are compared at a time
# Optimizer settings that select an implementation and do not change results; the live engine's values are kept.
_IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable", "step"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """Elements of one parameter that this rank's optimizer updates."""

    name: str
    begin: int  # first element within the flattened parameter
    numel: int
    master: torch.Tensor  # the flat tensor of master weights that contains the elements
    offset: int  # position of the first element in ``master``
    owner: torch.Tensor  # key of the state in the base optimizer's ``state``


def load_reshaped(engine: DeepSpeedEngine, saved: SavedEngine, now: Layout) -> None:
    """Load a checkpoint of another layout (ranks, ZeRO stage, offload), and verify it.

    ``engine`` must be newly created; ``now`` is the engine's layout.

    Raises:
        CheckpointLayoutError: the checkpoint cannot be loaded in the layout ``now``.
        CheckpointDamagedError: a file of the checkpoint is missing, cannot be read, or lacks elements of a parameter.
        CheckpointError: after loading, a value in the engine differs from the checkpoint.

    Ranks: all, collectively.
    """
    problems = reshape_problems(saved.layout, now)
    live = _Live(engine, now)
    settings: dict[int, dict[str, Any]] = {}
    if not problems:
        settings = _settings_by_group(engine, saved, live, problems)
        unequal = saved.unequal_copies()
        if unequal:
            problems.append(
                describe_untied(unequal)
                if saved.layout.engine_kind == "pipeline"
                else f"the uncut parameters {', '.join(unequal[:3])} differ between AutoTP's ranks: set its size back"
            )
        if not saved.has_one_scheduler():
            problems.append(
                "the learning-rate scheduler differs between the pipeline's stages: keep the stages"
            )
        if optimizers.keeps_momentum_beside(engine.optimizer):
            problems.append("zero_optimization.save_muon_momentum_buffer_in_memory is true: set it to false")
    if problems:
        raise CheckpointLayoutError(
            f"the checkpoint has another layout and cannot be loaded in this one: {'; '.join(problems)}."
        )
    targets = [target for target in live.targets() if saved.holds(target.name)]
    for target in targets:
        for key in saved.state_keys(target.name):
            saved.dtype(
                target.name, key
            )  # raises an error for state of unknown layout, before the engine is changed
    with torch.no_grad():
        for target in targets:
            saved.copy(
                target.name, MASTER, target.begin, target.master[target.offset : target.offset + target.numel]
            )
        _load_base_state(engine, saved, live, targets)
        _load_module(saved, live)
        optimizers.gather_persistent(engine.optimizer)
    groups = _base_groups(engine)
    for group_idx, values in settings.items():
        groups[group_idx].update(copy.deepcopy(values))
    _load_counters(engine, saved)
    _load_loss_scale(engine, saved)
    _verify(engine, saved, live, targets, settings)


class _Live:
    """Finds the tensors of each parameter in this rank's running engine."""

    def __init__(self, engine: DeepSpeedEngine, now: Layout) -> None:
        self._now = now
        self._optimizer = engine.optimizer
        self._pieces = ShardMap(now)
        part = engines.checkpoint_part(engine)
        self.places = {place.name: place for place in now.parameters if place.model_part == part}
        self.replica = engines.replica(engine)
        self.parameters = dict(named_parameters(engine.module))

    def targets(self) -> Iterator[_Target]:
        """Yield the shards of parameters that this rank's optimizer updates.

        Each element is yielded once; a tied parameter only under its owner's name.
        """
        masters = optimizers.flat_masters(self._optimizer)
        own_masters = _own_masters(self._optimizer, self.places)
        for name, place in self.places.items():
            if place.group_idx is None or (place.tied_to is not None and place.tied_to in self.places
                                           and place.tied_to != name):  # fmt: skip
                continue
            if place.buffer_idx is None:
                own = own_masters[name] if own_masters else self.parameters[name]
                yield _Target(name, 0, own.numel(), own.data.view(-1), 0, own)
                continue
            assert masters is not None
            owner = masters[place.buffer_idx]
            for piece in self._pieces.on(place, self.replica):
                yield _Target(
                    name, piece.parameter_begin, piece.numel, owner.data.view(-1), piece.begin, owner
                )

    def state(self, target: _Target, key: str) -> tuple[_Target, int | None]:
        """Return where this rank stores optimizer state ``key`` of a parameter.

        Returns:
            (elements, number of elements of the state tensor). The elements are ``target``, except for Muon's momentum, of
            which a rank has whole matrices. The number is None if the state tensor has the shape of ``target.owner``.
        """
        place = self.places[target.name]
        if place.buffer_idx is None or not keeps_whole_matrices(self._now, key):
            return target, None
        matrices = self._pieces.matrices(place.model_part, place.buffer_idx, self.replica)
        own = matrices[target.name]
        whole = dataclasses.replace(target, begin=0, numel=own.numel, offset=own.begin)
        return whole, sum(matrix.numel for matrix in matrices.values())

    def module_tensors(self) -> Iterator[tuple[str, torch.Tensor, Shard]]:
        """Yield (parameter name, this rank's flat tensor, shard in the tensor).

        The tensors are the module's weights; for ZeRO 3, this rank's partitions of them.
        """
        for name, parameter in self.parameters.items():
            place = self.places[name]
            if place.is_cut:
                piece = own_shard(place, self.replica)
                if piece is not None:
                    yield name, optimizers.cut_part(parameter).data.view(-1), piece
            else:
                yield name, parameter.data.view(-1), Shard(self.replica, 0, 0, parameter.numel())


def _own_masters(optimizer: Any, places: Mapping[str, ParameterPlace]) -> dict[str, torch.Tensor]:
    """Return parameter name -> master weight of ``FP16_UnfusedOptimizer``.

    {} for other optimizers.
    """
    masters = optimizers.own_masters(optimizer)
    if masters is None:
        return {}
    return {
        name: masters[group_idx][position]
        for name, (group_idx, position) in positions_in_groups(places.values()).items()
    }


def _base_groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    optimizer = optimizers.base_optimizer(engine.optimizer)
    return [] if optimizer is None else list(optimizer.param_groups)


def _is_same_class(engine: DeepSpeedEngine, saved: SavedEngine) -> bool:
    return type(optimizers.base_optimizer(engine.optimizer)).__name__ == saved.layout.optimizer


def _settings_by_group(
    engine: DeepSpeedEngine, saved: SavedEngine, live: _Live, problems: list[str]
) -> dict[int, dict[str, Any]]:
    """Return index of a parameter group in ``engine`` -> the group's saved settings.

    If parameters of one group have different saved settings, a message is appended to ``problems``.
    """
    own_groups = _base_groups(engine)
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for name, place in live.places.items():
        values = saved.group_settings(name)
        if place.group_idx is None or values is None:
            continue
        if not _is_same_class(engine, saved):
            known = set(own_groups[place.group_idx]) - _IMPLEMENTATION_KEYS
            values = {key: value for key, value in values.items() if key in known}
        first, before = found.setdefault(place.group_idx, (name, values))
        if not is_equal(before, values):
            problems.append(
                f"parameters {first} and {name} are in one group, and had other settings before: use the same groups"
            )
    return {group_idx: values for group_idx, (_, values) in found.items()}


def _scalars_for(engine: DeepSpeedEngine, saved: SavedEngine, name: str) -> dict[str, Any]:
    values = saved.scalars(name)
    if "step" not in values or _is_same_class(engine, saved):
        return values
    # ``step`` is an int in DeepSpeed's optimizers and a tensor in torch's.
    is_torch = type(optimizers.base_optimizer(engine.optimizer)).__module__.startswith("torch.")
    num_steps = float(values["step"])
    return {**values, "step": torch.tensor(num_steps) if is_torch else int(num_steps)}


def _load_base_state(
    engine: DeepSpeedEngine, saved: SavedEngine, live: _Live, targets: list[_Target]
) -> None:
    optimizer = optimizers.base_optimizer(engine.optimizer)
    if optimizer is None:
        return
    scalars: dict[int, tuple[str, dict[str, Any]]] = {}
    optimizer.state.clear()
    for target in targets:
        keys = saved.state_keys(target.name)
        values = _scalars_for(engine, saved, target.name)
        if not keys and not values:
            continue
        before = scalars.setdefault(id(target.owner), (target.name, values))
        if not is_equal(before[1], values):
            raise CheckpointLayoutError(
                f"parameters {before[0]!r} and {target.name!r} come into one flat buffer, and the optimizer's "
                f"{sorted(values)} of them differ; expected the same, since a flat buffer has one. Resume with ZeRO stage 0."
            )
        state = optimizer.state[target.owner]
        for key in keys:
            held, numel = live.state(target, key)
            if key not in state:
                # Muon's momentum has the dtype of gradients; DeepSpeed's load also converts it to the master's dtype.
                is_momentum = saved.layout.optimizer == "MuonWithAuxAdam" and key == "momentum_buffer"
                dtype = target.owner.dtype if is_momentum else saved.dtype(target.name, key)
                shape = target.owner.shape if numel is None else (numel,)
                state[key] = torch.zeros(shape, dtype=dtype, device=target.owner.device)
            saved.copy(
                target.name, key, held.begin, state[key].view(-1)[held.offset : held.offset + held.numel]
            )
        for key, value in values.items():
            state[key] = copy.deepcopy(value)
            if key == "step" and isinstance(value, torch.Tensor) and _counts_on_device(optimizer):
                state[key] = value.to(target.owner.device, torch.float32)


def _counts_on_device(optimizer: Any) -> bool:
    """Return whether the optimizer's ``load_state_dict`` moves ``step`` to the device."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _load_module(saved: SavedEngine, live: _Live) -> None:
    for name, tensor, piece in live.module_tensors():
        # Where the module's weight is also the master weight, copying again changes nothing.
        if saved.holds(name):
            saved.copy(name, MASTER, piece.parameter_begin, tensor[piece.begin : piece.begin + piece.numel])


def _load_counters(engine: DeepSpeedEngine, saved: SavedEngine) -> None:
    state = saved.engine_state()
    engine.global_steps = int(state["global_steps"])
    engine.global_samples = int(state["global_samples"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if engine.random_ltd_enabled() and state["random_ltd"] is not None:
        engines.random_ltd_scheduler(engine).load_state_dict(state["random_ltd"])
    if (
        engine.training_dataloader is not None
        and engine.curriculum_learning_enabled()
        and state["data_sampler"] is not None
    ):
        engine.training_dataloader.data_sampler.load_state_dict(state["data_sampler"])


def _load_loss_scale(engine: DeepSpeedEngine, saved: SavedEngine) -> None:
    state = saved.loss_scale_state()
    holder = optimizers.loss_scale_holder(engine.optimizer)
    if holder is None or not state.get("dynamic_loss_scale"):
        return
    for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
        if key in state and hasattr(holder, key):
            setattr(holder, key, state[key])


def _verify(
    engine: DeepSpeedEngine,
    saved: SavedEngine,
    live: _Live,
    targets: list[_Target],
    settings: Mapping[int, Mapping[str, Any]],
) -> None:
    """Raise ``CheckpointError`` if any bit in the engine differs from the checkpoint."""
    wrong = []
    optimizer = optimizers.base_optimizer(engine.optimizer)
    for target in targets:
        held: list[tuple[_Target, str, torch.Tensor]] = [(target, MASTER, target.master)]
        if optimizer is not None:
            state = optimizer.state.get(target.owner, {})
            held += [
                (live.state(target, key)[0], key, state[key].view(-1))
                for key in saved.state_keys(target.name)
            ]
            scalars = _scalars_for(engine, saved, target.name)
            wrong += [
                f"{key} of {target.name}"
                for key, value in scalars.items()
                if key not in state or not is_equal(state[key], value)
            ]
        for part, key, tensor in held:
            if not _is_same(saved, part, key, tensor):
                wrong.append(f"{key} of {target.name}")
    for name, tensor, piece in live.module_tensors():
        held_by_module = _Target(name, piece.parameter_begin, piece.numel, tensor, piece.begin, tensor)
        if saved.holds(name) and not _is_same(saved, held_by_module, MASTER, tensor):
            wrong.append(f"the module's {name}")
    groups = _base_groups(engine)
    for idx, values in settings.items():
        wrong += [
            f"{key} of parameter group {idx}" for key in values if not is_equal(groups[idx][key], values[key])
        ]
    if wrong:
        raise CheckpointError(
            f"after loading, {describe_rank(engine)} has values that differ from the checkpoint for {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}; expected the same bits. Report this as a defect of "
            "dstrial, and resume with the layout that wrote the checkpoint."
        )


def _is_same(saved: SavedEngine, target: _Target, key: str, tensor: torch.Tensor) -> bool:
    for begin in range(0, target.numel, _SCRATCH_NUMEL):
        at = target.offset + begin
        end = at + min(_SCRATCH_NUMEL, target.numel - begin)
        for wanted in saved.recorded(target.name, key, target.begin + begin, end - at):
            if not torch.equal(_bits(tensor[at : at + wanted.numel()]), _bits(wanted.to(tensor))):
                return False
            at += wanted.numel()
        if at != end:
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])
