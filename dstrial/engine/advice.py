"""Remedies for what DeepSpeed 0.19 refuses and earlier releases took."""

from __future__ import annotations

# `dstrial check` says the same where the source shows it.
_REMEDIES = (
    (
        # deepspeed 0.19.8 __init__.py:530
        "we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()",
        "Leave args out of the call of deepspeed.initialize(), whose args.deepspeed_config is a second config beside config=.",
    ),
    (
        # deepspeed 0.19.8 runtime/engine.py:3130
        "Direct calls to tensor.backward() are not supported in this configuration",
        "If this loss went through a second engine, compute it with that engine's module, engine.module(...), between "
        "engine.module.requires_grad_(False) and engine.module.requires_grad_(True); or set zero_optimization.stage to 1.",
    ),
)
_MISSING_ATTRIBUTE = "deepscale_config"


def append_remedy(error: BaseException) -> None:
    """Append the remedy, if known, to the message of an error of DeepSpeed's.

    Args:
        error: whatever user code raised; its class and traceback stay.
    """
    text = str(error.args[0]) if error.args else ""
    for fragment, remedy in _REMEDIES:
        if fragment in text and remedy not in text:
            error.args = (f"{text.rstrip('. ')}. {remedy}", *error.args[1:])
    if isinstance(error, KeyError) and text == _MISSING_ATTRIBUTE:
        # hasattr() of DeepSpeed on an object of the user's that raises KeyError for what it does not have.
        error.args = (
            f"{text}: args of deepspeed.initialize() has attributes that raise KeyError. Leave args out of the call.",
        )
