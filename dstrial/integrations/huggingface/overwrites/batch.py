"""The batch sizes of a Trainer: solved over keys, arguments and ranks. Pure.

The Trainer counts ``per_device_train_batch_size`` x ``gradient_accumulation_steps`` x ranks, whatever else DeepSpeed divides
the ranks for, and demands the same of DeepSpeed's three keys.

Source: transformers 4.56 and 5.23 ``integrations/deepspeed.py``, ``trainer_config_process``; accelerate 1.11 and 1.15
``DeepSpeedPlugin.__post_init__``, which takes a missing ``gradient_accumulation_steps`` for 1 whatever the Trainer says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from dstrial.config.auto_values import DEFAULT_MICRO_BATCH, MICRO_FLAG, SIZE_FLAGS, STEPS_FLAG
from dstrial.config.batch import AUTO, BATCH_KEYS, BatchSolution, solve_batch
from dstrial.errors import ConfigError
from dstrial.integrations.huggingface.overwrites.draft import COMMAND_LINE, Draft, Resolution, auto_hint
from dstrial.resume.batch import in_words, keep_batch
from dstrial.resume.metadata import EngineRecord, SavedRun, given_sizes

_TOTAL, _MICRO, _STEPS = BATCH_KEYS

Sizes: TypeAlias = tuple[int | None, int | None, int | None]
"""Global batch, micro batch, accumulation steps; None for what is not given."""


def reconcile_batch(draft: Draft, world_size: int, resumed: SavedRun | None) -> None:
    """Make the three keys numbers and the two flags the same numbers.

    A number in the config wins over a flag, because a search changes the config. The flags fill in what the config leaves open,
    as far as the config's numbers let them; then the solver. ``resumed`` is this very run's checkpoint, whose batch is kept.
    """
    keys = _key_sizes(draft)
    flags = tuple(draft.number_of_flag(flag, minimum=1, is_whole=True) for flag in (MICRO_FLAG, STEPS_FLAG))
    if draft.findings.problems:
        return
    micro, steps = (None if value is None else int(value) for value in flags)
    engine = None if resumed is None or not resumed.engines else resumed.engines[0]
    if not any((*keys, micro, steps)) and engine is None:
        _leave_to_trainer(draft)
        return
    own: BatchSolution | None = None
    error: ConfigError | None = None
    try:
        own = _solve(draft, keys, micro, steps, world_size)
    except ConfigError as failure:
        error = failure
    kept = None
    if (
        engine is not None
        and resumed is not None
        and _is_kept(own, keys, engine, is_micro_given=keys[1] is not None or micro is not None)
    ):
        kept = keep_batch(
            {_TOTAL: engine.train_batch_size}, engine, world_size, checkpoint=resumed.checkpoint
        )
        draft.decide(
            "", _TOTAL, Resolution.KEPT, f"the batch of checkpoint {resumed.checkpoint} is kept: {in_words(engine, kept)}"
        )  # fmt: skip
    solution = kept or own
    if solution is None:
        assert error is not None, "there is a solution or an error"
        raise error
    is_kept = kept is not None or (engine is not None and _is_as_begun(engine, micro, steps, solution))
    _apply(draft, solution, keys, is_kept=is_kept)


def _key_sizes(draft: Draft) -> Sizes:
    total, micro, steps = (draft.number_of_key(key, minimum=1, is_whole=True) for key in BATCH_KEYS)
    return given_sizes(dict(zip(BATCH_KEYS, (total, micro, steps), strict=True)))


def _leave_to_trainer(draft: Draft) -> None:
    for key in BATCH_KEYS:
        draft.set_key(key, AUTO)
        default = {_MICRO: f"--{MICRO_FLAG} ({DEFAULT_MICRO_BATCH})", _STEPS: f"--{STEPS_FLAG} (1)"}.get(key)
        said = (
            f"the Trainer's default of {default}"
            if default
            else "the product of the two others and the ranks"
        )
        draft.decide(
            SIZE_FLAGS.get(key, ""), key, Resolution.TRAINER, f"{key} is given neither as a number nor as an argument: {said}"
        )  # fmt: skip


def _solve(draft: Draft, keys: Sizes, micro: int | None, steps: int | None, world_size: int) -> BatchSolution:
    """Solve with as many of the flags as the config's numbers allow."""
    error: ConfigError | None = None
    for with_micro, with_steps in _attempts(keys, micro, steps):
        where = {key: draft.place(key) for key in BATCH_KEYS}
        if keys[1] is None and with_micro is not None:
            where[_MICRO] = f"{COMMAND_LINE}: --{MICRO_FLAG}"
        if keys[2] is None and with_steps is not None:
            where[_STEPS] = f"{COMMAND_LINE}: --{STEPS_FLAG}"
        if keys[0] is None and with_micro is None:
            with_micro = DEFAULT_MICRO_BATCH
        try:
            return solve_batch(keys[0], with_micro, with_steps, world_size, where=where)
        except ConfigError as failure:
            error = failure
    assert error is not None, "there is at least one attempt"
    raise error


def _attempts(keys: Sizes, micro: int | None, steps: int | None) -> Iterator[tuple[int | None, int | None]]:
    """Yield micro batch and accumulation to try: both flags', one alone, neither."""
    seen = set()
    for with_micro, with_steps in ((micro, steps), (micro, None), (None, steps), (None, None)):
        attempt = (with_micro if keys[1] is None else keys[1], with_steps if keys[2] is None else keys[2])
        if attempt not in seen:
            seen.add(attempt)
            yield attempt


def _is_kept(own: BatchSolution | None, keys: Sizes, engine: EngineRecord, *, is_micro_given: bool) -> bool:
    """Whether sizes are those the run began with, and make another batch now.

    So is a micro batch that was only solved, and larger than the run's, which is known to fit into memory. Others were changed
    on purpose; a run cannot go on with them, which is for the checkpoint's reader to say.
    """
    if own is None:
        return keys[0] == engine.train_batch_size
    if own.train_batch_size == engine.train_batch_size:
        return not is_micro_given and own.train_micro_batch_size_per_gpu > engine.micro_batch_limit
    now = (own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps)
    began = tuple(engine.given.get(key) for key in (_MICRO, _STEPS))
    return (
        now == began or now[0] * now[1] * engine.batch_replicas(engine.world_size) == engine.train_batch_size
    )


def _is_as_begun(engine: EngineRecord, micro: int | None, steps: int | None, solution: BatchSolution) -> bool:
    """Whether arguments are the run's first ones, and other sizes make its batch now."""
    began = (engine.given.get(_MICRO), engine.given.get(_STEPS))
    given = (micro or DEFAULT_MICRO_BATCH, steps or 1)
    return given == began and solution.train_batch_size == engine.train_batch_size


def _apply(draft: Draft, solution: BatchSolution, keys: Sizes, *, is_kept: bool) -> None:
    for key, given in zip(BATCH_KEYS, keys, strict=True):
        value = int(getattr(solution, key))
        draft.set_key(key, value)
        flag = SIZE_FLAGS.get(key)
        if flag is None:
            if given is None and not is_kept:
                draft.decide("", key, Resolution.SOLVED, f"{key} is solved: {solution.equation}")
            continue
        asked = draft.number_of_flag(flag, minimum=1, is_whole=True)
        draft.set_flag(flag, str(value))
        if is_kept and asked != value:
            draft.decide(
                flag, key, Resolution.KEPT, f"--{flag} is set to {value} to keep the checkpoint's batch"
            )
        elif asked is None:
            origin = "solved" if given is None else f"as {draft.place(key)} has it"
            outcome = Resolution.SOLVED if given is None else Resolution.ARGUMENT_SET
            draft.decide(flag, key, outcome, f"--{flag} {value} is added, {origin}")
        elif asked == value and given is None:
            is_missing = key not in draft.source.merged
            state = "missing" if is_missing else f'"{AUTO}"'
            outcome = Resolution.KEY_SET if is_missing else Resolution.SOLVED
            draft.decide(flag, key, outcome, f"{key} is {state}: it becomes {value}, as --{flag} says")
        elif asked == value:
            draft.decide(flag, key, Resolution.EQUAL, f"--{flag} and {key} are both {value}")
        else:
            winner = key if given is not None else _TOTAL
            why = f"{draft.place(winner)} is {getattr(solution, winner)} and --{flag} is {int(asked)}"
            draft.decide(
                flag,
                key,
                Resolution.ARGUMENT_CHANGED,
                f"{why}: {winner} wins, --{flag} becomes {value} ({solution.equation}). {auto_hint(winner)}",
            )
