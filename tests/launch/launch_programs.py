"""Programs for launched ranks, by function name; only some import torch."""

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])


def meet() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()


def wait_for_peers() -> None:
    import torch.distributed

    torch.distributed.barrier()


def exchange() -> None:
    import torch
    import torch.distributed

    meet()
    total = torch.tensor([RANK + 1])
    torch.distributed.all_reduce(total)
    print(f"rank {RANK} total {int(total)} threads {os.environ.get('OMP_NUM_THREADS')}")
    torch.distributed.destroy_process_group()


def raise_on_rank_1() -> None:
    meet()
    if RANK == 1:
        raise ValueError("the second rank is broken")
    wait_for_peers()


def kill_rank_1() -> None:
    meet()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_peers()


def exit_with_7_on_rank_1() -> None:
    if RANK == 1:
        print("about to give up", file=sys.stderr)
        sys.exit(7)


def leave_on_rank_1() -> None:
    meet()
    if RANK == 1:
        os._exit(0)
    wait_for_peers()


def raise_on_rank_0_while_rank_1_hangs() -> None:
    if RANK == 0:
        raise RuntimeError("nobody listens")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def stop_when_asked() -> None:
    from dstrial.ranks.stop_signals import StopSignals

    helper = os.fork()
    if helper == 0:
        time.sleep(600)
        os._exit(0)
    with StopSignals() as stop:
        Path(f"ready.{RANK}").touch()
        while stop.requested is None:
            time.sleep(0.02)
    is_helper_alive = os.waitpid(helper, os.WNOHANG) == (0, 0)
    Path(f"stopped.{RANK}").write_text(f"{stop.requested} {is_helper_alive} {helper}")


def stop_before_rank_0() -> None:
    """End rank 1 on SIGTERM without cleanup; rank 0 then fails in a collective."""
    from dstrial.ranks.stop_signals import StopSignals

    meet()
    with StopSignals(is_deferred=RANK == 1) as stop:
        Path(f"ready.{RANK}").touch()
        while stop.requested is None:
            time.sleep(0.02)
        wait_for_peers()


def never_stop() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ready.{RANK}").write_text(str(os.getpid()))
    time.sleep(600)


def show_arguments() -> None:
    print(sys.argv[2:], os.environ["MARK"], flush=True)
    print(f"\rprogress 1\rprogress 2\nrank {RANK}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
