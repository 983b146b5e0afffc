"""The chief's telemetry report from all ranks' samples, and the totals of the run.

Runs behind the loop. If a report cannot be written, it is lost with one warning and training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.telemetry.matmul_peak import cache_path
from dstrial.telemetry.samples import Peak, RankSample, RunTotals, report_metrics

logger = logging.getLogger("dstrial.telemetry")

_KEEP_PERIOD_S = 5.0  # totals are a file, which takes longer to write than a report


class TelemetryReports:
    """Records samples, and keeps their totals. Ranks: the chief."""

    def __init__(
        self,
        record: Callable[[int, dict[str, Any]], None],
        keep: Callable[[Mapping[str, Any]], None],
        peak: Peak | None,
    ) -> None:
        self._record = record
        self._keep = keep
        self._peak = peak
        self._totals = RunTotals()
        self._has_failed = False
        self._kept_s = -_KEEP_PERIOD_S

    def write(
        self, samples: Sequence[RankSample], batches_trained: int, num_records: int, num_skipped: int
    ) -> None:
        """Write one report; never raises.

        ``num_records`` is of all replicas in the samples' batches, ``num_skipped`` of all steps of the run.
        """
        try:
            self._totals.add(samples, num_records)
            self._record(batches_trained, report_metrics(samples, num_records, num_skipped, self._peak))
            if time.monotonic() - self._kept_s >= _KEEP_PERIOD_S:
                self._keep_totals()
        except Exception as error:  # noqa: BLE001  # instruments never end a training
            self._warn(error)

    def keep(self) -> None:
        """Keep the totals of now; never raises."""
        try:
            self._keep_totals()
        except Exception as error:  # noqa: BLE001  # likewise
            self._warn(error)

    def finish(self, measure: Callable[[], Peak | None]) -> None:
        """Measure the peak if FLOPs are known and none is cached, or this run beats it."""
        if not self._totals.knows_flops:
            return
        is_beaten = self._totals.to_json(self._peak).get("hfu", 0.0) > 1.0
        if self._peak is None or is_beaten:
            self._peak = measure() or self._peak

    def _keep_totals(self) -> None:
        self._kept_s = time.monotonic()
        totals = self._totals.to_json(self._peak)
        if self._peak is not None:
            totals["peak"]["file"] = str(cache_path())
        self._keep(totals)

    def _warn(self, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(
                "what the run tells of itself could not be written (%s: %s); training goes on",
                type(error).__name__,
                error,
            )
        self._has_failed = True
