"""``dstrial run --slurm``: its flags, and whether it can train in an allocation."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping

from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.slurm.allocation import Allocation, allocation_of


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Slurm",
        "Submit the run as a batch job and follow it; in an allocation (salloc, sbatch) train on its nodes.",
    )
    group.add_argument("--slurm", action="store_true", help="train under Slurm, a task for each slot")
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more option of sbatch, --sbatch-arg=--partition=gpu for example; repeatable, behind slurm.sbatch_args",
    )
    group.add_argument("--print-sbatch", action="store_true", help="show the batch script and submit nothing")
    group.add_argument("--detach", action="store_true", help="submit the job and do not follow it")


def require_slurm_flags(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    problems = []
    for flag, value in (
        ("--sbatch-arg", args.sbatch_arg),
        ("--print-sbatch", args.print_sbatch),
        ("--detach", args.detach),
    ):
        if value and not args.slurm:
            problems.append(ConfigProblem(flag, "given without --slurm", "both or none", "Add --slurm."))
    if args.slurm and args.hostfile is not None:
        problems.append(
            ConfigProblem(
                "--hostfile",
                "given with --slurm",
                "one of the two",
                "Leave --hostfile out: Slurm names the nodes.",
            )
        )
    for flag, value in (("--include", args.include), ("--exclude", args.exclude)):
        if args.slurm and value:
            fix = "Use --sbatch-arg=--nodelist=NODES or --sbatch-arg=--exclude=NODES."
            problems.append(ConfigProblem(flag, "given with --slurm", "options of sbatch", fix))
    if problems:
        raise ConfigError(problems)


def own_allocation(args: argparse.Namespace) -> Allocation | None:
    """Return the allocation to train in; None to submit a job or without ``--slurm``."""
    if not args.slurm or args.print_sbatch:
        return None
    return allocation_of(os.environ)


def unused_nodes_hint(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a hint for a user who trains on one node of a job of several."""
    with contextlib.suppress(LaunchError):
        allocation = allocation_of(environ)
        if allocation is not None and len(allocation.nodes) > 1:
            return (
                f"job {allocation.job_id} has {len(allocation.nodes)} nodes, and this trains on one of them alone; "
                "--slurm trains on all"
            )
    return None
