"""Log without training: troubled.py WORK full|odd|plain SECONDS LOGGER=JSON..."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from pathlib import Path

from dstrial.loggers.logger import LoggedRun
from dstrial.loggers.run_loggers import MAKERS, RunLoggers

ODD = {
    "loss": math.nan,
    "up": math.inf,
    "down": -math.inf,
    "a☃[0]": 1.0,
    "../up": 3.0,
    "": 4.0,
    "long" * 100: 5.0,
    "x.y": 6.0,
    "text": "no number",
}


def main() -> None:
    work, what, seconds, *given = sys.argv[1:]
    disk = Path(work) / "disk"
    disk.mkdir(exist_ok=True)
    if what == "full":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(disk)], check=True)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    run = LoggedRun(
        "0123456789abcdef", "run", "group", "project", {"lr": 0.1}, {"name": "x"}, disk / "run", disk
    )
    names = dict(entry.split("=", 1) for entry in given)
    made = [(name, MAKERS[name](json.loads(options))) for name, options in names.items()]
    with RunLoggers(made, begin_s=float(seconds), end_s=float(seconds)) as loggers:
        loggers.begin(run)
        loggers.report("training", 1, {"loss": 0.5})
        if what == "full":
            time.sleep(3)  # let the loggers write before the disk is full
            fill(disk / "filler")
            time.sleep(1)
            fill(disk / "rest")
            for batch in range(2, 3000):
                loggers.report("training", batch, {"loss": 0.5, "accuracy": 1 / batch})
                if batch % 100 == 0:
                    time.sleep(0.1)
        elif what == "odd":
            loggers.report("validation", 2, ODD)
        loggers.report("training", 3000, {"loss": 0.25})
    print("training went on", flush=True)
    if what == "full":
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Fill the disk to the last byte."""
    try:
        with path.open("wb", buffering=0) as file:
            for size in (65536, 512, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue
    except OSError:
        return


if __name__ == "__main__":
    main()
