"""Run a Core API script as a rank of a trial on this machine, without a master.

The command is ``python -m dstrial.dsat.rank.standalone_script SCRIPT ARGS...``; searches run it, users do not. In the
script, Determined's API returns the search's experiment config, and reports go to a run directory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import determined as det
from determined import core

from dstrial.local import core_context as local_context
from dstrial.local.run_directory import RunDirectory, RunState, default_runs_dir
from dstrial.local.script_variables import STAND_IN_CLUSTER, KnownExperiment, read_experiment
from dstrial.ranks.identity import RankIdentity, identify
from dstrial.ranks.stop_signals import StopSignals

_NO_MASTER = "http://localhost:1"  # Determined's API needs a URL, but nothing connects to it


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script, or ``-m MODULE``, as a rank of a local trial.

    In the script, ``det.get_cluster_info()`` returns the experiment's hyperparameters and config. ``core.init()`` returns a core
    context that writes to a run directory; it has a searcher if the experiment has a ``searcher.max_length``. The functions of
    dstrial still treat the process as a rank outside a cluster.

    Ranks: all; ``core.init()`` in the script is collective (one broadcast).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, identity = read_experiment(), identify(os.environ)
    assert known is not None, "the launcher was given --config"
    runs: list[RunDirectory] = []
    failure: str | None = None
    with contextlib.ExitStack() as stack:
        init = functools.partial(_init, stack, known, runs)
        stack.enter_context(mock.patch.object(det._info, "_info", _stand_in_info(known, identity)))
        stack.enter_context(mock.patch.object(core, "init", init))
        # Determined's launchers set the address of rank 0; ranks of this machine are all on it.
        stack.enter_context(mock.patch.dict(os.environ, {"DET_CHIEF_IP": identity.master_addr}))
        try:
            run_script(words, Path.cwd())
        except SystemExit as exit_:
            failure = None if exit_.code in (0, None) else f"SystemExit: {exit_.code}"
            raise
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            for run in runs:
                run.end_attempt(RunState.COMPLETED if failure is None else RunState.FAILED, failure)


def _init(
    stack: contextlib.ExitStack,
    known: KnownExperiment,
    runs: list[RunDirectory],
    *,
    distributed: core.DistributedContext | None = None,
    preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
    **_elsewhere: object,
) -> core.Context:
    # Only a core context can return stop requests; a script without one just ends.
    signals = stack.enter_context(StopSignals())
    channel = distributed or core.DummyDistributedContext()
    if channel.rank == 0:
        made = RunDirectory.create(
            default_runs_dir(),
            name=str(known.config.get("name") or Path(sys.argv[0]).stem),
            context_dir=Path.cwd(),
            command=sys.argv,
            config=known.config,
        )
        runs.append(made)
    path = channel.broadcast(str(runs[-1].path) if channel.rank == 0 else None)
    return local_context.init(
        RunDirectory.open(path),
        known.config,
        distributed=channel,
        stop_requested=lambda: signals.requested,
        preempt_mode=preempt_mode,
    )


def _stand_in_info(known: KnownExperiment, identity: RankIdentity) -> det.ClusterInfo:
    return stand_in_cluster(
        known.hyperparameters,
        known.config,
        cluster_id=STAND_IN_CLUSTER,
        seed=int((known.config.get("reproducibility") or {}).get("experiment_seed") or 0),
        num_slots=identity.local_world_size,
        num_ranks=identity.world_size,
        address=identity.master_addr,
    )


def run_script(words: Sequence[str], module_dir: Path) -> None:
    """Run a script, or ``-m MODULE`` from ``module_dir``, as the main program."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path[0] = str(module_dir)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def stand_in_cluster(
    hparams: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    cluster_id: str,
    seed: int = 0,
    num_slots: int,
    num_ranks: int,
    address: str,
) -> det.ClusterInfo:
    """Return Determined's cluster info for a rank of a trial without a master."""
    trial = det.TrialInfo(
        trial_id=0,
        experiment_id=0,
        trial_seed=seed,
        hparams=copy.deepcopy(dict(hparams)),
        config=copy.deepcopy(dict(config)),
        steps_completed=0,
        trial_run_id=0,
        debug=False,
        inter_node_network_interface=None,
    )
    return det.ClusterInfo(
        master_url=_NO_MASTER,
        cluster_id=cluster_id,
        agent_id="this machine",
        slot_ids=list(range(num_slots)),
        task_id="0",
        allocation_id="0",
        session_token="",
        task_type="TRIAL",
        trial_info=trial,
        rendezvous_info=det.RendezvousInfo([address], 0, [num_ranks]),
    )


if __name__ == "__main__":
    main()
