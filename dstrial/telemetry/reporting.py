"""What the chief makes of all ranks' samples.

That is a report of the run's instruments, and the totals for its summary. Called behind the loop where it writes. A telemetry
report that cannot be written is lost, with one warning; training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.telemetry.matmul_peak import cache_path, load_now
from dstrial.telemetry.samples import Peak, RankSample, RunTotals, report_metrics

logger = logging.getLogger("dstrial.telemetry")

_KEEP_PERIOD_S = 5.0
"""How often the totals are kept, seconds: they are a file, and take longer than a report."""


class TelemetryReports:
    """Reports samples, and keeps their totals. Ranks: the chief.

    Args:
        record: given finished batches and metrics, puts them on the run's record and wherever else they go.
        keep: keeps the totals, plain values, for the summary.
        peak: of a device; None if it was never measured.
    """

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
        """Write one report. Ends nothing, whatever happens.

        Args:
            samples: index = rank.
            batches_trained: finished batches of the run.
            num_records: of all replicas, in the batches of the samples.
            num_skipped: optimizer steps of the run that were skipped.
        """
        try:
            self._totals.add(samples, num_records)
            self._record(batches_trained, report_metrics(samples, num_records, num_skipped, self._peak))
            if time.monotonic() - self._kept_s >= _KEEP_PERIOD_S:
                self._keep_totals()
        except Exception as error:  # noqa: BLE001  # instruments never end a training
            self._warn(error)

    def keep(self) -> None:
        """Keep the totals of now. Ends nothing, whatever happens."""
        try:
            self._keep_totals()
        except Exception as error:  # noqa: BLE001  # likewise
            self._warn(error)

    def finish(self, measure: Callable[[], Peak | None], load: Callable[[], float] = load_now) -> None:
        """Measure the device's peak where the run knows its FLOPs and needs it.

        It does where no run on this machine has measured it, where that was done while the machine was busier than now, and too
        busy to be trusted, and where this run was faster, which shows the same.

        Args:
            measure: returns the peak; None if that fails.
            load: returns how many processes want a processor now, by processor.
        """
        if not self._totals.knows_flops:
            return
        is_beaten = self._totals.to_json(self._peak).get("hfu", 0.0) > 1.0
        if self._peak is None or is_beaten or self._peak.is_worth_measuring_again(load()):
            self._peak = measure() or self._peak

    def _keep_totals(self) -> None:
        self._kept_s = time.monotonic()
        totals = self._totals.to_json(self._peak)
        if self._peak is not None:
            totals["peak"] |= {"file": str(cache_path()), "is_doubtful": self._peak.is_doubtful}
        self._keep(totals)

    def _warn(self, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(
                "what the run tells of itself could not be written (%s: %s); training goes on",
                type(error).__name__,
                error,
            )
        self._has_failed = True
