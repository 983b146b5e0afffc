"""Two living processes that measure one DeepSpeed configuration after the other: what ``record_dsat_grid.py`` records with."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
MACHINE = "machine"
"""What is asked for instead of a configuration, to have the machine benchmarked."""

_DEADLINE_S = 300.0


class Ranks:
    """The processes; one that fails is no more use, nor is the other.

    Args:
        shape: of the model, arguments of ``gpt_model.Shape``.
        max_s: seconds of timed steps of a measurement.
    """

    def __init__(self, shape: dict[str, Any], max_s: float) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, port, theirs, shape, max_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.num_measured = 0

    def measure(self, config: dict[str, Any], *, is_first: bool) -> dict[str, float]:
        """Return the metrics of rank 0.

        Args:
            config: of DeepSpeed.
            is_first: whether peak memory (``peak_bytes``) and the times of the step's phases are measured, too.

        Raises:
            RuntimeError: a rank failed, or took too long.
        """
        self.num_measured += 1
        return self._ask((config, is_first))

    def machine(self) -> dict[str, float]:
        """Return what the machine can do, as the first trial of a search reports it.

        Raises:
            RuntimeError: a rank failed, or took too long.
        """
        return self._ask((MACHINE, True))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def _ask(self, order: tuple[Any, bool]) -> dict[str, float]:
        for pipe in self._pipes:
            pipe.send(order)
        answers = []
        for pipe in self._pipes:
            try:
                answers.append(pipe.recv() if pipe.poll(_DEADLINE_S) else "no answer in time")
            except EOFError:
                answers.append("the rank ended")
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(failed[0])
        return dict(answers[0])


def _rank(rank: int, port: int, pipe: Connection, shape: dict[str, Any], max_s: float) -> None:
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    import torch

    from dstrial.dsat.rank.cleanup import ProcessState
    from dstrial.dsat.rank.microbench import measure_machine
    from dstrial.ranks.process_group import without_compiled_collectives

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with without_compiled_collectives(is_cpu=True):
        state = ProcessState()
        while True:
            config, is_first = pipe.recv()
            engines: list[Any] = []
            try:
                if config == MACHINE:
                    pipe.send(measure_machine(torch.float32))
                else:
                    metrics = _measured(config, shape, max_s, engines, is_first=is_first)
                    began_s = time.perf_counter()
                    state.restore(engines)
                    pipe.send({**metrics, "tear_down_s": time.perf_counter() - began_s})
            except Exception as error:  # noqa: BLE001  # told to the one who asked
                pipe.send(f"{type(error).__name__}: {error}")


def _measured(
    config: dict[str, Any], shape: dict[str, Any], max_s: float, engines: list[Any], *, is_first: bool
) -> dict[str, float]:
    """Return what the meter of a measuring trial says; the engine is left in ``engines``."""
    import deepspeed
    import gpt_model
    import torch
    from dsat_memory_real import FreesElsewhere, highest
    from torch.profiler import ProfilerActivity, profile

    from dstrial.dsat.rank.statistics import SamplingLimits
    from dstrial.dsat.rank.step_timer import Mode, StepTimer
    from dstrial.engine.engine_hooks import observe_engines

    def build() -> None:
        torch.manual_seed(0)
        model = gpt_model.model(**shape)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=json.loads(json.dumps(config))
        )
        engines.append(engine)

    def step() -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engines[0].backward(engines[0](*batch))
            engines[0].step()

    began_s = time.perf_counter()
    batch = gpt_model.batch(config["train_micro_batch_size_per_gpu"], **shape)
    metrics: dict[str, float] = {}
    if is_first:
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            FreesElsewhere() as elsewhere,
        ):
            build()
            step()
            step()
        metrics["peak_bytes"] = highest(profiler, elsewhere.changes)
    else:
        build()
    built_s = time.perf_counter()
    timer = StepTimer(SamplingLimits(max_s=max_s))
    wanted = (Mode.PROFILE, Mode.WINDOW, Mode.PHASES) if is_first else (Mode.PROFILE, Mode.WINDOW)
    with observe_engines(timer):
        while timer.mode in wanted:
            step()
    metrics |= dict(timer.result().metrics)
    timer.forget_engines()
    measured_s = time.perf_counter()
    return {**metrics, "build_s": built_s - began_s, "measure_s": measured_s - built_s}
