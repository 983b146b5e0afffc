"""Check a DeepSpeed config's ``optimizer`` and ``scheduler`` sections."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dstrial.config.auto_values import AutoValues
from dstrial.config.deepspeed_rules.settings import Settings
from dstrial.config.deepspeed_schema import DeepSpeedRules, read_table, releases
from dstrial.config.diagnostics import key_path, render
from dstrial.config.keys import AUTO, Dialect, Rule, Section, check_keys

_OF_DEEPSPEED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_RATE = Rule(("number",), minimum=0)
_FLAG = Rule(("boolean",))
_VALUES: Mapping[str, Rule] = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "momentum"), _RATE),
    **dict.fromkeys(("torch_adam", "adam_w_mode", "bias_correction", "amsgrad"), _FLAG),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), Rule(("integer",), minimum=1)),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), Rule(("number", "list", "null"), minimum=0)),
    "eps": Rule(("number", "list"), minimum=0),  # Adafactor has two values
    "betas": Rule(("list",)),
    "warmup_type": Rule(("string",), enum=("log", "linear")),
}
"""Parameter name -> rule of its value. DeepSpeed and PyTorch check few parameters, and only on each rank."""

_KNOWN = {
    "optimizer": "adam, adamw, adagrad, lamb, lion, muon, or the exact name of a torch.optim class",
    "scheduler": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or the exact name of a "
    "torch.optim.lr_scheduler class",
}


def check_optimizer_and_scheduler(
    settings: Settings, rules: DeepSpeedRules, *, auto: str, filler: AutoValues | None = None
) -> None:
    """Record problems in the types and parameters of both sections, if given.

    Source: DeepSpeed 0.19.8 runtime/engine.py, ``_configure_basic_optimizer`` and ``_scheduler_from_config``.
    """
    if settings.is_given("optimizer"):
        name = settings.value("optimizer.type")
        if not settings.is_given("optimizer.type"):
            fix = 'Add "type": "AdamW", or whichever optimizer you mean.'
            settings.findings.problem("optimizer.type", "not given", "the name of an optimizer", fix)
        elif name is not None:
            # DeepSpeed lowercases only its own names; names of torch.optim are case-sensitive.
            rule = rules.optimizers.get(name) or rules.optimizers.get(name.lower())
            if rule is None:
                _unknown_type(settings, "optimizer", name, list(rules.optimizers))
            else:
                _optimizer_parameters(settings, name, rule, auto, filler)
    if settings.is_given("scheduler"):
        name = settings.value("scheduler.type")
        if not settings.is_given("scheduler.type"):
            fix = 'Add "type": "WarmupLR", or whichever scheduler you mean.'
            settings.findings.problem("scheduler.type", "not given", "the name of a scheduler", fix)
        elif name is not None and name not in rules.schedulers:
            _unknown_type(settings, "scheduler", name, list(rules.schedulers))
        elif name is not None:
            rule = rules.schedulers[name]
            if not settings.is_given("scheduler.params"):
                fix = 'Add "params": {}, with the scheduler\'s arguments.'
                settings.findings.problem("scheduler.params", "not given", "a mapping", fix)
            else:
                _parameters(settings, "scheduler", name, rule, auto, filler)


def _optimizer_parameters(
    settings: Settings, name: str, rule: Mapping[str, Any], auto: str, filler: AutoValues | None
) -> None:
    _parameters(settings, "optimizer", name, rule, auto, filler)
    untested_is_allowed = settings.value("zero_allow_untested_optimizer")
    if settings.stage > 0 and not rule["zero_tested"] and not untested_is_allowed:
        settings.problem(
            "optimizer.type",
            "an optimizer that ZeRO is tested with, such as AdamW",
            'Add "zero_allow_untested_optimizer": true to use it all the same.',
        )
    if settings.stage == 3 and settings.optimizer == "muon":
        for key, wanted in (("reduce_scatter", False), ("zero_quantized_gradients", False)):
            if settings.value(f"zero_optimization.{key}") is not wanted:
                settings.problem(
                    f"zero_optimization.{key}", "false with Muon in ZeRO stage 3", "Set it to false."
                )


def _parameters(
    settings: Settings, section: str, name: str, rule: Mapping[str, Any], auto: str, filler: AutoValues | None
) -> None:
    parameters = settings.value(f"{section}.params") or {}
    known = rule.get("params")
    for key, value in parameters.items():
        path = f"{section}.params.{key}"
        if key == "max_grad_norm" and section == "optimizer":
            settings.problem(path, "no such parameter", "Use the top-level key gradient_clipping.")
        elif known is not None and key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            fix = f"Write {close[0]} instead." if close else "Remove it."
            settings.findings.problem(path, f"not a parameter of {name}", f"one of {', '.join(known)}", fix)
        elif value == AUTO and filler is not None:
            says = filler.says(path)
            if says is not None:
                settings.findings.note(path, f'is "auto": {says}')
            else:
                expected = f"a value that {name} takes"
                fix = f"Write the value itself; {filler.name} does not fill it in."
                settings.findings.problem(path, render(AUTO), expected, fix)
        elif value == AUTO and auto == "error":
            expected = f"a value that {name} takes"
            fix = "Write the value itself; nothing fills it in for a DeepSpeedTrial."
            settings.findings.problem(path, render(AUTO), expected, fix)
        elif value == AUTO:
            settings.warn(path, "which only another tool (Hugging Face Trainer) can fill in")
        elif section == "optimizer" or name in _OF_DEEPSPEED:
            _check_value(settings, f"{section}.params", key, value)
    for key in rule.get("required", ()):
        if key not in parameters:
            path = f"{section}.params.{key}"
            settings.findings.problem(path, "not given", f"a value, which {name} requires", f"Add {key}.")


def _check_value(settings: Settings, section: str, key: str, value: Any) -> None:
    rule = _VALUES.get(key)
    if rule is None:
        return
    path = f"{section}.{key}"
    if rule.types == ("integer",) and isinstance(value, float) and value.is_integer():
        fix = f"Write {int(value)}, without exponent and decimal point."
        settings.findings.problem(path, render(value), "an integer", fix)
    elif key == "betas" and isinstance(value, list):
        if len(value) != 2 or not all(type(one) in (int, float) and 0 <= one < 1 for one in value):
            fix = "Write [0.9, 0.999], for example."
            settings.findings.problem(path, render(value), "two numbers of at least 0 and below 1", fix)
    else:
        one = Section({key: rule})
        check_keys(one, {key: value}, Dialect(name="DeepSpeed"), settings.findings, key_path(section))


def _unknown_type(settings: Settings, section: str, name: str, known: list[str]) -> None:
    by_lower = {candidate.lower(): candidate for candidate in known}
    if name.lower() in {
        one.lower() for release in releases() for one in read_table(release)[f"{section}s"]
    } - {*by_lower}:
        fix = 'Set it to "AdamW", or to "Lamb" for OneBitLamb.'
        got = f"{render(name)}, which this release of DeepSpeed has removed"
        settings.findings.problem(f"{section}.type", got, _KNOWN[section], fix)
        return
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    fix = (
        f"Set it to {render(by_lower[close[0]])}." if close else "Correct the name, or make it in the trial."
    )
    settings.problem(f"{section}.type", _KNOWN[section], fix)
