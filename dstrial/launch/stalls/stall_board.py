"""What the launchers of one job tell each other of a stall.

It stands in the store through which their ranks have met.

A launcher sees its own machine only: where all of its ranks wait for another one, that one is on another machine. What stands
in the store is JSON and is shown, never followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from typing import Any

from dstrial.visible_text import visible_line

_TIMEOUT = datetime.timedelta(seconds=5)
_LOOK_S = 0.1
_KEY = "dstrial/stall"
_MOST_CHARACTERS = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAccount:
    """What the launcher of another machine says; ``text`` is empty without a stall."""

    node_rank: int
    text: str
    has_guilty: bool


class StallBoard:
    """One launcher's view of what all of them say in the first one's store.

    For one thread.
    """

    def __init__(self, addr: str, port: int, node_rank: int, num_nodes: int) -> None:
        self._addr = addr
        self._port = port
        self._node_rank = node_rank
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._store: Any = None

    def tell(self, text: str, *, has_guilty: bool) -> None:
        """Publish this machine's account; empty withdraws it."""
        said = json.dumps({"text": text, "has_guilty": has_guilty})
        with contextlib.suppress(RuntimeError):  # torch's errors of a store whose other end is gone
            self._opened().set(f"{_KEY}/{self._node_rank}", said)

    def ask(self, wait_s: float) -> list[NodeAccount] | None:
        """Return what each other launcher says; None if the store does not answer."""
        give_up_at_s = time.monotonic() + wait_s
        try:
            while True:
                found = [self._read(node) for node in self._others]
                if all(one.text for one in found) or time.monotonic() >= give_up_at_s:
                    return found
                time.sleep(_LOOK_S)
        except RuntimeError:
            return None

    def _read(self, node: int) -> NodeAccount:
        store, key = self._opened(), f"{_KEY}/{node}"
        if not store.check([key]):
            return NodeAccount(node, "", has_guilty=False)
        try:
            said = json.loads(store.get(key))
            text = visible_line(str(said["text"]))[:_MOST_CHARACTERS]
            return NodeAccount(node, text, bool(text and said["has_guilty"]))
        except (ValueError, KeyError, TypeError):  # of another release
            return NodeAccount(node, "", has_guilty=False)

    def _opened(self) -> Any:
        if self._store is None:
            import torch.distributed  # seconds, which a launcher without stalls saves

            # torch exports its stores without saying so.
            self._store = vars(torch.distributed)["TCPStore"](
                self._addr, self._port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
            )
        return self._store
