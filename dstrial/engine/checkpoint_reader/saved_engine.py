"""Read an engine's saved state by parameter, for any rank layout and ZeRO stage.

DeepSpeed's files are memory-mapped, so that only copied elements are read. No process group and no accelerator are needed.

Source: DeepSpeed 0.19.8, ``state_dict`` of ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/bf16_optimizer.py``, ``runtime/fp16/fused_optimizer.py``, ``runtime/fp16/unfused_optimizer.py`` and
``DeepSpeedEngine._save_checkpoint``.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dstrial.checkpoint.layout import (
    Layout,
    ParameterPlace,
    Shard,
    ShardMap,
    keeps_whole_matrices,
    overlaps,
    own_shard,
    positions_in_groups,
)
from dstrial.engine.checkpoint_reader.safe_load import load_mapped
from dstrial.engine.parameter_names import plain_name, with_plain_names
from dstrial.errors import CheckpointDamagedError, CheckpointLayoutError
from dstrial.resume.plan import STATE_KEYS

MASTER = "master"
"""Key of a parameter's master weights; the other keys are those of the optimizer's state, for example ``exp_avg``."""

# Keys of an optimizer file that may contain the flat master weights, and the state of the optimizer inside DeepSpeed's wrapper.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat")
_BASE_STATES = ("base_optimizer_state", "optimizer_state_dict")
_SCRATCH_NUMEL = 1 << 20  # elements in memory at a time while two copies are compared
# Wrappers whose files record where each parameter's elements are.
_WITH_RECORDS = frozenset({"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer"})
# Without ZeRO, these optimizers count ``step`` only for a group's last parameter (DeepSpeed 0.19.8 ``ops/adam/fused_adam.py``).
_COUNTING_PER_GROUP = frozenset({"FusedAdam", "FusedLion", "MuonWithAuxAdam"})


class SavedEngine:
    """The saved weights, optimizer state and counters of one engine.

    Args:
        root: the checkpoint's directory.
        tag: name of the engine's folder in ``root``.
        layout: the engine's layout, from the manifest.
        tied: key of a pipeline's tied layer -> the layer's state dict, which is not in DeepSpeed's files under this key.
        trusts_code: whether classes outside ``safe_load.LISTED`` may be loaded, which can run code.

    Raises:
        CheckpointLayoutError: single parameters cannot be read (state on NVMe, or experts spread over ranks).
    """

    def __init__(
        self,
        root: str | pathlib.Path,
        tag: str,
        layout: Layout,
        tied: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        *,
        trusts_code: bool = False,
    ) -> None:
        self._trusts_code = trusts_code
        self._tied: Mapping[str, Mapping[str, torch.Tensor]] = {
            key: with_plain_names(state) for key, state in (tied or {}).items()
        }
        self.layout = layout
        self._directory = pathlib.Path(root) / tag
        if "nvme" in (layout.offload_optimizer, layout.offload_parameters):
            raise self._unreadable(
                "its state offloaded to NVMe is not in the checkpoint's files by parameter"
            )
        if layout.expert_parallel_size > 1:
            raise self._unreadable(
                f"its experts are spread over {layout.expert_parallel_size} ranks, and the experts of different ranks have the "
                "same names"
            )
        # The caches belong to this object, so that the files are unmapped when the object is freed.
        self._load = functools.cache(self._map)
        self._positions = functools.cache(self._find_positions)
        self._state_indices = functools.cache(self._find_state_indices)
        self._pieces = ShardMap(layout)
        # Of tied parameters, the optimizer owns the first; copies on later pipeline stages should have the same values.
        self._places: dict[str, ParameterPlace] = {}
        self._copies: dict[str, list[ParameterPlace]] = {}
        for place in layout.parameters:
            self._places.setdefault(place.name, place)
            self._copies.setdefault(place.name, []).append(place)

    @property
    def places(self) -> Mapping[str, ParameterPlace]:
        """Parameter name -> layout entry; for a tied layer, the entry of the first stage."""
        return self._places

    def place(self, name: str) -> ParameterPlace:
        """Return a parameter's layout entry; for a tied parameter, its owner's entry.

        Raises:
            CheckpointLayoutError: the checkpoint has no parameter ``name``.
        """
        if name not in self._places:
            raise CheckpointLayoutError(
                f"{self._directory} has no parameter {name!r}; expected the model that wrote it. "
                "Resume with the model definition of the checkpoint."
            )
        place = self._places[name]
        return place if place.tied_to in (None, name) else self.place(place.tied_to)

    def holds(self, name: str) -> bool:
        """Return whether the checkpoint has a parameter's weights.

        False only for frozen parameters that the checkpoint left out.
        """
        return name not in self._places or self.place(name).name not in self.layout.frozen_checksums

    def state_keys(self, name: str) -> list[str]:
        """Return the keys of optimizer state with one value per element of a parameter.

        The keys, such as ``exp_avg``, are sorted. The list is empty before the first step, and for a parameter that no
        optimizer owns.
        """
        place = self.place(name)
        if place.group_idx is None:
            return []
        entry = self._state_entry(place)
        return sorted(key for key, value in entry.items() if self._is_by_element(place, key, value))

    def scalars(self, name: str) -> dict[str, Any]:
        """Return the optimizer state without a value per element, such as ``step``.

        {} for a parameter that no optimizer owns.
        """
        place = self.place(name)
        if place.group_idx is None:
            return {}
        entry = self._state_entry(place)
        values = {key: value for key, value in entry.items() if not self._is_by_element(place, key, value)}
        if "step" in values and place.buffer_idx is None and self.layout.optimizer in _COUNTING_PER_GROUP:
            states = self._base_state(place.model_part, 0)["state"]
            values["step"] = max(
                states.get(self._state_indices(place.model_part)[name], {}).get("step", 0)
                for name, (group_idx, _) in self._positions(place.model_part).items()
                if group_idx == place.group_idx
            )
        return values

    def dtype(self, name: str, key: str) -> torch.dtype:
        place = self.place(name)
        return self._source(place, key, self._sources(place, key)[0]).dtype

    def copy(self, name: str, key: str, begin: int, out: torch.Tensor) -> None:
        """Copy elements of a parameter's weights or optimizer state into ``out``.

        Args:
            name: the parameter's name.
            key: ``MASTER``, or one of ``state_keys``.
            begin: first element within the flattened parameter.
            out: flat tensor to fill; elements are converted to the dtype and device of ``out``.

        Raises:
            CheckpointDamagedError: the files have fewer elements than the manifest says.
        """
        self._copy(self.place(name), key, begin, out)

    def recorded(self, name: str, key: str, begin: int, numel: int) -> Iterator[torch.Tensor]:
        """Yield ``numel`` elements from element ``begin``, in one or more flat tensors.

        The elements are those of ``copy``, but located by records that DeepSpeed saves: ``param_slice_mappings`` of ZeRO 1, 2
        and ``BF16_Optimizer``, ``param_shapes`` of ZeRO 3. A comparison thus verifies the layout. Other optimizers are not
        partitioned and have no records; their elements are read with ``copy``.
        """
        place = self.place(name)
        if place.group_idx is None or self.layout.wrapper not in _WITH_RECORDS:
            out = torch.empty(numel, dtype=self.dtype(name, key))
            self.copy(name, key, begin, out)
            yield out
            return
        at = 0
        for replica, buffer_idx, first, count in self._records(place, key):
            low, high = max(begin, at), min(begin + numel, at + count)
            if low < high:
                state = self._optimizer_state(place.model_part, replica)
                assert state is not None
                if key == MASTER:
                    flat = next(state[name] for name in _MASTERS if name in state)[buffer_idx]
                else:
                    flat = self._base_state(place.model_part, replica)["state"][buffer_idx][key]
                yield _flat(flat)[first + low - at : first + high - at]
            at += count

    def _records(self, place: ParameterPlace, key: str) -> Iterator[tuple[int, int, int, int]]:
        """Yield the locations of a parameter's state ``key`` according to DeepSpeed.

        Each item is (replica, flat buffer's index, offset in the replica's partition, number of elements).
        """
        numel = math.prod(place.shape)
        if self.layout.zero_stage == 3:
            for buffer_idx, shapes in enumerate(self._model_file(place.model_part, 0)["param_shapes"]):
                first = 0
                for name, shape in shapes.items():
                    size = math.ceil(math.prod(shape) / self.layout.data_parallel_size)
                    if plain_name(name) == place.name:
                        for replica in range(math.ceil(numel / size) if size else 0):
                            yield replica, buffer_idx, first, min(size, numel - replica * size)
                    first += size
            return
        for replica in sorted({piece.replica for piece in self._pieces.of(place)}):
            state = self._optimizer_state(place.model_part, replica)
            assert state is not None
            for buffer_idx, mapping in enumerate(state["param_slice_mappings"]):
                addresses = {plain_name(name): address for name, address in mapping.items()}
                if place.name not in addresses:
                    continue
                start = addresses[place.name].start
                if keeps_whole_matrices(self.layout, key):
                    before = (name for name, other in addresses.items() if other.start < start)
                    yield (
                        replica,
                        buffer_idx,
                        sum(math.prod(self.place(name).shape) for name in before),
                        numel,
                    )
                    return
                yield replica, buffer_idx, start, addresses[place.name].numel

    def unequal_copies(self) -> list[str]:
        """Return the names of tied parameters whose copies on pipeline stages differ.

        DeepSpeed synchronises only the attribute ``tied_weight_attr`` of a tied layer, by default ``weight``. Other parameters
        of the layer, for example its bias, differ between stages and cannot be merged.
        """
        return [
            places[0].name
            for places in self._copies.values()
            if len(places) > 1 and not all(self._has_same_values(places[0], other) for other in places[1:])
        ]

    def _has_same_values(self, one: ParameterPlace, other: ParameterPlace) -> bool:
        keys = [] if one.group_idx is None else self.state_keys(one.name)
        if self.layout.wrapper:
            keys = [MASTER, *keys]
        numel = math.prod(one.shape)
        for key in keys:
            for begin in range(0, numel, _SCRATCH_NUMEL):
                first = torch.empty(min(_SCRATCH_NUMEL, numel - begin), dtype=self.dtype(one.name, key))
                second = torch.empty_like(first)
                self._copy(one, key, begin, first)
                self._copy(other, key, begin, second)
                if not torch.equal(first, second):
                    return False
        return True

    def _copy(self, place: ParameterPlace, key: str, begin: int, out: torch.Tensor) -> None:
        copied = 0
        for piece, inside, at, numel in overlaps(self._sources(place, key), begin, out.numel()):
            source = self._source(place, key, piece)
            first = piece.begin + inside
            if source.numel() >= first + numel:
                out[at : at + numel].copy_(source[first : first + numel])
                copied += numel
        if copied != out.numel():
            raise CheckpointDamagedError(
                f"{self._directory} holds {copied} of the elements {begin} to {begin + out.numel()} of {key} of {place.name!r}; "
                "expected all. Resume from another checkpoint."
            )

    def full(self, name: str, key: str = MASTER) -> torch.Tensor:
        """Return a copy of all of a parameter's weights or state, in its full shape."""
        place = self.place(name)
        source = self._source(place, key, self._sources(place, key)[0]) if math.prod(place.shape) else None
        dtype = torch.float32 if source is None else source.dtype
        out = torch.empty(math.prod(place.shape), dtype=dtype)
        self.copy(name, key, 0, out)
        return out.reshape(place.shape)

    def group_settings(self, name: str) -> dict[str, Any] | None:
        """Return the settings of a parameter's optimizer group, such as ``lr``.

        None if no optimizer owns the parameter. Each pipeline stage has its own groups.
        """
        place = self.place(name)
        if place.group_idx is None:
            return None
        groups = self._base_state(place.model_part, 0)["param_groups"]
        if not groups:
            return None
        return {key: value for key, value in groups[place.group_idx].items() if key != "params"}

    def has_one_scheduler(self) -> bool:
        """Return whether all pipeline stages saved equal states of the lr scheduler."""
        first = self._model_file(0, 0).get("lr_scheduler")
        stages = range(1, self.layout.pipeline_stages)
        return all(is_equal(self._model_file(part, 0).get("lr_scheduler"), first) for part in stages)

    def engine_state(self) -> dict[str, Any]:
        """Return the engine's counters, and the states of its schedulers and data sampler.

        A value that the files do not have is None.
        """
        state = self._model_file(0, 0)
        counters = ("skipped_steps", "global_steps", "global_samples")
        return {key: state.get(key) for key in (*counters, "lr_scheduler", "data_sampler", "random_ltd")}

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the loss scaler's attributes, such as ``cur_scale``; {} without a scaler."""
        state = self._optimizer_state(0, 0)
        if state is None:
            return {}
        scaler = state.get("loss_scaler")
        values = (
            state if scaler is None else {**vars(scaler), "dynamic_loss_scale": state["dynamic_loss_scale"]}
        )
        names = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: values[name] for name in names if name in values}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return name -> persistent buffer of the module (replica 0), memory-mapped."""
        found: dict[str, torch.Tensor] = {}
        for part in range(self.layout.pipeline_stages):
            for name in map(plain_name, self._model_file(part, 0)["buffer_names"]):
                found[name] = self._module_tensor(name, part)
        return found

    def deepspeed_config(self) -> dict[str, Any]:
        config = self._model_file(0, 0).get("ds_config")
        return dict(config) if isinstance(config, Mapping) else {}

    def _unreadable(self, why: str) -> CheckpointLayoutError:
        return CheckpointLayoutError(
            f"{self._directory} cannot be read by parameter: {why}. Resume it with the layout that wrote it."
        )

    def _sources(self, place: ParameterPlace, key: str) -> list[Shard]:
        """Return the saved shards of a parameter's weights (``MASTER``) or state ``key``."""
        if place.group_idx is None and place.is_cut:
            replicas = range(self.layout.data_parallel_size)
            return [piece for piece in (own_shard(place, r) for r in replicas) if piece is not None]
        if place.group_idx is None or (key == MASTER and place.buffer_idx is None):
            numel = math.prod(place.shape)
            return [Shard(0, 0, 0, numel)]
        pieces = self._pieces.of(place)
        if key == MASTER or place.buffer_idx is None or not pieces:
            return pieces
        if key not in STATE_KEYS.get(self.layout.optimizer, ()):
            raise CheckpointLayoutError(
                f"{self._directory}: optimizer {self.layout.optimizer} keeps {key!r} of {place.name!r}, whose layout is not "
                "known; expected state that lies as the weights do. Resume with the layout that wrote it."
            )
        if keeps_whole_matrices(self.layout, key):
            matrices = self._pieces.matrices(place.model_part, place.buffer_idx, pieces[0].replica)
            return [matrices[place.name]]
        return pieces

    def _source(self, place: ParameterPlace, key: str, piece: Shard) -> torch.Tensor:
        """Return the flat tensor in the files that contains ``piece``.

        ``piece`` is a shard that ``_sources`` returned for the same ``place`` and ``key``.
        """
        if place.group_idx is None and place.is_cut:
            fragments = self._model_file(place.model_part, piece.replica)["frozen_param_fragments"] or {}
            if place.name not in fragments and not self.holds(place.name):
                return self._module_tensor(place.name, place.model_part)  # raises
            if place.name not in fragments:
                raise CheckpointLayoutError(
                    f"{self._directory} does not hold {place.name!r}, which requires a gradient and which no optimizer owns: "
                    "DeepSpeed leaves it out in ZeRO stage 3; expected it in a parameter group, or frozen. Give it to the "
                    "optimizer, or set requires_grad to False."
                )
            return _flat(fragments[place.name])
        if key == MASTER and place.group_idx is not None and self.layout.wrapper == "FP16_UnfusedOptimizer":
            group_idx, position = self._positions(place.model_part)[place.name]
            beside = self._optimizer_state(place.model_part, 0)
            assert beside is not None
            return _flat(beside["fp32_groups"][group_idx][position])
        if place.group_idx is None or (key == MASTER and place.buffer_idx is None):
            return _flat(self._module_tensor(place.name, place.model_part))
        if key == MASTER:
            state = self._optimizer_state(place.model_part, piece.replica)
            assert state is not None
            assert place.buffer_idx is not None
            masters = next(state[name] for name in _MASTERS if name in state)
            return _flat(masters[place.buffer_idx])
        flat = _flat(self._state_entry(place, piece.replica)[key])
        buffer = self._pieces.buffer(place)
        numel = (
            flat.numel()
            if buffer is None or keeps_whole_matrices(self.layout, key)
            else buffer.partition_numel
        )
        if flat.numel() != numel:
            raise CheckpointLayoutError(
                f"{self._directory}: the optimizer's {key!r} of {place.name!r} lies in {flat.numel()} elements; expected "
                f"{numel}, as its weights do. Resume with the layout that wrote it."
            )
        return flat

    def _state_entry(self, place: ParameterPlace, replica: int | None = None) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter, or of the parameter's flat buffer.

        ``replica`` None stands for the first replica that has elements of the parameter.
        """
        if replica is None:
            replica = 0 if place.buffer_idx is None else self._pieces.of(place)[0].replica
        base = self._base_state(place.model_part, replica)
        key = place.name if place.buffer_idx is None else place.buffer_idx
        entry: Mapping[str, Any] = base["state"].get(self._state_indices(place.model_part)[key], {})
        return entry

    def _find_positions(self, part: int) -> dict[str, tuple[int, int]]:
        return positions_in_groups(place for place in self.layout.parameters if place.model_part == part)

    def _find_state_indices(self, part: int) -> dict[str | int, int]:
        """Return parameter name, or flat buffer's index -> key in the optimizer's state."""
        positions = self._positions(part)
        found: dict[str | int, int] = {
            name: idx for idx, name in enumerate(sorted(positions, key=positions.__getitem__))
        }
        buffers = [buffer for buffer in self.layout.buffers if buffer.model_part == part]
        ordered = sorted(buffers, key=lambda buffer: (buffer.group_idx, buffer.index))
        return found | {buffer.index: idx for idx, buffer in enumerate(ordered)}

    def _is_by_element(self, place: ParameterPlace, key: str, value: Any) -> bool:
        if key == "step" or not isinstance(value, torch.Tensor):
            return False
        if value.dim() == 0 and (place.buffer_idx is not None or place.shape != ()):
            return False
        if place.buffer_idx is None and tuple(value.shape) != place.shape:
            raise CheckpointLayoutError(
                f"{self._directory}: the optimizer's {key!r} of {place.name!r} has shape {tuple(value.shape)}; expected "
                f"{place.shape}, or a scalar. State of another shape cannot be cut; resume with the layout that wrote it."
            )
        return True

    def _base_state(self, part: int, replica: int) -> dict[str, Any]:
        state = self._optimizer_state(part, replica)
        if state is None:
            return {"state": {}, "param_groups": []}
        if "param_groups" in state:
            return state
        base = next(state[name] for name in _BASE_STATES if name in state)
        if not isinstance(base, Mapping):
            raise CheckpointLayoutError(
                f"{self._directory}: the optimizer's state was written in DeepSpeed's elastic form; expected the usual one. "
                "Resume with the layout that wrote it, with zero_optimization.elastic_checkpoint false from then on."
            )
        return dict(base)

    def _optimizer_state(self, part: int, replica: int) -> dict[str, Any] | None:
        """Return a replica's optimizer state dict; None without an optimizer."""
        if self.layout.zero_stage or self.layout.wrapper == "BF16_Optimizer":
            prefix = "bf16_" if self.layout.precision == "bf16" else ""
            name = f"{prefix}zero_pp_rank_{replica}_mp_rank_{part:02d}_optim_states.pt"
            state: dict[str, Any] = self._load(name)["optimizer_state_dict"]
            return state
        beside: dict[str, Any] | None = self._model_file(part, 0)["optimizer"]
        return beside

    def _model_file(self, part: int, replica: int) -> dict[str, Any]:
        prefix = f"zero_pp_rank_{replica}_" if self.layout.zero_stage == 3 else ""
        return self._load(f"{prefix}mp_rank_{part:02d}_model_states.pt")

    def _module_tensor(self, name: str, part: int) -> torch.Tensor:
        if self.layout.engine_kind == "pipeline":
            layer, _, rest = name.partition(".")
            if layer.isdigit():
                tensor: torch.Tensor = self._load(self._layer_file(int(layer)))[rest]
                return tensor
            key, _, rest = rest.partition(".")
            if layer != "tied_modules" or key not in self._tied:
                raise CheckpointLayoutError(
                    f"{self._directory}: {name!r} is in no layer's file; expected it in one. "
                    "Resume it with the layout that wrote it."
                )
            return self._tied[key][rest]
        module: Mapping[str, torch.Tensor] = self._model_file(part, 0)["module"]
        if not self.holds(name):
            raise CheckpointLayoutError(
                f"{self._directory} does not hold the frozen parameter {name!r}, only what is trained; expected all weights. "
                "Take it from the base model that the run was started with."
            )
        if name not in module:
            raise CheckpointLayoutError(
                f"{self._directory}: {name!r} is not in the module's state; expected it there, where only experts of a "
                "mixture-of-experts layer are not. Resume it with the layout that wrote it."
            )
        return module[name]

    def _layer_file(self, layer_idx: int) -> str:
        """Return the name of the file with a pipeline layer (of model-parallel rank 0)."""
        plain = f"layer_{layer_idx:02d}-model_states.pt"
        return (
            plain if (self._directory / plain).exists() else f"layer_{layer_idx:02d}-model_00-model_states.pt"
        )

    def _map(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        return with_plain_names(
            load_mapped(path, holds="a file of the checkpoint", trusts_code=self._trusts_code)
        )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def is_equal(left: Any, right: Any) -> bool:
    """Return whether nested values are equal; tensors are compared by content."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(left).cpu(), torch.as_tensor(right).cpu()))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return bool(left == right)
