"""Keep a resumed run's ``train_batch_size`` on any number of replicas.

A run's counters, schedules and record order assume a constant batch size. Therefore the checkpoint's batch size is kept, and
micro batch size and accumulation steps are solved for the current number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import BATCH_KEYS, BatchSolution, solve_batch
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.metadata import FILLED_KEY, EngineRecord, SavedRun, given_sizes


def keep_batch(
    config: Mapping[str, Any],
    saved: EngineRecord,
    data_parallel_size: int,
    *,
    checkpoint: str,
    where: Mapping[str, str] | None = None,
    ranks_per_replica: int = 1,
) -> BatchSolution:
    """Return the batch sizes with which a resumed run keeps its ``train_batch_size``.

    The sizes of ``config`` are used if all of these hold:

    - DeepSpeed would compute the checkpoint's ``train_batch_size`` from these sizes.
    - The micro batch size is at most ``saved.micro_batch_limit``, or ``config`` sets it.
    - ``config`` sets the micro batch size, or its sizes have changed since the run's start.

    Otherwise the micro batch size is solved: the largest divisor of a replica's records per batch, up to a limit. The limit is
    the micro batch size in ``config`` or, if not set, ``saved.micro_batch_limit``.

    Args:
        config: the DeepSpeed config; only its batch sizes and ``autotp_size`` are read.
        saved: the engine in the checkpoint.
        data_parallel_size: current number of replicas in DeepSpeed's batch equation.
        checkpoint: the checkpoint's name for messages.
        where: batch size key -> ``file:line: key``, for messages.
        ranks_per_replica: number of ranks per replica, for numbers of slots in messages.

    Raises:
        ConfigError: the config sets another batch size than the checkpoint's, or the replicas cannot share a batch evenly.
    """
    saved = saved.counted_for(config)
    wanted = saved.train_batch_size
    given = given_sizes(config)
    is_filled = bool(saved.given.get(FILLED_KEY)) or "auto" in (config.get(key) for key in BATCH_KEYS)
    if is_filled and given[0] is None:
        # The ranks check the sizes again, when the script's arguments have filled them in.
        given = (wanted, given[1], given[2])
    places = {key: f"deepspeed config: {key}" for key in BATCH_KEYS} | dict(where or {})
    own = own_solution(given, data_parallel_size)
    limit = given[1] or saved.micro_batch_limit
    is_same = is_unchanged(given, saved)
    if own is not None and own.train_batch_size == wanted and own.train_micro_batch_size_per_gpu <= limit:
        if given[1] is not None or given != given_sizes(saved.given):
            return own
    elif given[0] != wanted and not is_same and any(size is not None for size in given):
        raise ConfigError([_changed_batch_problem(places, given, own, saved, data_parallel_size, checkpoint)])
    if wanted % data_parallel_size:
        raise ConfigError(
            [_indivisible_batch_problem(places, saved, data_parallel_size, checkpoint, ranks_per_replica)]
        )
    micro = _largest_divisor(wanted // data_parallel_size, limit)
    return BatchSolution(
        wanted,
        micro,
        wanted // data_parallel_size // micro,
        data_parallel_size,
        tuple(key for key, size in zip(BATCH_KEYS, given, strict=True) if size is None),
    )


def is_unchanged(given: tuple[int | None, int | None, int | None], saved: EngineRecord) -> bool:
    """Return whether a config still has the saved run's batch size.

    ``given`` is the result of ``given_sizes`` for the config. True if the sizes equal those at the run's start. Also True if
    DeepSpeed would compute the saved ``train_batch_size`` from these sizes on the saved number of ranks.
    """
    if any(key in saved.given for key in BATCH_KEYS) and given == given_sizes(saved.given):
        return True
    then = own_solution(given, saved.batch_replicas(saved.world_size))
    return then is not None and then.train_batch_size == saved.train_batch_size


def engine_of(config: Mapping[str, Any], saved: SavedRun, *, is_main: bool) -> EngineRecord | None:
    """Return the saved engine to which a merged config belongs; None if unknown.

    A config belongs to the first engine for which ``is_unchanged`` is true. If there is no such engine, the experiment's main
    config (``is_main``) belongs to the first engine. If the checkpoint has only one engine, any config belongs to it.
    """
    sizes = given_sizes(config)
    for engine in saved.engines:
        if is_unchanged(sizes, engine):
            return engine
    return saved.engines[0] if saved.engines and (is_main or len(saved.engines) == 1) else None


def describe_batch(saved: EngineRecord, solution: BatchSolution) -> str:
    """Return the new and the old batch equation as text for logs and messages."""
    return (
        f"{solution.equation} (it was {saved.micro_batch_size} x {saved.micro_batches_per_batch} x "
        f"{saved.batch_replicas(saved.world_size)})"
    )


def own_solution(
    given: tuple[int | None, int | None, int | None], data_parallel_size: int
) -> BatchSolution | None:
    """Return the batch sizes that DeepSpeed would compute from a config's sizes.

    ``given`` are the config's batch sizes in the order of ``BATCH_KEYS``. Return None if the sizes contradict each other, or
    do not determine the missing sizes.
    """
    try:
        return solve_batch(*given, data_parallel_size)
    except ConfigError:
        return None


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(max(min(limit, number), 1), 0, -1) if number % size == 0)


def _indivisible_batch_problem(
    places: Mapping[str, str],
    saved: EngineRecord,
    data_parallel_size: int,
    checkpoint: str,
    ranks_per_replica: int,
) -> ConfigProblem:
    wanted = saved.train_batch_size
    fewer = _largest_divisor(wanted, data_parallel_size)
    more = next((n for n in range(data_parallel_size, wanted + 1) if wanted % n == 0), fewer)
    slots = " or ".join(str(n * ranks_per_replica) for n in sorted({fewer, more}))
    below = wanted // data_parallel_size * data_parallel_size
    batches = " or ".join(str(size) for size in (below, below + data_parallel_size) if size)
    return ConfigProblem(
        places["train_batch_size"],
        f"{wanted} in checkpoint {checkpoint}, which {data_parallel_size} data-parallel replicas cannot share evenly",
        "a batch that the replicas divide, since a run that goes on keeps its batch",
        f"Go on with {slots} slots, or begin a new run from these weights (searcher.source_checkpoint_uuid) with "
        f"train_batch_size {batches}.",
    )


def _changed_batch_problem(
    places: Mapping[str, str],
    given: tuple[int | None, int | None, int | None],
    own: BatchSolution | None,
    saved: EngineRecord,
    data_parallel_size: int,
    checkpoint: str,
) -> ConfigProblem:
    wanted = saved.train_batch_size
    stated = ", ".join(
        f"{key} {size}" for key, size in zip(BATCH_KEYS[1:], given[1:], strict=True) if size is not None
    )
    if given[0] is not None:
        got = str(given[0])
    else:
        got = f"{own.train_batch_size if own is not None else 'not solvable'} ({stated} on {data_parallel_size} replicas)"
    fix = "Leave the batch sizes as they were when the run began: they are solved for the replicas there are"
    if wanted % data_parallel_size == 0:
        micro = _largest_divisor(wanted // data_parallel_size, given[1] or saved.micro_batch_limit)
        fix = (
            f"Set train_batch_size to {wanted}, train_micro_batch_size_per_gpu to {micro} and "
            f"gradient_accumulation_steps to {wanted // data_parallel_size // micro}"
        )
    return ConfigProblem(
        places["train_batch_size"],
        got,
        f"{wanted}, the batch of checkpoint {checkpoint}, in which its progress, schedule and order of records are counted",
        f"{fix}, or begin a new run from these weights with another batch (searcher.source_checkpoint_uuid).",
    )
