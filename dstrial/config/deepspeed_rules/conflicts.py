"""Reject DeepSpeed 0.19 settings that exclude each other, before ranks start.

DeepSpeed rejects some of these settings late, on each rank. With others it silently trains differently from the config.
"""

from __future__ import annotations

from collections.abc import Callable

from dstrial.config.deepspeed_rules.settings import Settings

_ZERO = "zero_optimization"
_LINEAR_IN_GRADIENT = (
    "sgd",
    "asgd",
    "musgd",
)  # optimizers whose step is proportional to the gradient; Adam and similar optimizers normalise the gradient
_DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def check_pairs(settings: Settings) -> None:
    for rule in RULES:
        rule(settings)


def _pipeline(s: Settings) -> None:
    # runtime/pipe/engine.py 76; engine.py 2030-2036; module_inject/auto_ep_folding.py
    if not s.sizes.has_pipeline_engine:
        return
    if s.stage >= 2:
        s.problem(f"{_ZERO}.stage", "0 or 1 with a PipelineModule", "Set zero_optimization.stage to 1.")
    if s.value("managed_gradient_accumulation") is False:
        fix = "Remove managed_gradient_accumulation."
        s.problem("managed_gradient_accumulation", "true with a PipelineModule", fix)


def _precision(s: Settings) -> None:
    # runtime/config.py 511, 702-714; base_optimizer.py 484-528; engine.py 1812, 2021, 2323
    fp16, bf16 = bool(s.value("fp16.enabled")), bool(s.value("bf16.enabled"))
    if fp16 and bf16:
        s.problem("bf16.enabled", "false, because fp16.enabled is true", "Switch one of fp16 and bf16 off.")
    mode = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    param_dtype, grad_dtype = (
        _dtype(s.value(f"data_types.{key}")) for key in ("param_dtype", "grad_accum_dtype")
    )
    if param_dtype not in (None, mode):
        fix = f'Remove data_types.param_dtype, or switch on the mode it names (now: "{mode}").'
        s.problem("data_types.param_dtype", f'"{mode}", the precision that fp16 and bf16 select', fix)
    if s.stage == 0 and grad_dtype not in (None, mode):
        fix = "Use ZeRO stage 1 for gradients of another type, or remove data_types.grad_accum_dtype."
        s.problem(
            "data_types.grad_accum_dtype", f'"{mode}" (the precision of the model) in ZeRO stage 0', fix
        )
    fp16_master = bool(s.value("fp16.fp16_master_weights_and_grads"))
    bf16_master = bool(s.value("bf16.bf16_master_weights_and_grads"))
    bf16_states = bool(s.value("bf16.bf16_optimizer_states"))
    if fp16_master:
        key = "fp16.fp16_master_weights_and_grads"
        if s.stage == 0 or s.device("offload_optimizer") == "none":
            fix = "Offload the optimizer to the CPU, or remove this key."
            s.problem(key, "false without ZeRO and optimizer offload", fix)
        if bf16_master:
            fix = "Keep one of the two."
            s.problem("bf16.bf16_master_weights_and_grads", f"false, because {key} is true", fix)
    if bf16_master:
        key = "bf16.bf16_master_weights_and_grads"
        if s.stage == 0:
            s.problem(
                key, "false in ZeRO stage 0", "Set zero_optimization.stage to 1, 2 or 3, or remove this key."
            )
        elif not bf16_states and s.device("offload_optimizer") == "none":
            fix = "Offload the optimizer to the CPU, or set bf16.bf16_optimizer_states."
            s.problem(key, "false without optimizer offload or bf16_optimizer_states", fix)
    if bf16_states and not bf16_master:
        fix = "Set bf16.bf16_master_weights_and_grads too."
        s.problem("bf16.bf16_optimizer_states", "false without bf16_master_weights_and_grads", fix)
    if s.value("torch_autocast.enabled") and s.value(f"{_ZERO}.zero_quantized_weights"):
        s.problem("torch_autocast.enabled", "false with zero_quantized_weights", "Switch one of the two off.")


def _dtype(name: object) -> str | None:
    """Return DeepSpeed's short name of a dtype: ``fp16``, ``bf16``, ``fp32``; or None."""
    short = str(name).removeprefix("torch.") if name is not None else None
    return _DTYPES.get(short, short) if short else None


def _loss_scale(s: Settings) -> None:
    """Check runtime/precision_config.py (dynamic scaling), engine.py 2021 (LAMB)."""
    scale = s.value("fp16.loss_scale") or 0
    if scale < 0:
        s.problem("fp16.loss_scale", "a number of at least 0", "Write 0 for dynamic loss scaling.")
    if s.value("fp16.enabled") and scale == 0:
        for key in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
            if s.value(key) < 1:
                s.problem(key, "an integer of at least 1 with dynamic loss scaling", "Set it to 1 or more.")
    if s.value("fp16.enabled") and not s.value("bf16.enabled") and s.stage == 0 and scale != 1:
        # engine.py 3417 scales losses only for ZeRO's optimizers; the fp16 optimizers still divide gradients by the scale.
        cause = (
            "In stage 0 DeepSpeed 0.19 divides gradients by a loss scale by which it has not multiplied the loss "
            "(its pull request 8393)"
        )
        fix = f"Set {_ZERO}.stage to 1, which trains the same, or train in bf16"
        if s.optimizer in _LINEAR_IN_GRADIENT:
            s.problem(
                f"{_ZERO}.stage", f"1, 2 or 3 with fp16 and {s.value('optimizer.type')}", f"{fix}. {cause}."
            )
        else:
            s.warn(
                f"{_ZERO}.stage",
                f"with fp16. {cause}: SGD does not move, Adam does. To be safe: {fix}",
            )
    if s.optimizer == "lamb" and scale != 0:
        s.problem("fp16.loss_scale", "0 (dynamic) with LAMB", "Remove fp16.loss_scale.")


def _zero_stage(s: Settings) -> None:
    # zero/config.py 390; stage_1_and_2.py 212-218, 346, 389; stage3.py 361, 389-396; engine.py 2650
    stage, key = s.stage, f"{_ZERO}.compute_grad_norm"
    if s.value(f"{_ZERO}.legacy_stage1"):
        s.problem(f"{_ZERO}.legacy_stage1", "false", "Remove it; stage 1 has one implementation.")
    if s.value(key) is False:
        if stage not in (1, 2):
            s.problem(key, "true outside ZeRO stages 1 and 2", "Remove it.")
        if s.value("gradient_clipping"):
            fix = "Set gradient_clipping to 0, which must be written down."
            s.problem("gradient_clipping", "0 with compute_grad_norm false", fix)
        if s.device("offload_optimizer") != "none":
            s.problem(key, "true with offload_optimizer", "Remove it.")
        if s.value(f"{_ZERO}.zenflow") is not None:
            s.problem(key, "true with zenflow", "Remove it.")
        mode_is_bf16 = s.value("bf16.enabled") and _dtype(s.value("data_types.grad_accum_dtype")) == "fp32"
        if stage == 1 and mode_is_bf16 and s.device("offload_optimizer") == "none":
            s.problem(key, "true in stage 1 with bf16 and fp32 gradient accumulation", "Remove it.")
    if stage >= 2 and s.value(f"{_ZERO}.reduce_scatter"):
        where = f"in ZeRO stage {stage} with reduce_scatter"
        fix = f"Remove it, or set {_ZERO}.reduce_scatter to false."
        if s.value("prescale_gradients"):
            s.problem("prescale_gradients", f"false {where}", fix)
        if s.value("gradient_predivide_factor") != 1:
            s.problem("gradient_predivide_factor", f"1 {where}", fix)
    if stage in (1, 2) and s.value(f"{_ZERO}.allgather_bucket_size") % 2:
        size = s.value(f"{_ZERO}.allgather_bucket_size")
        fix = f"Set it to {size + 1}."
        s.problem(f"{_ZERO}.allgather_bucket_size", f"an even number in ZeRO stage {stage}", fix)
    quantized_gradients = s.value(f"{_ZERO}.zero_quantized_gradients")
    if stage == 3 and quantized_gradients and not s.value(f"{_ZERO}.reduce_scatter"):
        s.problem(f"{_ZERO}.reduce_scatter", "true with zero_quantized_gradients", "Set it to true.")
    hpz = s.value(f"{_ZERO}.zero_hpz_partition_size") or 1
    if stage == 3 and 1 < hpz <= s.sizes.world_size and s.sizes.world_size % hpz:
        fix = "Set it to the number of devices in one machine."
        s.problem(f"{_ZERO}.zero_hpz_partition_size", f"a divisor of the {s.sizes.world_size} ranks", fix)


def _gradient_reduction(s: Settings) -> None:
    """Check runtime/config.py 695-700; engine.py 2030-2036."""
    if str(s.value("gradient_allreduce_op")).lower() == "sum":
        for clash, name in (
            (s.stage == 3, "ZeRO stage 3"),
            (s.value(f"{_ZERO}.zenflow") is not None, "zenflow"),
            (bool(s.value("compile.deepcompile")), "compile.deepcompile"),
        ):
            if clash:
                s.problem("gradient_allreduce_op", f'"mean" with {name}', 'Set it to "mean".')
    if s.value("managed_gradient_accumulation") is False:
        if s.value(f"{_ZERO}.overlap_comm") and s.stage < 2:
            fix = "Set overlap_comm to false."
            s.problem(
                f"{_ZERO}.overlap_comm", "false below stage 2 without managed_gradient_accumulation", fix
            )
        if s.value("compile.deepcompile"):
            fix = "Remove one of the two."
            s.problem("managed_gradient_accumulation", "true with compile.deepcompile", fix)


def _offload(s: Settings) -> None:
    # zero/config.py 396; zero/offload_config.py; stage_1_and_2.py 220; stage3.py 821; engine.py 2670, 2749
    optimizer, param = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
    if s.device("offload_param") != "none" and s.stage != 3:
        fix = "Set zero_optimization.stage to 3, or remove offload_param; DeepSpeed would ignore it silently."
        s.problem(
            f"{param}.device", f'"none" in ZeRO stage {s.stage} (only stage 3 offloads parameters)', fix
        )
    if s.device("offload_optimizer") == "none":
        if s.value(f"{optimizer}.super_offload"):
            s.problem(
                f"{optimizer}.super_offload",
                'false while offload_optimizer.device is "none"',
                "Set the device.",
            )
    elif s.stage == 0:
        fix = "Set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer."
        s.problem(f"{optimizer}.device", '"none" in ZeRO stage 0', fix)
    elif s.stage < 3:
        stage = f"in ZeRO stage {s.stage}"
        if s.device("offload_optimizer") == "nvme":
            fix = 'Set it to "cpu", which is what DeepSpeed would do silently, or use stage 3.'
            s.problem(f"{optimizer}.device", f'"cpu" {stage} (only stage 3 offloads to NVMe)', fix)
        if s.value(f"{optimizer}.ratio") < 1:
            s.problem(f"{optimizer}.ratio", f"1.0 {stage} (only stage 3 offloads in part)", "Remove ratio.")
        if s.value(f"{optimizer}.super_offload"):
            fix = "Use stage 3, or remove it; DeepSpeed would ignore it silently."
            s.problem(f"{optimizer}.super_offload", f"false {stage}", fix)
    for section in ("offload_optimizer", "offload_param"):
        if s.stage == 3 and s.device(section) == "nvme" and not s.value(f"{_ZERO}.{section}.nvme_path"):
            fix = "Set it to a directory on the NVMe disk."
            s.problem(f"{_ZERO}.{section}.nvme_path", 'a directory, because device is "nvme"', fix)


def _zenflow(s: Settings) -> None:
    # zenflow/zenflow_config.py; zenflow/engine.py 24-62; zenflow_stage_1_and_2.py 76-145
    key = f"{_ZERO}.zenflow"
    zenflow = s.value(key)
    if zenflow is None:
        return
    if s.stage == 0 or s.device("offload_optimizer") != "cpu":
        fix = 'Set stage to 1, 2 or 3 and offload_optimizer.device to "cpu", or remove zenflow.'
        s.problem(key, "absent without ZeRO and CPU offload of the optimizer", fix)
    strategy, select, update = (
        zenflow[name] for name in ("select_strategy", "select_interval", "update_interval")
    )
    if strategy not in ("auto", "step", "epoch"):
        s.problem(f"{key}.select_strategy", 'one of "auto", "step", "epoch"', 'Set it to "auto".')
    elif strategy == "auto" and select != "auto":
        s.problem(f"{key}.select_interval", '"auto" while select_strategy is "auto"', "Remove it.")
    elif strategy != "auto" and not isinstance(select, int):
        fix = "Write a number of steps or epochs."
        s.problem(f"{key}.select_interval", f'a whole number while select_strategy is "{strategy}"', fix)
    elif strategy == "step" and isinstance(update, int) and select < update:
        fix = f"Set select_interval to {update} or more."
        s.problem(f"{key}.select_interval", f"at least update_interval ({update})", fix)
    if update != "auto" and (not isinstance(update, int) or update < 1):
        s.problem(f"{key}.update_interval", 'an integer of at least 1, or "auto"', 'Set it to "auto".')
    if zenflow["offload"] and not s.value(f"{_ZERO}.overlap_comm"):
        s.problem(f"{_ZERO}.overlap_comm", "true with zenflow.offload", "Set overlap_comm to true.")


def _compile(s: Settings) -> None:
    """Check compile/init_z3.py 89-151; compile/config.py; engine.py 5808, 5842."""
    if not s.value("compile.deepcompile"):
        return
    offloads = ("offload_activation", "offload_opt_states", "offload_parameters")
    chosen = [name for name in offloads if s.value(f"compile.{name}")]
    for name in chosen[1:]:
        s.problem(f"compile.{name}", f"false, because compile.{chosen[0]} is true", "Keep one of the two.")
    if "offload_opt_states" in chosen and s.device("offload_optimizer") != "none":
        fix = "Remove zero_optimization.offload_optimizer, or this key."
        s.problem("compile.offload_opt_states", "false with zero_optimization.offload_optimizer", fix)
    passes = s.value("compile.passes") or []
    for name in passes:
        if name not in ("z1", "z3", "autosp", "autotp"):
            s.problem("compile.passes", 'names among "z1", "z3", "autosp", "autotp"', f"Remove {name!r}.")
    if "autotp" in passes and len(passes) > 1:
        s.problem("compile.passes", '"autotp" alone', 'Remove "autotp" or the other passes.')


def _parallelism(s: Settings) -> None:
    # engine.py 945-1060 (AutoTP); runtime/config.py 458-474 (sequence); auto_ep_folding.py (AutoEP)
    world_size = s.sizes.world_size
    tensor = s.value("tensor_parallel.autotp_size") or 0
    if tensor > 1 and world_size % tensor:
        fix = "Change it, or the number of slots."
        s.problem("tensor_parallel.autotp_size", f"a divisor of the {world_size} ranks", fix)
    inner = s.value("tensor_parallel.tp.tp_size") or 1
    if tensor > 1 and inner not in (1, tensor):
        s.problem("tensor_parallel.tp.tp_size", f"1 or autotp_size ({tensor})", "Remove tp.tp_size.")
    sequence = s.value("sequence_parallel_size") or 1
    if world_size % sequence:
        s.problem(
            "sequence_parallel_size",
            f"a divisor of the {world_size} ranks",
            "Change it, or the number of slots.",
        )
    if sequence > 1 and s.is_given("data_parallel_size"):
        # groups.py 911: gradients are then reduced over the data-parallel ranks of a device mesh only.
        fix = "Remove it, and pass mpu=parallel_state_sp to deepspeed.initialize (docs/parallelism.md)."
        s.problem("data_parallel_size", "not given with sequence_parallel_size", fix)
    if tensor > 1 and sequence > 1:
        # engine.py 957: AutoTP replaces the mpu, and with it the sequence-parallel groups.
        s.problem("sequence_parallel_size", "1 with tensor_parallel.autotp_size", "Keep one of the two.")
    if s.value("expert_parallel.enabled"):
        experts = s.value("expert_parallel.autoep_size") or 1
        available = world_size // s.sizes.pp
        if experts > 0 and available % experts:
            fix = "Change it, or the number of slots."
            s.problem("expert_parallel.autoep_size", f"a divisor of the {available} ranks of one stage", fix)


def _features(s: Settings) -> None:
    # checkpointing.py 1229 (activation checkpointing); engine.py 1462, 3657 (autotuning)
    section = "activation_checkpointing"
    if s.value(f"{section}.contiguous_memory_optimization"):
        if not s.value(f"{section}.partition_activations"):
            fix = "Set activation_checkpointing.partition_activations to true."
            s.problem(f"{section}.contiguous_memory_optimization", "false without partition_activations", fix)
        if s.value(f"{section}.number_checkpoints") is None:
            fix = "Set it to the number of checkpointed layers."
            s.problem(f"{section}.number_checkpoints", "an integer with contiguous_memory_optimization", fix)
    if s.value("autotuning.enabled"):
        fix = "Remove it; DeepSpeed's autotuner ends the process after a few steps."
        s.problem("autotuning.enabled", "false in a training run", fix)


RULES: tuple[Callable[[Settings], None], ...] = (
    _pipeline,
    _precision,
    _loss_scale,
    _zero_stage,
    _gradient_reduction,
    _offload,
    _zenflow,
    _compile,
    _parallelism,
    _features,
)
