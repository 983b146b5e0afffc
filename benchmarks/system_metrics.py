"""What the collecting of system metrics costs a rank: processor seconds of a minute, and of one sample.

python benchmarks/system_metrics.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Mapping
from typing import Any

from determined import core

from dstrial.local.profiler import NodeProfiler, SystemSampler

_SAMPLES = 2000


class _Nowhere:
    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    sampler = SystemSampler([])
    began_s = time.thread_time()
    for _ in range(_SAMPLES):
        sampler.sample()
    print(f"a sample: {1e3 * (time.thread_time() - began_s) / _SAMPLES:.3f} ms")
    spent = {}
    for is_on in (False, True):
        profiler = NodeProfiler("node", core.DummyDistributedContext(), _Nowhere())
        began_s = time.process_time()
        if is_on:
            profiler.on()
        time.sleep(seconds)
        profiler.off()
        spent[is_on] = (time.process_time() - began_s) * 60 / seconds
    print(f"a minute: {spent[True] - spent[False]:.3f} s of one processor")


if __name__ == "__main__":
    main()
