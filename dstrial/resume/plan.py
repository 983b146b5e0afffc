"""Decide whether a run can resume from a checkpoint, and whether to reshard.

Resharding converts an engine's saved state to other ranks or another ZeRO stage. ``resume_problems`` decides before processes
start, from a checkpoint, a config and a number of slots. ``plan_load`` decides in the ranks, from the engines' layouts, which
also describe parameters and parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.dotted_keys import count_in, dstrial_section
from dstrial.config.parallel_dims import AUTOTP_KEY, SECTION_KEYS, ParallelDims, config_sizes
from dstrial.errors import CheckpointLayoutError, ConfigError, ConfigProblem
from dstrial.resume.batch import describe_batch, engine_of, keep_batch
from dstrial.resume.metadata import EngineArrangement, EngineRecord, SavedRun, given_settings

if TYPE_CHECKING:
    from dstrial.checkpoint.layout import Layout, ParameterPlace

# Optimizer wrappers of DeepSpeed 0.19.8 whose saved state can be resharded; MiCS, ZenFlow and others partition it differently.
KNOWN_WRAPPERS = frozenset(
    {
        "",
        "BF16_Optimizer",
        "FP16_Optimizer",
        "FP16_UnfusedOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    }
)
_ADAM = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
STATE_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NPUAdam", "NAdam", "RAdam"), _ADAM),
    **dict.fromkeys(("FusedLamb", "FusedLion", "DeepSpeedCPULion", "Lion"), _ADAM),
    "MuonWithAuxAdam": _ADAM | {"momentum_buffer"},
    "Adagrad": frozenset({"sum"}),
    "DeepSpeedCPUAdagrad": frozenset({"exp_avg_sq"}),
    "SGD": frozenset({"momentum_buffer"}),
    "RMSprop": frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
    "Adadelta": frozenset({"square_avg", "acc_delta"}),
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "ASGD": frozenset({"ax"}),
    "Rprop": frozenset({"prev", "step_size"}),
}
"""Class of an optimizer -> keys of its element-wise state, which is partitioned like the weights.

Muon's momentum is an exception, see ``checkpoint.layout.keeps_whole_matrices``. State of other optimizers may consist of matrix
factors, quantised blocks or errors of one rank (1-bit Adam), which cannot be loaded in another layout.
"""
# Implementations of one algorithm with equal state, among which DeepSpeed chooses by offload and device.
_SAME_OPTIMIZERS = (
    frozenset({"Adam", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"AdamW", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"FusedLion", "DeepSpeedCPULion"}),
)
_FAMILIES = {
    **dict.fromkeys(
        ("adam", "adamw"),
        frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "NPUAdam"}),
    ),
    "adagrad": frozenset({"Adagrad", "DeepSpeedCPUAdagrad"}),
    "lamb": frozenset({"FusedLamb", "Lamb"}),
    "lion": frozenset({"FusedLion", "DeepSpeedCPULion", "Lion"}),
    "onebitadam": frozenset({"OnebitAdam"}),
    "onebitlamb": frozenset({"OnebitLamb"}),
    "zerooneadam": frozenset({"ZeroOneAdam"}),
}
"""Optimizer type in a DeepSpeed config, in lower case -> optimizer classes that DeepSpeed may create for the type."""


# (Field of ``Layout``, its name in messages): DeepSpeed itself loads a checkpoint only if all these are equal.
_COMPARED = (
    ("engine_kind", "kind of engine"),
    ("world_size", "number of ranks"),
    ("data_parallel_size", "number of data-parallel replicas"),
    ("pipeline_stages", "number of pipeline stages"),
    ("model_parallel_size", "tensor-parallel size"),
    ("sequence_parallel_size", "sequence-parallel size"),
    ("expert_parallel_size", "expert-parallel size"),
    ("zero_stage", "ZeRO stage"),
    ("offload_optimizer", "optimizer offload"),
    ("offload_parameters", "parameter offload"),
    ("precision", "precision"),
    ("optimizer", "optimizer"),
    ("wrapper", "DeepSpeed's optimizer wrapper"),
    ("lr_scheduler", "learning-rate scheduler"),
)


# ---- called before processes start ---------------------------------------------------------------------


def resume_problems(
    saved: SavedRun,
    *,
    num_slots: int,
    extents: Mapping[str, Any] | None = None,
    configs: Sequence[Mapping[str, Any]] = (),
    slots_key: str = "resources.slots_per_trial",
    where: Sequence[Mapping[str, str]] = (),
) -> list[ConfigProblem]:
    """Return problems that prevent resuming from a checkpoint, each with a fix.

    Args:
        saved: the checkpoint and the run that wrote it.
        num_slots: number of ranks of the resumed run, at least 1.
        extents: ``pipeline_stages`` and ``model_parallel_size`` of ``data.dstrial``; by default those of the checkpoint.
        configs: the experiment's merged DeepSpeed configs, the main config first; may be empty.
        slots_key: config key or option that sets the number of slots, for messages.
        where: for each config, batch size key -> ``file:line: key``, for messages.
    """
    problems: list[ConfigProblem] = []
    engines = [engine_of(config, saved, is_main=idx == 0) for idx, config in enumerate(configs)]
    for engine in saved.engines:
        config_idx = engines.index(engine) if engine in engines else None
        config = None if config_idx is None else configs[config_idx]
        replica = engine.replica_with(extents, config)
        # If another trial loads only weights, its code may split the model differently, which is unknown before it runs.
        unit = replica.ranks_per_replica if saved.keeps_batch else 1
        if num_slots % unit:
            below = num_slots // unit * unit
            choices = " or ".join(str(n) for n in (below, below + unit) if n)
            is_pipeline = engine.engine_kind == "pipeline"
            ways = ", or set data.dstrial.pipeline_stages to what the model now has" if is_pipeline else ""
            problems.append(
                ConfigProblem(
                    slots_key,
                    str(num_slots),
                    f"a multiple of {unit}, the ranks of one replica in checkpoint {saved.checkpoint}",
                    f"Use {choices} slots{ways}.",
                )
            )
            continue
        if saved.keeps_batch:
            replicas = engine.batch_replicas(num_slots, replica)
            try:
                keep_batch(
                    engine.own_batch if config is None else config,
                    engine,
                    replicas,
                    checkpoint=saved.checkpoint,
                    where=where[config_idx] if config_idx is not None and config_idx < len(where) else None,
                    ranks_per_replica=max(num_slots // replicas, 1),
                )
            except ConfigError as error:
                problems += error.problems
        if _changes_layout(engine, num_slots, replica, config):
            problems += _reshard_problems(saved, engine, replica, config, num_slots, slots_key)
    return list(dict.fromkeys(problems))


def resumable_slots(
    saved: SavedRun, *, at_most: int, at_least: int = 1, extents: Mapping[str, Any] | None = None
) -> Iterator[int]:
    """Yield the numbers of slots on which a run can resume, from ``at_most`` down.

    The last number that is tried is ``at_least``. ``extents`` has ``pipeline_stages`` and ``model_parallel_size`` of
    ``data.dstrial``; by default those of the checkpoint.
    """
    for num_slots in range(at_most, max(at_least, 1) - 1, -1):
        if not resume_problems(saved, num_slots=num_slots, extents=extents):
            yield num_slots


def with_kept_batch(
    found: DeepSpeedSource, resumed: SavedRun, sizes: ParallelDims, notes: list[str], *, is_main: bool
) -> dict[str, Any]:
    """Return a DeepSpeed config with batch sizes that keep the saved run's batch.

    If the config belongs to no engine of the checkpoint, its batch sizes are not changed. If no sizes keep the batch,
    placeholder sizes are returned, and ``check_resumption`` reports the problem.

    Args:
        found: the DeepSpeed config.
        resumed: the checkpoint and the run that wrote it.
        sizes: this run's parallel dimensions.
        notes: list to which a note is appended if the micro batch size or the number of replicas has changed.
        is_main: whether ``found`` is the experiment's main DeepSpeed config.
    """
    engine = engine_of(found.merged, resumed, is_main=is_main)
    if engine is None:
        return found.merged
    replicas = engine.batch_replicas(sizes.world_size, sizes.on(sizes.ranks_per_replica))
    try:
        solution = keep_batch(found.merged, engine, replicas, checkpoint=resumed.checkpoint)
    except ConfigError:
        # check_resumption reports this problem. Valid sizes are returned, so that the rest of the config can be checked.
        return {**found.merged, **dict.fromkeys(BATCH_KEYS, 1), BATCH_KEYS[0]: replicas}
    before = (engine.batch_replicas(engine.world_size), engine.micro_batch_size)
    if before != (replicas, solution.train_micro_batch_size_per_gpu):
        notes.append(f"{found.label}: checkpoint {resumed.checkpoint}: {describe_batch(engine, solution)}")
    return {**found.merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}


def check_resumption(
    raw: Mapping[str, Any],
    resumed: SavedRun,
    slots: int,
    slots_key: str,
    checks: Sequence[tuple[DeepSpeedSource, CheckResult]],
    findings: Diagnostics,
) -> None:
    """Append to ``findings.problems`` what prevents resuming with a config.

    Args:
        raw: the experiment config.
        resumed: the checkpoint and the run that wrote it.
        slots: number of slots; 0 means one rank on the CPU.
        slots_key: config key or option that sets ``slots``, for messages.
        checks: the experiment's DeepSpeed configs, the main config first.
        findings: the experiment's problems so far; equal problems are not repeated.
    """
    section = dstrial_section(raw)
    places = [Diagnostics(source.lines, source.label) for source, _ in checks]
    found = resume_problems(
        resumed,
        num_slots=max(slots, 1),
        extents={key: count_in(section, key) for key in SECTION_KEYS},
        configs=[source.merged for source, _ in checks],
        slots_key=slots_key if slots_key == "--slots" else findings.place(slots_key),
        where=[{key: own.place(key) for key in BATCH_KEYS} for own in places],
    )
    findings.problems.extend(problem for problem in found if problem not in findings.problems)


def _zero(config: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return a config's (ZeRO stage, optimizer offload, parameter offload)."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return int(zero is True), "none", "none"
    stage = zero.get("stage")
    devices = []
    for key, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        section = zero.get(key)
        device = section.get("device") if isinstance(section, Mapping) else None
        devices.append(str(device or ("cpu" if zero.get(old) is True else "none")))
    return stage if isinstance(stage, int) else 0, devices[0], devices[1]


def _changes_layout(
    engine: EngineRecord, num_slots: int, replica: ParallelDims, config: Mapping[str, Any] | None
) -> bool:
    """Return whether an engine's layout will differ from that in the checkpoint.

    If ``config`` is None (unknown), only the number of ranks and the parallel dimensions are compared.
    """
    if num_slots != engine.world_size or replica != engine.replica:
        return True
    if config is None:
        return False
    if any(_changed_type(engine, config, section) is not None for section in ("optimizer", "scheduler")):
        return True
    return _zero(config) != (engine.zero_stage, engine.offload_optimizer, engine.offload_parameters)


def _changed_type(engine: EngineRecord, config: Mapping[str, Any], section: str) -> str | None:
    """Return ``type`` of a config's section if the checkpoint has another class.

    ``section`` is ``optimizer`` or ``scheduler``. Return None if the classes are equal, or one of them is unknown.
    """
    kind = given_settings(config).get(section)
    if not engine.given or kind is None or kind == engine.given.get(section):
        return None
    used = engine.optimizer if section == "optimizer" else engine.lr_scheduler
    family = _FAMILIES.get(kind.lower(), frozenset({kind})) if section == "optimizer" else frozenset({kind})
    return None if used in family else str(kind)


def _reshard_problems(
    saved: SavedRun,
    engine: EngineRecord,
    replica: ParallelDims,
    config: Mapping[str, Any] | None,
    num_slots: int,
    slots_key: str,
) -> Iterator[ConfigProblem]:
    name = f"checkpoint {saved.checkpoint}"
    was_autotp = AUTOTP_KEY in engine.given or engine.model_parallel_size == 1
    is_autotp = config_sizes(config).get("model_parallel_size", 1) == replica.tp
    # Only AutoTP's slices can be resharded: a user's ``mpu`` cannot replace AutoTP, even with the same size.
    is_changed = replica.tp != engine.model_parallel_size or AUTOTP_KEY in engine.given
    if is_changed and not (was_autotp and is_autotp):
        yield ConfigProblem(
            "data.dstrial.model_parallel_size",
            str(replica.tp),
            f"{engine.model_parallel_size}, as in {name}, whose layers are cut so: only AutoTP's can be cut anew",
            f"Set it to {engine.model_parallel_size}.",
        )
    devices: tuple[str, ...] = ()
    if config is not None:
        devices = _zero(config)[1:]
        for section, used in (("optimizer", engine.optimizer), ("scheduler", engine.lr_scheduler)):
            kind = _changed_type(engine, config, section)
            if kind is not None:
                was = engine.given.get(section) or used or "none"
                yield ConfigProblem(
                    f"deepspeed config: {section}.type",
                    repr(kind),
                    f"{was!r}, whose state is in {name}",
                    f"Set it to {was!r}, or begin a new run from these weights (searcher.source_checkpoint_uuid).",
                )
    same = f"{engine.world_size} slots, ZeRO stage {engine.zero_stage}"
    why = _fixed_layout_reason(engine)
    if why is not None:
        yield ConfigProblem(
            slots_key,
            f"{num_slots}, another arrangement than that of {name}, {why}",
            f"the same arrangement: {same}",
            f"Go on with {same} and the same offload.",
        )
    elif "nvme" in devices:
        yield ConfigProblem(
            "deepspeed config: zero_optimization",
            f"an offload to NVMe, which {name} was written without",
            "cpu or none",
            "Set the offload device to cpu or none.",
        )


def _fixed_layout_reason(engine: EngineArrangement) -> str | None:
    """Return why an engine's saved state cannot be resharded; None if it can."""
    if engine.model_parallel_size > 1 and engine.engine_kind == "pipeline":
        return f"whose layers are cut over {engine.model_parallel_size} tensor-parallel ranks"
    if "nvme" in (engine.offload_optimizer, engine.offload_parameters):
        return "whose state is offloaded to NVMe"
    if engine.expert_parallel_size:
        return "whose experts are spread over its ranks"
    if engine.optimizer and engine.optimizer not in STATE_KEYS:
        return f"whose optimizer {engine.optimizer} keeps state of unknown layout"
    if engine.wrapper not in KNOWN_WRAPPERS:
        return f"whose {engine.wrapper} arranges its state in its own way"
    return None


# ---- called in the ranks -------------------------------------------------------------------------------


def plan_load(
    checkpoint: object, saved: Sequence[Layout], now: Sequence[Layout], problems: Sequence[str] = ()
) -> list[str]:
    """Return how layouts differ if state must be resharded, else [].

    The result has texts for messages: up to three differences, and the number of further differences.

    Args:
        checkpoint: the checkpoint's name for messages.
        saved: each engine's layout in the checkpoint.
        now: each engine's current layout.
        problems: further reasons why resharding is impossible; ignored if resharding is not needed.

    Raises:
        CheckpointLayoutError: the number of engines differs, or the checkpoint cannot be resharded.
    """
    if len(saved) != len(now):
        raise CheckpointLayoutError(
            f"checkpoint {checkpoint} holds {len(saved)} engines, the trial wraps {len(now)}; expected the same engines. Resume "
            "it with the trial that wrote it."
        )
    differences: list[str] = []
    found: list[str] = []
    for idx, (before, after) in enumerate(zip(saved, now, strict=True)):
        prefix = f"engine {idx}: "
        if changed := compatible(before, after):
            differences += [prefix + difference for difference in changed]
        found += [prefix + problem for problem in reshape_problems(before, after)]
    if not differences:
        return []
    differences[3:] = [f"and {len(differences) - 3} more"] if differences[3:] else []
    if found or problems:
        raise CheckpointLayoutError(
            f"checkpoint {checkpoint} was written for another layout ({'; '.join(differences)}), and it cannot be brought into "
            f"this one: {'; '.join([*found, *problems])}."
        )
    return differences


def require_same_batch(checkpoint: object, saved: Sequence[Layout], now: Sequence[Layout]) -> None:
    """Raise CheckpointLayoutError if the batch of an engine has another size."""
    for idx, (before, after) in enumerate(zip(saved, now, strict=False)):
        # If ``autotp_size`` has changed, records are compared, because DeepSpeed counts a record once per AutoTP rank.
        is_recut = before.model_parallel_size != after.model_parallel_size
        is_same = (
            _records(before) == _records(after)
            if is_recut
            else before.train_batch_size == after.train_batch_size
        )
        if not is_same:
            raise CheckpointLayoutError(
                f"engine {idx}: train_batch_size is {after.train_batch_size}; expected {before.train_batch_size}, the batch of "
                f"checkpoint {checkpoint}, in which its progress, schedule and order of records are counted. Set it back, or "
                "name the checkpoint in dstrial.init(latest_checkpoint=...), which keeps the batch on any number of ranks."
            )


def _records(layout: Layout) -> int:
    return layout.micro_batch_size * layout.micro_batches_per_batch * layout.data_parallel_size


def compatible(saved: Layout, now: Layout) -> list[str]:
    """Return why DeepSpeed itself cannot load ``saved`` into ``now``; [] if it can.

    Batch sizes and versions are not compared, because they do not affect loading.
    """
    differences = [
        f"{words} was {getattr(saved, field)!r}, is {getattr(now, field)!r}"
        for field, words in _COMPARED
        if getattr(saved, field) != getattr(now, field)
    ]
    if not differences and (changed := set(saved.parameters) ^ set(now.parameters)):
        names = sorted({place.name for place in changed})
        differences.append(
            f"{len(names)} parameters ({_first_of(names)}) are new, gone or arranged differently"
        )
    if not differences and saved.buffers != now.buffers:
        return ["the flat buffers are cut differently; the ZeRO settings for sub groups or alignment changed"]
    return differences


def _first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if names[3:] else ''}"


def reshape_problems(saved: Layout, now: Layout) -> list[str]:
    """Return why state in layout ``saved`` cannot be resharded to ``now``; else []."""
    before, after = saved.slices(), now.slices()
    is_recut = saved.model_parallel_size != now.model_parallel_size
    problems = list(_recut_problems(saved, now, before, after)) if is_recut else []
    reasons = dict.fromkeys(filter(None, map(_fixed_layout_reason, (saved, now))))
    problems += [f"an engine {why} keeps its layout: set it back" for why in reasons]
    for field, what in (("optimizer", "optimizer"), ("lr_scheduler", "learning-rate scheduler")):
        was, is_ = getattr(saved, field), getattr(now, field)
        if was != is_ and not any({was, is_} <= names for names in _SAME_OPTIMIZERS):
            problems.append(f"{what} was {was or 'none'}, is {is_ or 'none'}: set it back")
    changed: dict[str, list[str]] = {"trained": [], "frozen": []}
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            problems.append(
                f"parameter {name} is {'new' if name not in before else 'gone'}: use the same model"
            )
            continue
        was, is_ = before[name][0].shape, after[name][0].shape
        if is_recut:
            was, is_ = saved.whole_shape(before[name]), now.whole_shape(after[name])
        if was != is_:
            problems.append(f"parameter {name} had shape {was}, has {is_}: use the same model")
        elif _is_trained(before[name][0]) != (is_trained := _is_trained(after[name][0])):
            changed["trained" if is_trained else "frozen"].append(name)
    problems += [
        f"{len(names)} parameters are {state} now and were not ({_first_of(names)}): set their "
        "requires_grad as it was, or begin a new trial with the weights that `dstrial checkpoint export` writes"
        for state, names in changed.items()
        if names
    ]
    return problems


def _is_trained(place: ParameterPlace) -> bool:
    """Return whether the optimizer updates a parameter; False if it has no elements."""
    # Without a wrapper, the optimizer may own frozen parameters, but does not update them.
    return place.group_idx is not None and place.trainable and math.prod(place.shape) > 0


def _recut_problems(
    saved: Layout,
    now: Layout,
    before: Mapping[str, Sequence[ParameterPlace]],
    after: Mapping[str, Sequence[ParameterPlace]],
) -> Iterator[str]:
    """Yield why the tensor-parallel slices of parameters cannot be resharded.

    ``before`` and ``after`` have the parameters of ``saved`` and ``now`` by name.
    """
    change = f"tensor-parallel size was {saved.model_parallel_size}, is {now.model_parallel_size}"
    for layout, slices in ((saved, before), (now, after)):
        dims = {name: places[0].tensor_dim for name, places in slices.items()}
        is_cut_otherwise = layout.model_parallel_size > 1 and not any(
            dim is not None for dim in dims.values()
        )
        if layout.engine_kind == "pipeline" or is_cut_otherwise:
            yield f"{change}, and only AutoTP's layers can be cut anew: set it back"
            return
        fused = [name for name, dim in dims.items() if dim == -1]
        if fused:
            yield f"{change}, and AutoTP has fused or uneven slices of {', '.join(fused[:3])}: set it back"
    if saved.optimizer == "MuonWithAuxAdam":
        yield f"{change}, and Muon orthogonalises the slices of a matrix, not the matrix: set it back"
    if saved.frozen_checksums:
        yield f"{change}, and the checkpoint holds no frozen parameters: set it back"
