"""Check a DeepSpeed config's ``optimizer`` and ``scheduler`` sections."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dstrial.config.deepspeed_rules.settings import ZERO, DeepSpeedRules, Settings
from dstrial.config.diagnostics import key_path, render
from dstrial.config.keys import Dialect, Rule, Section, check_keys


def _check_betas(value: Any) -> str | None:
    if isinstance(value, list) and not (
        len(value) == 2 and all(type(one) in (int, float) and 0 <= one < 1 for one in value)
    ):
        return "two numbers of at least 0 and below 1"
    return None


# DeepSpeed's schedulers whose parameters have a rule in `_VALUES`.
_OF_DEEPSPEED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_RATE = Rule(("number",), minimum=0)
_FLAG = Rule(("boolean",))
_VALUES: Mapping[str, Rule] = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "momentum"), _RATE),
    **dict.fromkeys(("torch_adam", "adam_w_mode", "bias_correction", "amsgrad"), _FLAG),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), Rule(("integer",), minimum=1)),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), Rule(("number", "list", "null"), minimum=0)),
    "eps": Rule(("number", "list"), minimum=0),  # Adafactor has two values
    "betas": Rule(("list",), check=_check_betas, fix="Write [0.9, 0.999], for example."),
    "warmup_type": Rule(("string",), enum=("log", "linear")),
}
"""Parameter of an optimizer or of DeepSpeed's schedulers -> rule of its value.

DeepSpeed and PyTorch check few parameters, and only when each rank creates the optimizer.
"""

# Section -> legal values of its key `type`, for messages.
_KNOWN = {
    "optimizer": "adam, adamw, adagrad, lamb, lion, muon, or the exact name of a torch.optim class",
    "scheduler": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or the exact name of a "
    "torch.optim.lr_scheduler class",
}


def check_optimizer_and_scheduler(settings: Settings, rules: DeepSpeedRules, dialect: Dialect) -> None:
    """Check the types and parameters in the ``optimizer`` and ``scheduler`` sections.

    Problems are recorded in ``settings.findings``. A missing section is no problem. Source: DeepSpeed 0.19.8 runtime/engine.py,
    ``_configure_basic_optimizer`` and ``_scheduler_from_config``.
    """
    for section, known, example in (
        ("optimizer", rules.optimizers, "AdamW"),
        ("scheduler", rules.schedulers, "WarmupLR"),
    ):
        if not settings.is_given(section):
            continue
        name = settings.value(f"{section}.type")
        if not settings.is_given(f"{section}.type"):
            article = "an" if section == "optimizer" else "a"
            fix = f'Add "type": "{example}", or whichever {section} you mean.'
            settings.findings.problem(f"{section}.type", "not given", f"the name of {article} {section}", fix)
        if name is None:
            continue
        # DeepSpeed lowercases only its own names of optimizers; names of torch are case-sensitive.
        lower = name.lower() if section == "optimizer" else name
        rule = known.get(name) or known.get(lower)
        if rule is None:
            _unknown_type(settings, section, name, list(known))
        elif section == "scheduler" and not settings.is_given("scheduler.params"):
            fix = 'Add "params": {}, with the scheduler\'s arguments.'
            settings.findings.problem("scheduler.params", "not given", "a mapping", fix)
        else:
            _check_parameters(settings, section, name, rule, dialect)
            if section == "optimizer":
                _check_with_zero(settings, rule)


def _check_with_zero(settings: Settings, rule: Mapping[str, Any]) -> None:
    is_untested = settings.stage > 0 and not rule["zero_tested"]
    settings.reject(
        is_untested and not settings.value("zero_allow_untested_optimizer"),
        "optimizer.type",
        "an optimizer that ZeRO is tested with, such as AdamW",
        'Add "zero_allow_untested_optimizer": true to use it all the same.',
    )
    if settings.stage == 3 and settings.optimizer == "muon":
        for key in (f"{ZERO}.reduce_scatter", f"{ZERO}.zero_quantized_gradients"):
            is_wrong = settings.value(key) is not False
            settings.reject(is_wrong, key, "false with Muon in ZeRO stage 3", "Set it to false.")


def _check_parameters(
    settings: Settings, section: str, name: str, rule: Mapping[str, Any], dialect: Dialect
) -> None:
    parameters = dict(settings.value(f"{section}.params") or {})
    if section == "optimizer" and "max_grad_norm" in parameters:
        path = "optimizer.params.max_grad_norm"
        settings.problem(path, "no such parameter", "Use the top-level key gradient_clipping.")
        del parameters["max_grad_norm"]
    known = rule.get("params", parameters)
    for key in [key for key in parameters if key not in known]:
        close = difflib.get_close_matches(key, known, n=1)
        fix = f"Write {close[0]} instead." if close else "Remove it."
        expected = f"one of {', '.join(known)}"
        settings.findings.problem(f"{section}.params.{key}", f"not a parameter of {name}", expected, fix)
        del parameters[key]
    rules = {} if section == "scheduler" and name not in _OF_DEEPSPEED else _VALUES
    required = tuple(rule.get("required", ()))
    any_value = Rule(("any",))
    required_value = Rule(("any",), expected=f"a value, which {name} requires")
    keys = {key: rules.get(key, any_value) for key in parameters}
    keys |= {key: rules.get(key, required_value) for key in required}
    check_keys(
        Section(keys, required=required, fills_in=False),
        parameters,
        dialect,
        settings.findings,
        key_path(f"{section}.params"),
    )


def _unknown_type(settings: Settings, section: str, name: str, known: list[str]) -> None:
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    fix = (
        f"Set it to {render(by_lower[close[0]])}." if close else "Correct the name, or make it in the trial."
    )
    settings.problem(f"{section}.type", _KNOWN[section], fix)
