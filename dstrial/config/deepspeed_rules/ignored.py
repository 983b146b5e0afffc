"""Warn of settings that DeepSpeed 0.19 accepts, but then ignores or changes."""

from __future__ import annotations

from dstrial.config.deepspeed_rules.settings import ZERO, Settings

_PREFETCH = "stage3_prefetch_bucket_size"
# Keys of `zero_optimization` by the ZeRO stages that read them.
_STAGE_3_ONLY = (
    "sub_group_size",
    _PREFETCH,
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)
_ABOVE_STAGE_0_ONLY = (
    "reduce_bucket_size",
    "reduce_scatter",
    "contiguous_gradients",
    "overlap_comm",
    "allgather_bucket_size",
    "round_robin_gradients",
)
_BELOW_STAGE_3_ONLY = (
    "allgather_bucket_size",
    "round_robin_gradients",
    "parameter_alignment",
    "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters",
)


def zero_keys_without_effect(stage: int) -> tuple[str, ...]:
    """Return the ``zero_optimization`` keys that DeepSpeed ignores in ZeRO ``stage``."""
    in_stage = (*(_BELOW_STAGE_3_ONLY if stage == 3 else _STAGE_3_ONLY), "allgather_partitions")
    return in_stage if stage else (*in_stage, *_ABOVE_STAGE_0_ONLY)


def check_ignored(settings: Settings) -> None:
    """Warn of given settings that DeepSpeed ignores or that have an unexpected effect.

    Source: DeepSpeed 0.19.8 runtime/engine.py 1745 and the constructor calls 2670-2795; utils/groups.py 925;
    runtime/config.py 458; runtime/zenflow/engine.py 69; runtime/pipe/engine.py 1298; clip_grad_norm_ of runtime/utils.py.
    """
    s = settings
    _check_zero(s)
    is_pipeline, mode = s.sizes.has_pipeline_engine, "bf16" if s.value("bf16.enabled") else "fp16"
    is_fp32 = not s.value(f"{mode}.enabled")
    if is_pipeline and s.is_given(f"{ZERO}.overlap_comm"):
        s.warn_if_set(f"{ZERO}.overlap_comm", "which DeepSpeed switches off in a pipeline")
    if is_pipeline and s.stage == 0 and is_fp32:
        s.warn_if_set(
            "gradient_clipping",
            "but without ZeRO a pipeline measures the gradients of its first stage alone, and clips all by that. "
            "Set zero_optimization.stage to 1 to clip by the norm of all",
        )
    if not is_fp32:
        s.warn_if_set(
            "torch_autocast.enabled", f"on top of {mode}.enabled: the model is already in that precision"
        )
    if s.offloads_optimizer:
        s.warn_if_set(
            "optimizer.params.torch_adam", "so the offloaded optimizer runs in PyTorch, several times slower"
        )
    tensor = s.value("tensor_parallel.autotp_size") or 0
    if tensor > 1:
        s.warn(
            "tensor_parallel.autotp_size",
            f"but DeepSpeed's batch equation counts all {s.sizes.world_size} ranks as replicas: train_batch_size "
            f"counts each record {tensor} times",
        )
    if is_pipeline and (s.value("sequence_parallel_size") or 1) > 1:
        s.warn("sequence_parallel_size", "which a pipeline does not read: its ranks share no sequences")
    if s.stage == 0 and not s.value("compile.passes"):
        s.warn_if_set("compile.deepcompile", "which falls back to plain torch.compile in ZeRO stage 0")
    if s.value("data_efficiency.data_sampling.enabled"):
        text = "but its data sampling needs DeepSpeed's own loader, which a trial does not use"
        s.warn_if_set("data_efficiency.enabled", text)
    for section in ("tensorboard", "csv_monitor"):
        if s.value(f"{section}.enabled") and not str(s.value(f"{section}.output_path")).startswith("/"):
            s.warn(
                f"{section}.output_path",
                "below the working directory of the ranks, which a master deletes after the trial. Write an absolute path",
            )
    s.warn_if_set(
        "checkpoint.load_universal",
        "which only your own calls of load_checkpoint read: dstrial's own checkpoints are not universal",
    )
    s.warn_if_set(
        "dataloader_drop_last",
        "which only DeepSpeed's own loader reads; set drop_last on the trial's DataLoader",
    )


def _check_zero(s: Settings) -> None:
    if s.is_given(f"{ZERO}.allgather_partitions"):
        s.warn(f"{ZERO}.allgather_partitions", "which no ZeRO stage reads")
    for keys, applies, where in (
        (_STAGE_3_ONLY, s.stage < 3, "below stage 3"),
        (_BELOW_STAGE_3_ONLY, s.stage == 3, "in stage 3"),
    ):
        for key in keys:
            if applies and s.is_given(f"{ZERO}.{key}"):
                s.warn(f"{ZERO}.{key}", f"which has no effect {where}")
    if s.stage == 3:
        if s.value(f"{ZERO}.stage3_allgather_sequential") and s.is_given(f"{ZERO}.{_PREFETCH}"):
            s.warn(f"{ZERO}.{_PREFETCH}", "which stage3_allgather_sequential sets to 1")
        if (s.value(f"{ZERO}.zero_hpz_partition_size") or 1) > s.sizes.world_size:
            text = f"which is cut down to the {s.sizes.world_size} ranks there are"
            s.warn(f"{ZERO}.zero_hpz_partition_size", text)
        s.warn_if_set(f"{ZERO}.elastic_checkpoint", "which ZeRO stage 3 no longer supports")
    if s.value(f"{ZERO}.zenflow") is not None and s.is_given("gradient_accumulation_steps"):
        s.warn("gradient_accumulation_steps", "which zenflow replaces by its update_interval")
