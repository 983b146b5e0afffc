"""How long an Accelerate loop trains, and what is due when, by its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

from determined import pytorch

from dstrial.config import Length
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.loop.boundaries import Boundary, Period, searcher_length, train_unit

_TEST_BATCHES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What an experiment config says about a run.

    Attributes:
        length: how long to train; None if the config does not say.
        periods: how often to report, validate and checkpoint, besides at the end; None for only then.
        checkpoint_policy: whether a validation is followed by a checkpoint: always, if it is the best so far, or never.
        metric: the searcher's validation metric; None if there is no searcher.
        smaller_is_better: which way it is compared.
        saves_in_background: whether checksums, upload and registration of a checkpoint happen behind the loop.
    """

    length: pytorch.TrainUnit | None
    periods: Mapping[Boundary, Period | None]
    checkpoint_policy: Literal["best", "all", "none"]
    metric: str | None
    smaller_is_better: bool
    saves_in_background: bool

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        global_batch_size: int,
        length: pytorch.TrainUnit | None,
        is_test: bool,
    ) -> Plan:
        """Read a plan from an experiment config.

        Args:
            config: the whole config, or nothing: then training metrics are reported every 100 batches.
            global_batch_size: records of one optimizer step, for lengths counted in records.
            length: what the caller said itself, which wins.
            is_test: two batches and nothing in between.

        Raises:
            ConfigError: a length in the config is none.
        """
        searcher = config.get("searcher") or {}

        def period(key: str) -> Period | None:
            value = config.get(key)
            if not value or is_test:
                return None
            found = Length.from_config(value)
            return None if found.value == 0 else Period.from_train_unit(train_unit(found, global_batch_size))

        if is_test:
            length = pytorch.Batch(_TEST_BATCHES)
        elif length is None:
            length = searcher_length(searcher, global_batch_size)
        every = 1 if is_test else int(config.get("scheduling_unit") or 100)
        policy = "none" if is_test else str(config.get("checkpoint_policy") or "best")
        metric = searcher.get("metric")
        background = dstrial_section(config).get("background_saving", True)
        return cls(
            length=length,
            periods={
                Boundary.REPORT: Period("batches", every=every),
                Boundary.VALIDATE: period("min_validation_period"),
                Boundary.CHECKPOINT: period("min_checkpoint_period"),
            },
            checkpoint_policy=cast(
                Literal["best", "all", "none"], "all" if policy == "best" and metric is None else policy
            ),
            metric=None if metric is None else str(metric),
            smaller_is_better=bool(searcher.get("smaller_is_better", True)),
            saves_in_background=background is not False,
        )

    def require_length(self) -> pytorch.TrainUnit:
        """Return how long to train.

        Raises:
            ConfigError: neither the config nor the script says so.
        """
        if self.length is None:
            problem = ConfigProblem(
                "searcher.max_length",
                "not given, and Reporter(length=...) is not either",
                "how long to train",
                "Set searcher.max_length: {batches: 1000}, or pass Reporter(accelerator, length=dstrial.Batch(1000)).",
            )
            raise ConfigError([problem])
        return self.length
