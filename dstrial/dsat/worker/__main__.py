"""What ``dstrial.launch`` starts on every slot of a worker.

``python -m dstrial.dsat.worker --trial model_def:MyTrial``.

Off a cluster it is told where its files are. Not meant to be typed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from dstrial.dsat.worker.loop import IDLE_S, run_worker
from dstrial.dsat.worker.ranks import RankPool
from dstrial.dsat.worker.rpc import accept_supervisors, connect, listen
from dstrial.dsat.worker.supervisor import supervise
from dstrial.dsat.worker.transport import ExperimentTransport, FileTransport, Transport
from dstrial.ranks.identity import identify


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise this slot's rank, and on rank 0 run the tasks. Ranks: all."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.worker")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    parser.add_argument("--mailbox", type=Path)
    parser.add_argument("--idle", type=float, default=IDLE_S)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    identity = identify(os.environ)
    words = ["--trial", options.trial, "--context-dir", str(options.context_dir)]
    if options.config is not None:
        words += ["--config", str(options.config)]
    if not identity.is_chief:
        supervise(connect(identity), words)
        return 0
    server = listen(identity)
    own = threading.Thread(
        target=lambda: supervise(connect(identity), words), name="dsat-supervisor", daemon=True
    )
    own.start()
    ranks = RankPool(accept_supervisors(server, identity), identity.master_addr)
    try:
        with _transport(options.mailbox) as transport:
            reason = run_worker(transport, ranks, idle_s=options.idle)
    finally:
        ranks.end()
        own.join(30.0)
    sys.stderr.write(f"dsat: the worker ends: {reason}\n")
    return 0


@contextlib.contextmanager
def _transport(directory: Path | None) -> Iterator[Transport]:
    if directory is not None:
        yield FileTransport(directory)
        return
    import determined as det
    from determined import core

    info = det.get_cluster_info()
    assert info is not None, "a worker without --mailbox runs on a cluster"
    # Of all supervisors only this one talks to the master.
    with core.init(distributed=core.DummyDistributedContext()) as context:
        yield ExperimentTransport(
            context, info.trial.experiment_id, info.trial.trial_id, info.trial._trial_run_id
        )


if __name__ == "__main__":
    sys.exit(main())
