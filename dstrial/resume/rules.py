"""Pure rules: what keeps a checkpoint from resuming with a config on some slots.

What only a running engine knows (parameters, groups, what user code makes itself) is compared again by the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.experiment_config.dstrial_section import count_in
from dstrial.config.parallel_dims import DIM_KEYS, ParallelDims
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.batch import engine_of, in_words, keep_batch
from dstrial.resume.metadata import EngineRecord, SavedRun, given_settings

# Wrappers of DeepSpeed 0.19.8 whose state reshaping can read; MiCS, ZenFlow and others cut it in ways of their own.
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
"""Class of an optimizer -> keys of its state with one value per element of a parameter, laid out as the weights are.

The exception is Muon's momentum, see ``checkpoint.layout.keeps_whole_matrices``. The state of any other optimizer may hold
factors of matrices, quantised blocks or errors of one rank (1-bit Adam), which no other layout can take over.
"""
_FAMILIES = {
    "adam": frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "NPUAdam"}),
    "adamw": frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "NPUAdam"}),
    "adagrad": frozenset({"Adagrad", "DeepSpeedCPUAdagrad"}),
    "lamb": frozenset({"FusedLamb", "Lamb"}),
    "lion": frozenset({"FusedLion", "DeepSpeedCPULion", "Lion"}),
    "onebitadam": frozenset({"OnebitAdam"}),
    "onebitlamb": frozenset({"OnebitLamb"}),
    "zerooneadam": frozenset({"ZeroOneAdam"}),
}


def resume_problems(
    saved: SavedRun,
    *,
    num_slots: int,
    extents: Mapping[str, Any] | None = None,
    configs: Sequence[Mapping[str, Any]] = (),
    slots_key: str = "resources.slots_per_trial",
    where: Sequence[Mapping[str, str]] = (),
) -> list[ConfigProblem]:
    """Return what keeps a checkpoint from resuming, each with what would work.

    Args:
        saved: the checkpoint.
        num_slots: ranks now, at least 1.
        extents: ``pipeline_stages`` and ``model_parallel_size`` of ``data.dstrial``; a missing one is the checkpoint's.
        configs: the experiment's merged DeepSpeed configs, the main one first; empty if it names none.
        slots_key: the key of the number of slots in messages.
        where: per config, ``file:line: key`` of its batch sizes by their names.
    """
    problems: list[ConfigProblem] = []
    of_engine = _configs_by_engine(saved, configs)
    for idx, engine in enumerate(saved.engines):
        replica = engine.replica.with_section(extents)
        # Another trial's model may be split otherwise in code, which only its engine shows.
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
        config_idx = of_engine.get(idx)
        config = None if config_idx is None else configs[config_idx]
        if saved.keeps_batch:
            sizes = config if config is not None else {"train_batch_size": engine.train_batch_size}
            places = where[config_idx] if config_idx is not None and config_idx < len(where) else None
            try:
                keep_batch(
                    sizes,
                    engine,
                    engine.batch_replicas(num_slots, replica),
                    checkpoint=saved.checkpoint,
                    where=places,
                    ranks_per_replica=unit,
                )
            except ConfigError as error:
                problems += error.problems
        if _is_arranged_otherwise(engine, num_slots, replica, config):
            problems += _reshape_problems(saved, engine, replica, config, num_slots, slots_key)
    return list(dict.fromkeys(problems))


def fitting_slots(
    saved: SavedRun,
    *,
    num_available: int,
    at_least: int = 1,
    extents: Mapping[str, Any] | None = None,
    configs: Sequence[Mapping[str, Any]] = (),
) -> int | None:
    """Return the largest number of slots, in this range, on which a run can resume."""
    for num_slots in range(num_available, max(at_least, 1) - 1, -1):
        if not resume_problems(saved, num_slots=num_slots, extents=extents, configs=configs):
            return num_slots
    return None


def _configs_by_engine(saved: SavedRun, configs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return which config each engine of a checkpoint is made from, where known."""
    found: dict[int, int] = {}
    for config_idx, config in enumerate(configs):
        engine = engine_of(config, saved, is_main=config_idx == 0)
        for idx, candidate in enumerate(saved.engines):
            if engine is not None and candidate == engine:
                found.setdefault(idx, config_idx)
    return found


def _zero(config: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return a config's ZeRO stage, and where it offloads optimizer and parameters."""
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


def _is_arranged_otherwise(
    engine: EngineRecord, num_slots: int, replica: ParallelDims, config: Mapping[str, Any] | None
) -> bool:
    """Return whether an engine will have another layout than saved, if known."""
    if num_slots != engine.world_size or replica != engine.replica:
        return True
    if config is None:
        return False
    if any(_changed_type(engine, config, section) is not None for section in ("optimizer", "scheduler")):
        return True
    stage, optimizer_device, parameter_device = _zero(config)
    saved_devices = (engine.offload_optimizer, engine.offload_parameters)
    return stage != engine.zero_stage or (optimizer_device, parameter_device) != saved_devices


def _changed_type(engine: EngineRecord, config: Mapping[str, Any], section: str) -> str | None:
    """Return a config's optimizer or scheduler type if the run began with another."""
    kind = given_settings(config).get(section)
    if not engine.given or kind is None or kind == engine.given.get(section):
        return None
    used = engine.optimizer if section == "optimizer" else engine.lr_scheduler
    family = _FAMILIES.get(kind.lower(), frozenset({kind})) if section == "optimizer" else frozenset({kind})
    return None if used in family else str(kind)


def _reshape_problems(
    saved: SavedRun,
    engine: EngineRecord,
    replica: ParallelDims,
    config: Mapping[str, Any] | None,
    num_slots: int,
    slots_key: str,
) -> Iterator[ConfigProblem]:
    name = f"checkpoint {saved.checkpoint}"
    if replica.tp != engine.model_parallel_size:
        yield ConfigProblem(
            "data.dstrial.model_parallel_size",
            str(replica.tp),
            f"{engine.model_parallel_size}, as in {name}, whose layers are cut so",
            f"Set it to {engine.model_parallel_size}.",
        )
    if config is not None:
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
    _, *devices = _zero(config) if config is not None else (0, "none", "none")
    back = f"Go on with {engine.world_size} slots, ZeRO stage {engine.zero_stage} and the same offload"
    if "nvme" in (engine.offload_optimizer, engine.offload_parameters):
        yield ConfigProblem(
            slots_key,
            f"{num_slots}, another arrangement than that of {name}, whose state is offloaded to NVMe",
            f"the same arrangement: {engine.world_size} slots, ZeRO stage {engine.zero_stage}",
            f"{back}; a checkpoint written with the offload device cpu or none can be rearranged.",
        )
    elif "nvme" in devices:
        yield ConfigProblem(
            "deepspeed config: zero_optimization",
            f"an offload to NVMe, which {name} was written without",
            "cpu or none",
            "Set the offload device to cpu or none.",
        )
    why = _kept_apart(engine)
    if why is not None:
        yield ConfigProblem(
            slots_key,
            f"{num_slots}, another arrangement than that of {name}, {why}",
            f"the same arrangement: {engine.world_size} slots, ZeRO stage {engine.zero_stage}",
            f"{back}.",
        )


def _kept_apart(engine: EngineRecord) -> str | None:
    """Return what of an engine's state only its own layout can load."""
    # It belongs to no parameter element.
    if engine.model_parallel_size > 1:
        return f"whose layers are cut over {engine.model_parallel_size} model-parallel ranks"
    if engine.expert_parallel_size:
        return "whose experts are spread over its ranks"
    if engine.optimizer and engine.optimizer not in STATE_KEYS:
        return f"whose optimizer {engine.optimizer} keeps state of unknown layout"
    if engine.wrapper not in KNOWN_WRAPPERS:
        return f"whose {engine.wrapper} arranges its state in its own way"
    return None


def with_kept_batch(
    found: DeepSpeedSource, resumed: SavedRun, sizes: ParallelDims, notes: list[str], *, is_main: bool
) -> dict[str, Any]:
    """Return a merged DeepSpeed config with the batch of the run's checkpoint.

    ``notes`` receives how the batch is shared, if that has changed. ``is_main``: whether it is the experiment's main config.
    """
    engine = engine_of(found.merged, resumed, is_main=is_main)
    if engine is None:
        return found.merged
    replicas = engine.batch_replicas(sizes.world_size, sizes.on(sizes.ranks_per_replica))
    try:
        solution = keep_batch(found.merged, engine, replicas, checkpoint=resumed.checkpoint)
    except ConfigError:
        # What is wrong is said by check_resumption; the rest of the config is checked with sizes of which nothing is.
        return {**found.merged, **dict.fromkeys(BATCH_KEYS, 1), BATCH_KEYS[0]: replicas}
    before = (engine.batch_replicas(engine.world_size), engine.micro_batch_size)
    if before != (replicas, solution.train_micro_batch_size_per_gpu):
        notes.append(f"{found.label}: checkpoint {resumed.checkpoint}: {in_words(engine, solution)}")
    return {**found.merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}


def check_resumption(
    raw: Mapping[str, Any],
    resumed: SavedRun,
    slots: int,
    slots_key: str,
    checks: Sequence[tuple[DeepSpeedSource, CheckResult]],
    findings: Diagnostics,
) -> None:
    """Record in ``findings`` what keeps a checkpoint from resuming with a config.

    ``slots`` 0 means one rank on the CPU; ``checks`` are the experiment's DeepSpeed configs, the main one first.
    """
    section = dstrial_section(raw)
    found = resume_problems(
        resumed,
        num_slots=max(slots, 1),
        extents={key: count_in(section, key) for key in DIM_KEYS},
        configs=[source.merged for source, _ in checks],
        slots_key=slots_key if slots_key == "--slots" else findings.place(slots_key),
        where=[_places(source) for source, _ in checks],
    )
    findings.problems.extend(problem for problem in found if problem not in findings.problems)


def _places(source: DeepSpeedSource) -> dict[str, str]:
    findings = Diagnostics(source.lines, source.label)
    return {key: findings.place(key) for key in BATCH_KEYS}
