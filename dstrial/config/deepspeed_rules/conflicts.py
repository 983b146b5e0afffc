"""Reject DeepSpeed 0.19 settings that exclude each other, before ranks start.

DeepSpeed rejects some of these combinations late, on each rank. With the remaining combinations it trains differently from what
the config says, without a message.
"""

from __future__ import annotations

from dstrial.config.deepspeed_rules.settings import ZERO, Settings

# Optimizers whose step is proportional to the gradient; Adam and similar optimizers normalise the gradient.
_LINEAR_IN_GRADIENT = ("sgd", "asgd", "musgd")
# Type names that DeepSpeed accepts -> the name of the precision.
_DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
_REMOVE = "Remove it."
_KEEP_ONE = "Keep one of the two."
_OTHER_SLOTS = "Change it, or the number of slots."


def check_pairs(settings: Settings) -> None:
    """Record a problem for each setting that cannot be combined with another one."""
    for rule in (
        _pipeline,
        _precision,
        _loss_scale,
        _gradient_norm,
        _zero_stage,
        _gradient_reduction,
        _offload,
        _zenflow,
        _compile,
        _parallelism,
        _features,
    ):
        rule(settings)


def _pipeline(s: Settings) -> None:
    # runtime/pipe/engine.py 76; engine.py 2030-2036; module_inject/auto_ep_folding.py
    if s.sizes.has_pipeline_engine:
        with_pipeline = "with a PipelineModule"
        fix = "Set zero_optimization.stage to 1."
        s.reject(s.stage >= 2, f"{ZERO}.stage", f"0 or 1 {with_pipeline}", fix)
        key = "managed_gradient_accumulation"
        s.reject(s.value(key) is False, key, f"true {with_pipeline}", f"Remove {key}.")


def _precision(s: Settings) -> None:
    # runtime/config.py 511, 702-714; base_optimizer.py 484-528; engine.py 1812, 2021, 2323
    fp16, bf16 = bool(s.value("fp16.enabled")), bool(s.value("bf16.enabled"))
    fix = "Switch one of fp16 and bf16 off."
    s.reject(fp16 and bf16, "bf16.enabled", "false, because fp16.enabled is true", fix)
    mode = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    key = "data_types.param_dtype"
    fix = f'Remove {key}, or switch on the mode it names (now: "{mode}").'
    s.reject(
        _dtype(s, key) not in (None, mode), key, f'"{mode}", the precision that fp16 and bf16 select', fix
    )
    key = "data_types.grad_accum_dtype"
    fix = f"Use ZeRO stage 1 for gradients of another type, or remove {key}."
    is_wrong = s.stage == 0 and _dtype(s, key) not in (None, mode)
    s.reject(is_wrong, key, f'"{mode}" (the precision of the model) in ZeRO stage 0', fix)
    if fp16_master := s.value("fp16.fp16_master_weights_and_grads"):
        key = "fp16.fp16_master_weights_and_grads"
        fix = "Offload the optimizer to the CPU, or remove this key."
        is_wrong = s.stage == 0 or not s.offloads_optimizer
        s.reject(is_wrong, key, "false without ZeRO and optimizer offload", fix)
    bf16_states, key = s.value("bf16.bf16_optimizer_states"), "bf16.bf16_master_weights_and_grads"
    if bf16_master := s.value(key):
        s.reject(fp16_master, key, "false, because fp16.fp16_master_weights_and_grads is true", _KEEP_ONE)
        fix = "Set zero_optimization.stage to 1, 2 or 3, or remove this key."
        s.reject(s.stage == 0, key, "false in ZeRO stage 0", fix)
        fix = "Offload the optimizer to the CPU, or set bf16.bf16_optimizer_states."
        is_wrong = s.stage > 0 and not bf16_states and not s.offloads_optimizer
        s.reject(is_wrong, key, "false without optimizer offload or bf16_optimizer_states", fix)
    expected, fix = "false without bf16_master_weights_and_grads", f"Set {key} too."
    s.reject(bf16_states and not bf16_master, "bf16.bf16_optimizer_states", expected, fix)
    key = "torch_autocast.enabled"
    is_wrong = s.value(key) and s.value(f"{ZERO}.zero_quantized_weights")
    s.reject(is_wrong, key, "false with zero_quantized_weights", "Switch one of the two off.")


def _dtype(s: Settings, key: str) -> str | None:
    name = str(s.value(key) or "").removeprefix("torch.")
    return _DTYPES.get(name, name) or None


def _loss_scale(s: Settings) -> None:
    # runtime/precision_config.py (dynamic scaling), engine.py 2021 (LAMB)
    key, scale, is_fp16 = "fp16.loss_scale", s.value("fp16.loss_scale") or 0, s.value("fp16.enabled")
    s.reject(scale < 0, key, "a number of at least 0", "Write 0 for dynamic loss scaling.")
    for one in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        expected = "an integer of at least 1 with dynamic loss scaling"
        s.reject(is_fp16 and scale == 0 and s.value(one) < 1, one, expected, "Set it to 1 or more.")
    if is_fp16 and not s.value("bf16.enabled") and s.stage == 0 and scale != 1:
        # engine.py 3417 scales losses only for ZeRO's optimizers; the fp16 optimizers still divide gradients by the scale.
        cause = (
            "In stage 0 DeepSpeed 0.19 divides gradients by a loss scale by which it has not multiplied the loss "
            "(its pull request 8393)"
        )
        fix = f"Set {ZERO}.stage to 1, which trains the same, or train in bf16"
        if s.optimizer in _LINEAR_IN_GRADIENT:
            expected = f"1, 2 or 3 with fp16 and {s.value('optimizer.type')}"
            s.problem(f"{ZERO}.stage", expected, f"{fix}. {cause}.")
        else:
            text = f"with fp16. {cause}: SGD does not move, Adam does. To be safe: {fix}"
            s.warn(f"{ZERO}.stage", text)
    s.reject(s.optimizer == "lamb" and scale != 0, key, "0 (dynamic) with LAMB", f"Remove {key}.")


def _gradient_norm(s: Settings) -> None:
    # zero/config.py 390; stage_1_and_2.py 389
    key = f"{ZERO}.compute_grad_norm"
    if s.value(key) is not False:
        return
    s.reject(s.stage not in (1, 2), key, "true outside ZeRO stages 1 and 2", _REMOVE)
    fix = "Set gradient_clipping to 0, which must be written down."
    s.reject(s.value("gradient_clipping"), "gradient_clipping", "0 with compute_grad_norm false", fix)
    s.reject(s.offloads_optimizer, key, "true with offload_optimizer", _REMOVE)
    s.reject(s.value(f"{ZERO}.zenflow") is not None, key, "true with zenflow", _REMOVE)
    is_mixed = s.value("bf16.enabled") and _dtype(s, "data_types.grad_accum_dtype") == "fp32"
    expected = "true in stage 1 with bf16 and fp32 gradient accumulation"
    s.reject(is_mixed and s.stage == 1 and not s.offloads_optimizer, key, expected, _REMOVE)


def _zero_stage(s: Settings) -> None:
    # stage_1_and_2.py 212-218, 346; stage3.py 361, 389-396; engine.py 2650
    stage, key = s.stage, f"{ZERO}.legacy_stage1"
    s.reject(s.value(key), key, "false", "Remove it; stage 1 has one implementation.")
    if stage >= 2 and s.value(f"{ZERO}.reduce_scatter"):
        where = f"in ZeRO stage {stage} with reduce_scatter"
        fix = f"Remove it, or set {ZERO}.reduce_scatter to false."
        s.reject(s.value("prescale_gradients"), "prescale_gradients", f"false {where}", fix)
        key = "gradient_predivide_factor"
        s.reject(s.value(key) != 1, key, f"1 {where}", fix)
    key = f"{ZERO}.allgather_bucket_size"
    size = s.value(key)
    is_odd = stage in (1, 2) and size % 2
    s.reject(is_odd, key, f"an even number in ZeRO stage {stage}", f"Set it to {size + 1}.")
    if stage == 3:
        key, quantized = f"{ZERO}.reduce_scatter", s.value(f"{ZERO}.zero_quantized_gradients")
        s.reject(quantized and not s.value(key), key, "true with zero_quantized_gradients", "Set it to true.")
        key, num_ranks = f"{ZERO}.zero_hpz_partition_size", s.sizes.world_size
        hpz = s.value(key) or 1
        fix = "Set it to the number of devices in one machine."
        s.reject(hpz <= num_ranks and num_ranks % hpz, key, f"a divisor of the {num_ranks} ranks", fix)


def _gradient_reduction(s: Settings) -> None:
    # runtime/config.py 695-700; engine.py 2030-2036
    is_compiled = s.value("compile.deepcompile")
    if str(s.value("gradient_allreduce_op")).lower() == "sum":
        for clash, name in (
            (s.stage == 3, "ZeRO stage 3"),
            (s.value(f"{ZERO}.zenflow") is not None, "zenflow"),
            (is_compiled, "compile.deepcompile"),
        ):
            s.reject(clash, "gradient_allreduce_op", f'"mean" with {name}', 'Set it to "mean".')
    if s.value("managed_gradient_accumulation") is False:
        key, expected = f"{ZERO}.overlap_comm", "false below stage 2 without managed_gradient_accumulation"
        s.reject(s.value(key) and s.stage < 2, key, expected, "Set overlap_comm to false.")
        key, expected = "managed_gradient_accumulation", "true with compile.deepcompile"
        s.reject(is_compiled, key, expected, "Remove one of the two.")


def _offload(s: Settings) -> None:
    # zero/config.py 396; zero/offload_config.py; stage_1_and_2.py 220; stage3.py 821; engine.py 2670, 2749
    optimizer, stage = f"{ZERO}.offload_optimizer", f"in ZeRO stage {s.stage}"
    expected = f'"none" {stage} (only stage 3 offloads parameters)'
    fix = "Set zero_optimization.stage to 3, or remove offload_param; DeepSpeed would ignore it silently."
    is_wrong = s.device("offload_param") != "none" and s.stage != 3
    s.reject(is_wrong, f"{ZERO}.offload_param.device", expected, fix)
    is_super = s.value(f"{optimizer}.super_offload")
    if not s.offloads_optimizer:
        expected = 'false while offload_optimizer.device is "none"'
        s.reject(is_super, f"{optimizer}.super_offload", expected, "Set the device.")
    elif s.stage == 0:
        fix = "Set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer."
        s.problem(f"{optimizer}.device", '"none" in ZeRO stage 0', fix)
    elif s.stage < 3:
        is_nvme, expected = (
            s.device("offload_optimizer") == "nvme",
            f'"cpu" {stage} (only stage 3 offloads to NVMe)',
        )
        fix = 'Set it to "cpu", which is what DeepSpeed would do silently, or use stage 3.'
        s.reject(is_nvme, f"{optimizer}.device", expected, fix)
        expected = f"1.0 {stage} (only stage 3 offloads in part)"
        s.reject(s.value(f"{optimizer}.ratio") < 1, f"{optimizer}.ratio", expected, "Remove ratio.")
        fix = "Use stage 3, or remove it; DeepSpeed would ignore it silently."
        s.reject(is_super, f"{optimizer}.super_offload", f"false {stage}", fix)
    for section in ("offload_optimizer", "offload_param"):
        key = f"{ZERO}.{section}.nvme_path"
        is_wrong = s.stage == 3 and s.device(section) == "nvme" and not s.value(key)
        fix = "Set it to a directory on the NVMe disk."
        s.reject(is_wrong, key, 'a directory, because device is "nvme"', fix)


def _zenflow(s: Settings) -> None:
    # zenflow/zenflow_config.py; zenflow/engine.py 24-62; zenflow_stage_1_and_2.py 76-145
    key = f"{ZERO}.zenflow"
    zenflow = s.value(key)
    if zenflow is None:
        return
    fix = 'Set stage to 1, 2 or 3 and offload_optimizer.device to "cpu", or remove zenflow.'
    is_wrong = s.stage == 0 or s.device("offload_optimizer") != "cpu"
    s.reject(is_wrong, key, "absent without ZeRO and CPU offload of the optimizer", fix)
    names = ("select_strategy", "select_interval", "update_interval")
    strategy, select, update = (zenflow[name] for name in names)
    interval = f"{key}.select_interval"
    if strategy not in ("auto", "step", "epoch"):
        s.problem(f"{key}.select_strategy", 'one of "auto", "step", "epoch"', 'Set it to "auto".')
    elif strategy == "auto":
        s.reject(select != "auto", interval, '"auto" while select_strategy is "auto"', _REMOVE)
    elif not isinstance(select, int):
        expected = f'a whole number while select_strategy is "{strategy}"'
        s.problem(interval, expected, "Write a number of steps or epochs.")
    elif strategy == "step" and isinstance(update, int):
        fix = f"Set select_interval to {update} or more."
        s.reject(select < update, interval, f"at least update_interval ({update})", fix)
    is_wrong = update != "auto" and (not isinstance(update, int) or update < 1)
    s.reject(is_wrong, f"{key}.update_interval", 'an integer of at least 1, or "auto"', 'Set it to "auto".')
    key, is_wrong = f"{ZERO}.overlap_comm", zenflow["offload"] and not s.value(f"{ZERO}.overlap_comm")
    s.reject(is_wrong, key, "true with zenflow.offload", "Set overlap_comm to true.")


def _compile(s: Settings) -> None:
    # compile/init_z3.py 89-151; compile/config.py; engine.py 5808, 5842
    if not s.value("compile.deepcompile"):
        return
    offloads = ("offload_activation", "offload_opt_states", "offload_parameters")
    chosen = [name for name in offloads if s.value(f"compile.{name}")]
    for name in chosen[1:]:
        s.problem(f"compile.{name}", f"false, because compile.{chosen[0]} is true", _KEEP_ONE)
    is_twice = "offload_opt_states" in chosen and s.offloads_optimizer
    fix = "Remove zero_optimization.offload_optimizer, or this key."
    s.reject(is_twice, "compile.offload_opt_states", "false with zero_optimization.offload_optimizer", fix)
    key, passes = "compile.passes", s.value("compile.passes") or []
    for name in passes:
        is_wrong = name not in ("z1", "z3", "autosp", "autotp")
        s.reject(is_wrong, key, 'names among "z1", "z3", "autosp", "autotp"', f"Remove {name!r}.")
    fix = 'Remove "autotp" or the other passes.'
    s.reject("autotp" in passes and len(passes) > 1, key, '"autotp" alone', fix)


def _parallelism(s: Settings) -> None:
    # engine.py 945-1060 (AutoTP); runtime/config.py 458-474 (sequence); auto_ep_folding.py (AutoEP)
    num_ranks, divisor = s.sizes.world_size, f"a divisor of the {s.sizes.world_size} ranks"
    key = "tensor_parallel.autotp_size"
    tensor = s.value(key) or 0
    s.reject(tensor > 1 and num_ranks % tensor, key, divisor, _OTHER_SLOTS)
    # engine.py 595: AutoTP replaces the mpu of the pipeline, whose stages then wait for each other or fail.
    is_pipeline = tensor > 1 and s.sizes.has_pipeline_engine
    s.reject(
        is_pipeline,
        key,
        "1 with a PipelineModule",
        "Remove it; a pipeline's layers are cut by the model itself.",
    )
    # With AutoTP, Muon orthogonalises each rank's slice of a matrix, so losses differ from those on one rank.
    expected = "another optimizer with tensor_parallel.autotp_size, since Muon needs whole matrices"
    s.reject(tensor > 1 and s.optimizer == "muon", "optimizer.type", expected, "Use AdamW, or remove AutoTP.")
    key = "tensor_parallel.tp.tp_size"
    is_wrong = tensor > 1 and (s.value(key) or 1) not in (1, tensor)
    s.reject(is_wrong, key, f"1 or autotp_size ({tensor})", "Remove tp.tp_size.")
    key = "sequence_parallel_size"
    sequence = s.value(key) or 1
    s.reject(num_ranks % sequence, key, divisor, _OTHER_SLOTS)
    # engine.py 957: AutoTP replaces the mpu, and with it the sequence-parallel groups.
    is_both = tensor > 1 and sequence > 1
    s.reject(is_both, key, "1 with tensor_parallel.autotp_size", "Keep one of the two.")
    # groups.py 911: with both keys, gradients are reduced over the data-parallel ranks of a device mesh only.
    key, expected = "data_parallel_size", "not given with sequence_parallel_size"
    fix = "Remove it, and pass mpu=parallel_state_sp to deepspeed.initialize (docs/how-to/parallelism.md)."
    s.reject(sequence > 1 and s.is_given(key), key, expected, fix)
    if s.value("expert_parallel.enabled"):
        key, available = "expert_parallel.autoep_size", num_ranks // s.sizes.pp
        experts = s.value(key) or 1
        expected = f"a divisor of the {available} ranks of one stage"
        s.reject(experts > 0 and available % experts, key, expected, _OTHER_SLOTS)


def _features(s: Settings) -> None:
    # checkpointing.py 1229 (activation checkpointing); engine.py 1462, 3657 (autotuning)
    section = "activation_checkpointing"
    key = f"{section}.contiguous_memory_optimization"
    if s.value(key):
        is_wrong = not s.value(f"{section}.partition_activations")
        fix = "Set activation_checkpointing.partition_activations to true."
        s.reject(is_wrong, key, "false without partition_activations", fix)
        key = f"{section}.number_checkpoints"
        fix = "Set it to the number of checkpointed layers."
        s.reject(s.value(key) is None, key, "an integer with contiguous_memory_optimization", fix)
    fix = "Remove it; DeepSpeed's autotuner ends the process after a few steps."
    s.reject(s.value("autotuning.enabled"), "autotuning.enabled", "false in a training run", fix)
