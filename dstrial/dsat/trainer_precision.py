"""fp16 and bf16 of a Trainer and of DeepSpeed, of which one at most can be on. Pure.

Source: transformers 4.56 and 5.23 ``integrations/deepspeed.py``, ``trainer_config_process``; accelerate 1.11 and 1.15
``DeepSpeedPlugin.set_mixed_precision``.
"""

from __future__ import annotations

from dstrial.config.batch import AUTO
from dstrial.config.findings import render
from dstrial.dsat.decisions import Outcome
from dstrial.dsat.trainer_draft import Draft, auto_hint

_PRECISIONS = ("fp16", "bf16")
ARGUMENTS = tuple(name for precision in _PRECISIONS for name in (precision, f"{precision}_full_eval"))


def reconcile_precision(draft: Draft) -> None:
    """Bring both precisions together. Changes the draft."""
    said: dict[str, bool | None] = {}
    for precision in _PRECISIONS:
        key = f"{precision}.enabled"
        value = draft.key_value(key)
        if value is not None and value != AUTO and not isinstance(value, bool):
            fix = "Write true or false, without quotes."
            draft.findings.problem(key, render(value), f'true, false or "{AUTO}"', fix)
            return
        said[precision] = value if isinstance(value, bool) else None
    _settle_both_on(draft, said)
    on = next((precision for precision in _PRECISIONS if said[precision]), None)
    for precision in _PRECISIONS:
        other = said[precision]
        if other is None and on is not None and on != precision:
            other = False
        _reconcile(draft, precision, other, on)


def _settle_both_on(draft: Draft, said: dict[str, bool | None]) -> None:
    """Let the overwrite win where the config has both precisions on; without one that is the user's to settle."""
    if not all(said.values()):
        return
    keys = [f"{precision}.enabled" for precision in _PRECISIONS]
    overwritten = [draft.is_overwritten(key) for key in keys]
    if sum(overwritten) != 1:
        fix = "Keep one of the two."
        draft.findings.problem(keys[1], "true, and fp16.enabled is true too", "one precision", fix)
        return
    winner, loser = (_PRECISIONS[overwritten.index(flag)] for flag in (True, False))
    said[loser] = False
    draft.set_key(f"{loser}.enabled", False)
    draft.decide(
        loser,
        f"{loser}.enabled",
        Outcome.KEY_CHANGED,
        f"{draft.place(f'{loser}.enabled')} is true and {draft.place(f'{winner}.enabled')} is true: the overwrite wins, "
        f"{loser}.enabled becomes false. Say so in overwrite_deepspeed_args: {{{loser}: {{enabled: false}}}}.",
    )


def _reconcile(draft: Draft, precision: str, said: bool | None, on: str | None) -> None:
    key, full = f"{precision}.enabled", f"{precision}_full_eval"
    value = draft.key_value(key)
    asked = [name for name in (precision, full) if draft.truth_of_flag(name)]
    if said is None:
        if value == AUTO:
            who = " and ".join(f"--{name}" for name in asked) or f"the default of --{precision}"
            draft.decide(precision, key, Outcome.TRAINER, f'{key} is "auto": the Trainer fills in {who}')
        elif asked:
            draft.set_key(key, AUTO)
            draft.decide(
                precision,
                key,
                Outcome.KEY_SET,
                f'{key} is missing: it becomes "auto", so that --{asked[0]} has an effect',
            )
    elif said and asked:
        draft.decide(precision, key, Outcome.EQUAL, f"--{asked[0]} and {key} are both true")
    elif said:
        draft.set_flag(precision, "True")
        is_given = draft.is_given(precision)
        outcome = Outcome.ARGUMENT_CHANGED if is_given else Outcome.ARGUMENT_SET
        text = f"--{precision} True is added, as {draft.place(key)} has it"
        if is_given:
            text = (
                f"{draft.place(key)} is true and --{precision} is false: {key} wins, --{precision} becomes True. "
                f"{auto_hint(key)}"
            )
        draft.decide(precision, key, outcome, text)
    else:
        for name in asked:
            draft.set_flag(name, "False")
            winner = key if isinstance(value, bool) or on is None else f"{on}.enabled"
            draft.decide(
                name,
                key,
                Outcome.ARGUMENT_CHANGED,
                f"{draft.place(winner)} is {render(draft.key_value(winner))} and --{name} is given: {winner} wins, "
                f"--{name} becomes False. {auto_hint(winner)}",
            )
        if not asked and isinstance(value, bool):
            draft.decide(precision, key, Outcome.EQUAL, f"--{precision} is not given and {key} is false")
