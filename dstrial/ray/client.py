"""Client of the bridge, which is started at the first request, and restarted."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from dstrial.errors import MissingExtraError, install_command

_CONNECT_S = 60.0
_ANSWER_S = 20.0
_CLOSE_S = 5.0
_KEPT_LINES = 20


class RayRefusedError(Exception):
    """Ray does not accept a request's values."""


def require_ray(where: str) -> None:
    """Refuse an environment without Ray, and import nothing."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:
        raise MissingExtraError(
            f"{where} needs Ray, which is not installed; expected the extra 'ray' of dstrial. Run: {install_command('ray')}"
        )


class BridgeClient:
    """The bridge's other end; one thread asks, any thread may read ``socket``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._directory = Path(tempfile.mkdtemp(prefix="dstrial-ray-"))
        self.socket = self._directory / "relays"
        """Where relays connect; the same for the next bridge."""
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            RayRefusedError: Ray does not accept the values.
            ConnectionError: Ray does not answer, or with an error.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._number += 1
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps({"do": what, "number": self._number, **values}) + "\n")
            self._process.stdin.flush()
        return self._answer(self._number, _ANSWER_S)

    def close(self) -> None:
        """End the bridge; reservations and programs stay."""
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._end()
        self._directory.mkdir(mode=0o700, exist_ok=True)  # the bridge takes it along at its end
        self._number = 0
        self._answers = queue.SimpleQueue()
        words = ["-m", "dstrial.ray.bridge", f"--address={self._address}", f"--socket={self.socket}"]
        self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd="/",  # whose modules hide nothing
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is the master's
        )
        for run in (self._read, self._read_errors):
            threading.Thread(target=run, args=(self._process,), name="dstrial-ray", daemon=True).start()
        self._answer(0, _CONNECT_S)

    def _answer(self, number: int, timeout_s: float) -> dict[str, Any]:
        give_up_at_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answers.get(timeout=max(give_up_at_s - time.monotonic(), 0))
            except queue.Empty:
                raise ConnectionError(
                    f"Ray at {self._address} has not answered for {timeout_s:g} s"
                ) from None
            if answer is None:
                self._answers.put(None)
                said = " ".join(self._said[-1].split()) if self._said else "nothing was printed"
                raise ConnectionError(f"the connection to Ray at {self._address} has ended: {said}")
            if answer["number"] != number:  # of one that was given up
                continue
            if "error" not in answer:
                found: dict[str, Any] = answer["answer"]
                return found
            text = " ".join(str(answer["error"]).split())
            if text.startswith("ValueError: "):
                raise RayRefusedError(text.removeprefix("ValueError: "))
            raise ConnectionError(f"Ray at {self._address}: {text}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        answers = self._answers
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put(None)

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip():
                self._said.append(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
