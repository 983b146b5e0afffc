"""Keep ``train_batch_size`` of a resumed run in its DeepSpeed configs and engines."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from dstrial.config.batch import BATCH_KEYS, BatchSolution
from dstrial.config.deepspeed_source import MAIN_KEY, other_configs
from dstrial.config.merge import merge_deepspeed, overwrite_deepspeed_config
from dstrial.config.parallel_dims import config_sizes
from dstrial.engine.adapters.batch_sizes import set_batch_sizes
from dstrial.engine.deepspeed_internals import engines
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.batch import describe_batch, engine_of, keep_batch, own_solution
from dstrial.resume.metadata import EngineRecord, SavedRun, given_settings, given_sizes

logger = logging.getLogger("dstrial.trial")

OVERWRITE_KEY = "overwrite_deepspeed_args"


class ResumedRun:
    """Keeps ``train_batch_size`` when a run resumes with another number of replicas.

    DeepSpeed checks the batch equation when the trial creates an engine, so the batch sizes are solved before. The trial gets
    the sizes in the hyperparameter ``overwrite_deepspeed_args``, which the trial merges into its DeepSpeed config.
    ``fit_engine`` corrects an engine that was created with other sizes.
    """

    def __init__(self, saved: SavedRun, world_size: int, data_config: Mapping[str, Any]) -> None:
        self.saved = saved
        self._world_size = world_size
        self._section = data_config.get("dstrial")
        # Solved sizes -> list of given sizes that they replace, because several configs may resolve to the same sizes.
        self._given: dict[tuple[int | None, int | None, int | None], list[dict[str, Any]]] = {}

    def hyperparameters(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``hparams`` that keeps the checkpoint's ``train_batch_size``.

        Only DeepSpeed configs and their overwrites are changed. A config that cannot be read, or that belongs to no engine of
        the checkpoint, is not changed.

        Raises:
            ConfigError: a config sets another batch size than the checkpoint's, or the replicas cannot share a batch evenly.
        """
        result = copy.deepcopy(dict(hparams))
        overwrite = hparams.get(OVERWRITE_KEY) or {}
        merged = _read(hparams.get(MAIN_KEY), overwrite)
        if merged is not None:
            solution = self._solve(merged, is_main=True)
            if solution is not None and not _resolves_to(merged, solution):
                result[OVERWRITE_KEY] = {**copy.deepcopy(dict(overwrite)), **self._sizes(merged, solution)}
        for key in other_configs(hparams):
            merged = _read(hparams[key], {})
            solution = None if merged is None else self._solve(merged, is_main=False)
            if merged is not None and solution is not None and not _resolves_to(merged, solution):
                is_mapping = isinstance(hparams[key], Mapping)
                if is_mapping or own_solution(given_sizes(merged), solution.data_parallel_size) is None:
                    result[key] = merge_deepspeed(merged, self._sizes(merged, solution))
        return result

    def resolve(self, merged: Mapping[str, Any], data_parallel_size: int) -> dict[str, Any] | None:
        """Return ``merged`` with batch sizes that keep the checkpoint's batch size.

        ``merged`` is a DeepSpeed config in which overwrites are applied; it may contain sizes of an earlier solution. Return
        None if the config belongs to no engine of the checkpoint.
        """
        main = self.saved.engines[0] if self.saved.engines else None
        engine = engine_of(self._as_given(merged, main), self.saved, is_main=True)
        if engine is None:
            return None
        solution = self._keep(self._as_given(merged, engine), engine, data_parallel_size)
        return {**merged, **self._sizes(merged, solution)}

    def fit_engine(self, engine: DeepSpeedEngine, engine_idx: int, *, is_chief: bool) -> dict[str, Any]:
        """Set a new engine's batch sizes so that ``train_batch_size`` is the checkpoint's.

        Args:
            engine: the engine that DeepSpeed has just created.
            engine_idx: index of the engine in the order of wrapping. If the checkpoint has no such engine, nothing is set.
            is_chief: whether this rank logs changed batch sizes.

        Returns:
            The settings that the user gave in the engine's config, as in ``EngineRecord.given``.

        Raises:
            ConfigError: the config sets another batch size than the checkpoint's, or DeepSpeed cannot change the sizes.

        Ranks: all, without communication.
        """
        config = engines.config_of(engine)
        if engine_idx >= len(self.saved.engines):
            return self._as_given(given_settings(config), None)
        saved = self.saved.engines[engine_idx]
        given = self._as_given(given_settings(config), saved)
        now = (int(engine.train_micro_batch_size_per_gpu()), int(engine.gradient_accumulation_steps()))
        replicas = int(engine.train_batch_size()) // (now[0] * now[1])
        name = f"DeepSpeed config of engine {engine_idx}"
        solution = self._keep(given, saved, replicas, where={key: f"{name}: {key}" for key in BATCH_KEYS})
        wanted = (solution.train_micro_batch_size_per_gpu, solution.gradient_accumulation_steps)
        if wanted != now:
            set_batch_sizes(engine, micro_batch_size=wanted[0], micro_batches_per_batch=wanted[1], name=name)
        before = (
            saved.micro_batch_size,
            saved.micro_batches_per_batch,
            saved.batch_replicas(saved.world_size),
        )
        if is_chief and (*wanted, replicas) != before:
            logger.info(
                "the batch of engine %d stays as it was: %s", engine_idx, describe_batch(saved, solution)
            )
        return given

    def explain(self, error: AssertionError, num_wrapped: int) -> ConfigError | None:
        """Return an error that explains why DeepSpeed rejected an engine's batch sizes.

        None if ``error`` is not about batch sizes. ``num_wrapped`` is the number of engines that the trial has already wrapped.
        """
        text = str(error)
        if not any(word in text for word in ("batch related parameters", "Gradient accumulation steps: 0",
                                             "Micro batch size per gpu: 0")):  # fmt: skip
            return None
        saved = self.saved.engines[min(num_wrapped, len(self.saved.engines) - 1)]
        problem = ConfigProblem(
            f"DeepSpeed config of engine {num_wrapped}",
            f"one whose batch sizes do not fit {self._world_size} ranks ({text})",
            f"sizes that keep train_batch_size {saved.train_batch_size} of checkpoint {self.saved.checkpoint}",
            "Take the config from context.get_deepspeed_config(), or merge hyperparameters.overwrite_deepspeed_args into it, "
            "where the sizes stand; with pipeline stages or model parallelism name them in data.dstrial.",
        )
        return ConfigError([problem])

    def _solve(self, merged: Mapping[str, Any], *, is_main: bool) -> BatchSolution | None:
        engine = engine_of(merged, self.saved, is_main=is_main)
        if engine is None:
            return None
        replica = engine.replica_with(self._section, merged)
        if self._world_size % replica.ranks_per_replica:
            return None
        return self._keep(merged, engine, engine.batch_replicas(self._world_size, replica))

    def _keep(
        self,
        config: Mapping[str, Any],
        engine: EngineRecord,
        replicas: int,
        where: Mapping[str, str] | None = None,
    ) -> BatchSolution:
        return keep_batch(
            config,
            engine,
            replicas,
            checkpoint=self.saved.checkpoint,
            where=where,
            ranks_per_replica=max(self._world_size // replicas, 1),
        )

    def _sizes(self, merged: Mapping[str, Any], solution: BatchSolution) -> dict[str, int]:
        """Return the batch sizes of ``solution`` by config key; record what they replace."""
        # The sizes of ``merged``, which these replace, are recorded for ``_as_given``.
        sizes = {key: int(getattr(solution, key)) for key in BATCH_KEYS}
        if merged.get(BATCH_KEYS[0]) is None and config_sizes(merged).get("model_parallel_size", 1) > 1:
            del sizes[BATCH_KEYS[0]]  # omitted with AutoTP, see ``get_deepspeed_config``
        given = {key: value for key, value in given_settings(merged).items() if key in BATCH_KEYS}
        known = self._given.setdefault(given_sizes(sizes), [])
        known += [one for one in self._given.get(given_sizes(given), [given]) if one not in known]
        return sizes

    def _as_given(self, config: Mapping[str, Any], engine: EngineRecord | None) -> dict[str, Any]:
        """Return ``config`` with the user's batch sizes in place of solved sizes.

        If several configs have the same solved sizes, the user's sizes that ``engine`` had at the run's start are preferred.
        """
        originals = self._given.get(given_sizes(config))
        if not originals:
            return dict(config)
        wanted = None if engine is None else given_sizes(engine.given)
        original = next((one for one in originals if given_sizes(one) == wanted), originals[0])
        return {key: value for key, value in config.items() if key not in BATCH_KEYS} | original


def _read(source: Any, overwrite: Any) -> dict[str, Any] | None:
    """Return a config (dict or path) in which ``overwrite`` is merged; None on errors."""
    # The trial will read the config too, and raise the error.
    if not isinstance(source, (str, Mapping)) or not isinstance(overwrite, Mapping):
        return None
    if isinstance(source, str) and not Path(source).is_file():
        return None
    try:
        base = source if isinstance(source, str) else dict(source)
        return overwrite_deepspeed_config(base, dict(overwrite))
    except ConfigError:
        return None


def _resolves_to(config: Mapping[str, Any], solution: BatchSolution) -> bool:
    """Return whether DeepSpeed would compute exactly these batch sizes from a config."""
    own = own_solution(given_sizes(config), solution.data_parallel_size)
    return own is not None and all(getattr(own, key) == getattr(solution, key) for key in BATCH_KEYS)
