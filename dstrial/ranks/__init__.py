"""Identify this process's rank; set up rendezvous and communication between ranks.

Names are resolved lazily: ``identify`` and ``StopSignals`` do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.ranks.control_channel import ControlChannel, timeout_from_environ
    from dstrial.ranks.identity import RankIdentity, identify
    from dstrial.ranks.process_group import (
        device,
        has_accelerator,
        init_process_group,
        prepare_accelerator,
        shutdown,
    )
    from dstrial.ranks.stop_signals import StopSignals

_HOME = {
    "ControlChannel": "control_channel",
    "timeout_from_environ": "control_channel",
    "RankIdentity": "identity",
    "identify": "identity",
    "device": "process_group",
    "has_accelerator": "process_group",
    "init_process_group": "process_group",
    "prepare_accelerator": "process_group",
    "shutdown": "process_group",
    "StopSignals": "stop_signals",
}

__all__ = [
    "ControlChannel",
    "RankIdentity",
    "StopSignals",
    "device",
    "has_accelerator",
    "identify",
    "init_process_group",
    "prepare_accelerator",
    "shutdown",
    "timeout_from_environ",
]

__getattr__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
