"""Which variables of the user's environment travel to other hosts."""

from __future__ import annotations

from collections.abc import Mapping

# What belongs to a machine, a login or a terminal, and what tells another job's processes who they are.
STAYING_NAMES = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP",
        "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "STY", "TMUX", "TMUX_PANE", "TERM_SESSION_ID",
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
        "RANK", "WORLD_SIZE", "NODE_RANK", "DSTRIAL_SECRET", "DSTRIAL_STORE", "DSTRIAL_HEARTBEAT", "DSTRIAL_LAUNCHED",
    }
)  # fmt: skip
"""Variables that stay, by name."""
STAYING_PREFIXES = (
    "SSH_", "XDG_", "DBUS_", "LOCAL_", "GROUP_", "ROLE_", "CROSS_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_",
    "OMPI_", "PALS_",
)  # fmt: skip
"""Variables that stay, by how they begin."""
# What Slurm says of the step that starts a program there: one task, which libraries would take for the only rank.
_OF_A_STEP = (
    "SLURM_STEP_", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_NNODES", "SLURM_STEPMGR", "PMI_", "PMIX_",
)  # fmt: skip


def travelling(environ: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program on another host.

    All of ``environ`` travels but what is listed above, values with line ends included; ``there``, a login's environment, has
    the rest.
    """
    ours = {name: value for name, value in environ.items() if not stays(name)}
    theirs = {name: value for name, value in there.items() if not name.startswith(("SSH_", *_OF_A_STEP))}
    return {**theirs, **ours}


def stays(name: str) -> bool:
    """Return whether a variable belongs to this machine."""
    return name in STAYING_NAMES or name.startswith(STAYING_PREFIXES)
