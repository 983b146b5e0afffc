"""Keys of an Accelerate config without a counterpart, with the reason; pure data.

Source: accelerate 1.15 ``commands/config/config_args.py`` (``ClusterConfig``), ``commands/config/cluster.py`` (the
questionnaire), ``utils/launch.py`` (what becomes of each key).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ONE_LAUNCHER = "dstrial.launch starts the ranks, on the machines that the master or the cluster gives"
_FILTER = "not part of an experiment: disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for `dstrial up`"
_TPU = "for TPUs only"
_OTHER_LIBRARY = "settings of another library than DeepSpeed"

REASONS: Mapping[str, str] = {
    "compute_environment": "LOCAL_MACHINE is what every experiment runs on",
    "machine_rank": _ONE_LAUNCHER,
    "main_process_ip": _ONE_LAUNCHER,
    "main_process_port": "dstrial.launch takes a free port",
    "rdzv_backend": _ONE_LAUNCHER,
    "same_network": _ONE_LAUNCHER,
    "main_training_function": "used by notebooks and TPUs only; the entrypoint is a script",
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    "fsdp_config": _OTHER_LIBRARY,
    "megatron_lm_config": _OTHER_LIBRARY,
    "mpirun_config": "dstrial.launch starts the ranks; under your own mpirun, start the script itself with it",
    "deepspeed_config.deepspeed_multinode_launcher": _ONE_LAUNCHER,
    "deepspeed_config.deepspeed_hostfile": "the master or the cluster knows its machines; num_processes gives the slots",
    "deepspeed_config.deepspeed_exclusion_filter": _FILTER,
    "deepspeed_config.deepspeed_inclusion_filter": _FILTER,
}
"""Why a key, as ``section.key``, goes nowhere."""

FILTERS = frozenset(
    {"deepspeed_config.deepspeed_exclusion_filter", "deepspeed_config.deepspeed_inclusion_filter"}
)
"""Keys among these that ask for something that a person has to do elsewhere."""

EMPTY: tuple[Any, ...] = (None, "", {}, [], False)
"""Values that ask for nothing."""

DYNAMO_VARIABLES: Mapping[str, str] = {
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_mode": "ACCELERATE_DYNAMO_MODE",
    "dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
}
"""Environment variable that ``TorchDynamoPlugin`` reads for each key of ``dynamo_config``."""

PLUGIN_VARIABLES: Mapping[str, str] = {
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Environment variable that ``DeepSpeedPlugin`` reads for keys of ``deepspeed_config`` that DeepSpeed's JSON has not."""

FLAG_VARIABLES: Mapping[str, str] = {
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
}
"""Environment variable that Accelerate reads for each flag of the file."""

OTHER_TYPES: Mapping[str, str] = {
    "FSDP": "torch's FSDP shards in another way than DeepSpeed; make a file with DeepSpeed, ZeRO stage 3",
    "MEGATRON_LM": "Megatron-LM parallelism is set in code; make a file with DeepSpeed",
    "XLA": "DeepSpeed does not run on TPUs",
    "TPU": "DeepSpeed does not run on TPUs",
    "MULTI_NEURON": "DeepSpeed does not run on Neuron devices",
}
"""Why a ``distributed_type`` cannot be converted."""
