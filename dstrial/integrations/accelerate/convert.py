"""Make a DeepSpeed JSON and an experiment config of what ``accelerate config`` writes, and say where every key went.

Pure: reads nothing, writes nothing. Accelerate need not be installed.

Source: accelerate 1.15 ``utils/dataclasses.py:DeepSpeedPlugin`` (how its keys become DeepSpeed's), ``utils/launch.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.integrations.accelerate.config_keys import (
    DYNAMO_VARIABLES,
    EMPTY,
    FLAG_VARIABLES,
    OTHER_TYPES,
    PLUGIN_VARIABLES,
    REASONS,
)

JSON_NAME = "ds_config.json"
"""File name of the DeepSpeed JSON that the experiment config names."""

YAML_NAME = "experiment.yaml"
"""File name of the experiment config."""

Outcome = Literal["json", "yaml", "variable", "nowhere", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """What an Accelerate config cannot say.

    Attributes:
        entrypoint: the script with its arguments; None if it is not known.
        micro_batch_size: records of one forward pass on one rank; None to leave it to the script's loader.
        name: name of the experiment.
        metric: the validation metric that the searcher compares; None if it is not known.
        num_batches: how long to train, optimizer steps; None if it is not known.
        learning_rate: of an AdamW in the DeepSpeed JSON; None if the script makes its own optimizer.
    """

    entrypoint: str | None
    micro_batch_size: int | None
    name: str
    metric: str | None = None
    num_batches: int | None = None
    learning_rate: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    """What became of one key.

    Attributes:
        key: as ``section.key``.
        value: as the file has it.
        outcome: in which file it is now: the DeepSpeed JSON, the experiment config or a variable in it; nowhere, with a
            reason; or not known to accelerate 1.15.
        explanation: the key there, or the reason.
    """

    key: str
    value: Any
    outcome: Outcome
    explanation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result.

    Attributes:
        deepspeed: content of the DeepSpeed JSON.
        slots: ranks of the job.
        variables: environment variables of the experiment.
        overwrites: values of the experiment config that go over the JSON.
        keys: every key of the Accelerate config, in its order.
        choices: what the file could not say.
        is_cpu: whether the file asks for training on the CPU.
    """

    deepspeed: dict[str, Any]
    slots: int
    variables: dict[str, str]
    overwrites: dict[str, Any]
    keys: tuple[ConvertedKey, ...]
    choices: Choices
    is_cpu: bool


def convert(
    config: Mapping[str, Any],
    choices: Choices,
    *,
    label: str,
    deepspeed_file: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert an Accelerate config.

    Args:
        config: the file's content; not changed.
        choices: what it cannot say.
        label: how messages call the file.
        deepspeed_file: content of the file that ``deepspeed_config.deepspeed_config_file`` names, if it names one.

    Raises:
        ConfigError: it is for something else than DeepSpeed on machines of one's own, or a value has the wrong type.
    """
    converter = _Converter(config, label, deepspeed_file)
    converter.run()
    return converter.result(choices)


class _Converter:
    def __init__(self, config: Mapping[str, Any], label: str, file: Mapping[str, Any] | None) -> None:
        self._config = config
        self._label = label
        self._file = file
        self._keys: list[ConvertedKey] = []
        self._problems: list[ConfigProblem] = []
        self._variables: dict[str, str] = {}
        self._json: dict[str, Any] = {}
        self._zero: dict[str, Any] = {}
        self._slots = 1
        self._is_cpu = False

    def run(self) -> None:
        plugin = self._section("deepspeed_config")
        self._stage = self._whole_number(plugin.get("zero_stage", 2), "deepspeed_config.zero_stage", 0)
        kind = str(self._config.get("distributed_type", "DEEPSPEED"))
        if kind != "DEEPSPEED" and not plugin:
            self._stage = 0
        for key, value in self._config.items():
            if key == "deepspeed_config":
                self._take_plugin(plugin)
            elif key in _TOP_LEVEL:
                getattr(self, f"_take_{key}")(key, value)
            elif key in FLAG_VARIABLES:
                self._take_flag(key, value)
            elif key in REASONS:
                self._take_no_counterpart(key, value)
            else:
                self._note(key, value, "unknown", "no key of accelerate 1.15; it is not taken over")
        if self._problems:
            raise ConfigError(self._problems)

    def result(self, choices: Choices) -> Conversion:
        micro = choices.micro_batch_size
        overwrites: dict[str, Any] = {}
        if self._file is not None:
            deepspeed = dict(self._file)
            if micro is not None and deepspeed.get(BATCH_KEYS[1]) != micro:
                overwrites[BATCH_KEYS[1]] = micro
        else:
            steps = self._json.pop(BATCH_KEYS[2], 1)
            sizes: dict[str, Any] = {BATCH_KEYS[1]: AUTO if micro is None else micro, BATCH_KEYS[2]: steps}
            if micro is None:
                sizes = {BATCH_KEYS[0]: AUTO, **sizes}
            deepspeed = {**sizes, **self._json, "zero_optimization": {"stage": self._stage, **self._zero}}
        if choices.learning_rate is not None and "optimizer" not in deepspeed:
            deepspeed["optimizer"] = {"type": "AdamW", "params": {"lr": choices.learning_rate}}
        return Conversion(
            deepspeed, self._slots, self._variables, overwrites, tuple(self._keys), choices, self._is_cpu
        )

    # ---- top-level keys ------------------------------------------------------------------------------

    def _take_compute_environment(self, key: str, value: Any) -> None:
        if value != "LOCAL_MACHINE":
            self._problem(
                key, value, "LOCAL_MACHINE", "Make a file for a machine of your own with `accelerate config`."
            )
        self._note(key, value, "nowhere", REASONS[key])

    def _take_distributed_type(self, key: str, value: Any) -> None:
        kind = str(value)
        if kind in OTHER_TYPES:
            self._problem(
                key,
                value,
                f"DEEPSPEED ({OTHER_TYPES[kind]})",
                "Run `accelerate config` and choose DeepSpeed.",
            )
        elif kind == "DEEPSPEED":
            self._note(key, value, "yaml", "hyperparameters.deepspeed_config")
        elif self._section("deepspeed_config"):
            self._note(
                key,
                value,
                "yaml",
                "hyperparameters.deepspeed_config, because the file has a deepspeed_config",
            )
        else:
            self._note(key, value, "json", "zero_optimization.stage 0, DeepSpeed's plain data parallelism")

    def _take_num_processes(self, key: str, value: Any) -> None:
        if value == -1:
            self._note(
                key,
                value,
                "nowhere",
                "left open in the file; resources.slots_per_trial is 1 until you set it",
            )
            return
        self._slots = self._whole_number(value, key, 1)
        self._note(key, value, "yaml", "resources.slots_per_trial")

    def _take_num_machines(self, key: str, value: Any) -> None:
        reason = "resources.slots_per_trial counts the slots of all machines"
        if value not in (1, None):
            reason += (
                "; the embedded master has one machine, on a Determined cluster they are dealt out by it"
            )
        self._note(key, value, "nowhere", reason)

    def _take_gpu_ids(self, key: str, value: Any) -> None:
        if value in (None, "all"):
            self._note(key, value, "nowhere", "asks for nothing: all are offered")
        else:
            reason = f"the master deals out slots; set CUDA_VISIBLE_DEVICES={value} for `dstrial up` to offer only these"
            self._note(key, value, "nowhere", reason)

    def _take_use_cpu(self, key: str, value: Any) -> None:
        if value is not True:
            self._note(key, value, "nowhere", "asks for nothing")
            return
        self._is_cpu = True
        self._variables["DS_ACCELERATOR"] = "cpu"
        self._note(
            key,
            value,
            "variable",
            "DS_ACCELERATOR=cpu, because Accelerate's own ACCELERATE_USE_CPU turns DeepSpeed off",
        )

    def _take_mixed_precision(self, key: str, value: Any) -> None:
        precision = "no" if value in (None, False) else str(value).lower()
        if precision not in ("no", "fp16", "bf16", "fp8"):
            self._problem(key, value, "no, fp16, bf16 or fp8", "Correct it.")
        elif precision == "no":
            self._note(
                key, value, "nowhere", "asks for nothing: DeepSpeed trains in fp32 unless told otherwise"
            )
        elif self._file is not None:
            reason = "the file of deepspeed_config_file decides, and accelerate refuses both"
            self._note(key, value, "nowhere", reason)
        elif precision == "fp16":
            self._json["fp16"] = {"enabled": True, "auto_cast": True}
            self._note(key, value, "json", "fp16.enabled, and auto_cast as Accelerate sets it")
        else:
            self._json["bf16"] = {"enabled": True}
            extra = ""
            if precision == "fp8":
                self._variables["ACCELERATE_MIXED_PRECISION"] = "fp8"
                extra = ", and ACCELERATE_MIXED_PRECISION=fp8: Accelerate's fp8 runs on top of bf16"
            self._note(key, value, "json", f"bf16.enabled{extra}")

    def _take_fp16(self, key: str, value: Any) -> None:
        if "mixed_precision" in self._config:
            self._note(key, value, "nowhere", "an old key, which accelerate ignores beside mixed_precision")
        else:
            self._take_mixed_precision(key, "fp16" if value is True else "no")

    def _take_dynamo_backend(self, key: str, value: Any) -> None:
        if str(value).upper() == "NO":
            self._note(key, value, "nowhere", "asks for nothing")
        else:
            self._set_dynamo(key, "dynamo_backend", value)

    def _take_dynamo_config(self, key: str, value: Any) -> None:
        self._take_each(key, value, lambda name, inner: self._set_dynamo(f"{key}.{name}", name, inner))

    def _set_dynamo(self, key: str, name: str, value: Any) -> None:
        full = name if name.startswith("dynamo_") else f"dynamo_{name}"
        if full not in DYNAMO_VARIABLES:
            self._note(key, value, "unknown", "no key of accelerate 1.15; it is not taken over")
            return
        self._variables[DYNAMO_VARIABLES[full]] = str(value)
        self._note(
            key,
            value,
            "variable",
            f"{DYNAMO_VARIABLES[full]}, with which Accelerate compiles DeepSpeed's engine",
        )

    def _take_fp8_config(self, key: str, value: Any) -> None:
        def take(name: str, inner: Any) -> None:
            words = name.removeprefix("fp8_").upper()
            if words == "OVERRIDE_LINEAR_PRECISION" and isinstance(inner, (list, tuple)):
                for part, flag in zip(("FPROP", "DGRAD", "WGRAD"), inner, strict=False):
                    self._variables[f"ACCELERATE_FP8_OVERRIDE_{part}"] = str(flag)
                self._note(
                    f"{key}.{name}", inner, "variable", "ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD"
                )
                return
            self._variables[f"ACCELERATE_FP8_{words}"] = str(inner)
            self._note(f"{key}.{name}", inner, "variable", f"ACCELERATE_FP8_{words}")

        self._take_each(key, value, take)

    def _take_parallelism_config(self, key: str, value: Any) -> None:
        def take(name: str, inner: Any) -> None:
            short = name.removeprefix("parallelism_config_")
            if short == "tp_size" and isinstance(inner, int) and inner > 1:
                self._json["tensor_parallel"] = {"autotp_size": inner}
                self._note(f"{key}.{name}", inner, "json", "tensor_parallel.autotp_size")
            elif inner in (1, *EMPTY):
                self._note(f"{key}.{name}", inner, "nowhere", "asks for nothing")
            else:
                reason = (
                    "accelerate offers it with FSDP only; set sequence parallelism in DeepSpeed's own JSON"
                )
                self._note(f"{key}.{name}", inner, "nowhere", reason)

        self._take_each(key, value, take)

    def _take_flag(self, key: str, value: Any) -> None:
        if value is not True:
            self._note(key, value, "nowhere", "asks for nothing")
            return
        self._variables[FLAG_VARIABLES[key]] = "1" if key == "enable_cpu_affinity" else "true"
        self._note(key, value, "variable", FLAG_VARIABLES[key])

    def _take_no_counterpart(self, key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                self._note(f"{key}.{name}", inner, "nowhere", REASONS[key])
        else:
            self._note(key, value, "nowhere", REASONS[key])

    # ---- deepspeed_config ----------------------------------------------------------------------------

    def _take_plugin(self, plugin: Mapping[str, Any]) -> None:
        if not plugin:
            self._note("deepspeed_config", self._config["deepspeed_config"], "nowhere", "asks for nothing")
        for name, value in plugin.items():
            key = f"deepspeed_config.{name}"
            if name == "deepspeed_config_file":
                self._note(key, value, "json", "its whole content, in a file of its own")
            elif name in PLUGIN_VARIABLES:
                self._take_plugin_variable(key, name, value)
            elif key in REASONS:
                self._note(key, value, "nowhere", REASONS[key])
            elif self._file is not None and name in _INLINE:
                reason = "the file of deepspeed_config_file decides, and accelerate refuses both"
                self._note(key, value, "nowhere", reason)
            elif name in _INLINE:
                getattr(self, f"_plugin_{_INLINE[name]}")(key, name, value)
            else:
                self._note(key, value, "unknown", "no key of accelerate 1.15; it is not taken over")

    def _take_plugin_variable(self, key: str, name: str, value: Any) -> None:
        if value in (None, ""):
            self._note(key, value, "nowhere", "asks for nothing")
            return
        variable = PLUGIN_VARIABLES[name]
        self._variables[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        self._note(key, value, "variable", variable)

    def _plugin_stage(self, key: str, _name: str, value: Any) -> None:
        self._note(key, value, "json", "zero_optimization.stage")

    def _plugin_steps(self, key: str, name: str, value: Any) -> None:
        self._json[BATCH_KEYS[2]] = AUTO if value == AUTO else self._whole_number(value, key, 1)
        self._note(key, value, "json", name)

    def _plugin_clipping(self, key: str, name: str, value: Any) -> None:
        if value in (None, AUTO):
            self._note(key, value, "nowhere", "Accelerate fills in 1.0, which is DeepSpeed's default too")
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._problem(key, value, "a number", "Correct it.")
            return
        self._json["gradient_clipping"] = value
        self._note(key, value, "json", name)

    def _plugin_save16(self, key: str, _name: str, value: Any) -> None:
        if self._stage != 3:
            self._note(key, value, "nowhere", f"for ZeRO stage 3 only, and this is stage {self._stage}")
            return
        self._zero["stage3_gather_16bit_weights_on_model_save"] = value is True
        self._note(key, value, "json", "zero_optimization.stage3_gather_16bit_weights_on_model_save")

    def _plugin_device(self, key: str, name: str, value: Any) -> None:
        section = name.removesuffix("_device")
        device = str(value or "none")
        if device == "none":
            self._note(key, value, "nowhere", "asks for nothing")
        elif device not in ("cpu", "nvme"):
            self._problem(key, value, "none, cpu or nvme", "Correct it.")
        elif self._stage == 0 or (section == "offload_param" and self._stage != 3):
            needs = "stage 3" if section == "offload_param" else "stage 1, 2 or 3"
            self._note(
                key,
                value,
                "nowhere",
                f"DeepSpeed offloads this in {needs} only, and this is stage {self._stage}",
            )
        else:
            moved = device == "nvme" and self._stage != 3
            target = self._zero.setdefault(section, {})
            target["device"] = "cpu" if moved else device
            extra = (
                f': "cpu", because DeepSpeed offloads to NVMe in stage 3 only (this is stage {self._stage})'
                if moved
                else ""
            )
            self._note(key, value, "json", f"zero_optimization.{section}.device{extra}")

    def _plugin_path(self, key: str, name: str, value: Any) -> None:
        section = name.removesuffix("_nvme_path")
        plugin = self._section("deepspeed_config")
        if plugin.get(f"{section}_device") != "nvme" or self._stage != 3:
            self._note(key, value, "nowhere", "nothing is offloaded to NVMe")
            return
        self._zero.setdefault(section, {})["nvme_path"] = str(value)
        self._note(key, value, "json", f"zero_optimization.{section}.nvme_path")

    # ---- helpers -------------------------------------------------------------------------------------

    def _section(self, key: str) -> Mapping[str, Any]:
        value = self._config.get(key)
        if value in (None, ""):
            return {}
        if not isinstance(value, Mapping):
            problem = ConfigProblem(
                f"{self._label}: {key}", repr(value), "a mapping", "Write its keys below it."
            )
            raise ConfigError([problem])
        return value

    def _take_each(self, key: str, value: Any, take: Any) -> None:
        if value in EMPTY:
            self._note(key, value, "nowhere", "asks for nothing")
            return
        for name, inner in self._section(key).items():
            take(str(name), inner)

    def _whole_number(self, value: Any, key: str, at_least: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
            return value
        self._problem(key, value, f"an integer of at least {at_least}", "Correct it.")
        return at_least

    def _problem(self, key: str, value: Any, expected: str, fix: str) -> None:
        self._problems.append(ConfigProblem(f"{self._label}: {key}", repr(value), expected, fix))

    def _note(self, key: str, value: Any, outcome: Outcome, explanation: str) -> None:
        self._keys.append(ConvertedKey(key, value, outcome, explanation))


_TOP_LEVEL = frozenset(
    {
        "compute_environment",
        "distributed_type",
        "num_processes",
        "num_machines",
        "gpu_ids",
        "use_cpu",
        "mixed_precision",
        "fp16",
        "dynamo_backend",
        "dynamo_config",
        "fp8_config",
        "parallelism_config",
    }
)
"""Keys that have a method of their own."""

_INLINE = {
    "zero_stage": "stage",
    "gradient_accumulation_steps": "steps",
    "gradient_clipping": "clipping",
    "zero3_save_16bit_model": "save16",
    "offload_optimizer_device": "device",
    "offload_param_device": "device",
    "offload_optimizer_nvme_path": "path",
    "offload_param_nvme_path": "path",
}
"""What takes each key of ``deepspeed_config`` that stands for one of DeepSpeed's JSON."""
