"""Client of the bridge to Ray; starts and restarts the bridge on demand."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dstrial.errors import MissingExtraError, install_command

_CONNECT_S = 60.0  # timeout of the bridge's connection to Ray
_ANSWER_S = 20.0  # timeout of a request
_CLOSE_S = 5.0  # grace period of the bridge after the end of its input
_POLL_S = 0.05  # interval of checks whether the bridge is connected


class RayRefusedError(Exception):
    """Raised if Ray rejects the values of a request; the message is Ray's."""


def require_ray(where: str) -> None:
    """Raise MissingExtraError if Ray is not installed.

    The message begins with ``where``, the option or feature that needs Ray.
    """
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:
        raise MissingExtraError(
            f"{where} needs Ray, which is not installed; expected the extra 'ray' of dstrial. Run: {install_command('ray')}"
        )


class BridgeClient:
    """Client of the bridge to Ray; only the attribute ``socket`` is thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._directory = Path(tempfile.mkdtemp(prefix="dstrial-ray-"))
        # Path of the bridge's socket, for requests and relays; a restarted bridge listens at the same path.
        self.socket = self._directory / "socket"
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Call a method of ``Bridge`` and return its result.

        ``what`` is the method: ``poll``, ``reserve`` or ``remove``. ``values`` are the fields of the method's argument
        ``request``. The bridge is started if it does not run.

        Raises:
            RayRefusedError: Ray rejects the values.
            ConnectionError: the bridge cannot be started, Ray does not answer, or Ray answers with another error.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        line = b""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ANSWER_S)
                connection.connect(str(self.socket))
                connection.sendall(json.dumps({"do": what, **values}).encode() + b"\n")
                line = connection.makefile("rb").readline()
        except TimeoutError:
            raise ConnectionError(f"Ray at {self._address} has not answered for {_ANSWER_S:g} s") from None
        except OSError:  # the bridge has ended
            pass
        if not line:
            raise ConnectionError(f"the connection to Ray at {self._address} has ended: {self._last_line()}")
        answer = json.loads(line)
        if "error" not in answer:
            found: dict[str, Any] = answer["answer"]
            return found
        text = " ".join(str(answer["error"]).split())
        if text.startswith("ValueError: "):
            raise RayRefusedError(text.removeprefix("ValueError: "))
        raise ConnectionError(f"Ray at {self._address}: {text}")

    def close(self) -> None:
        """End the bridge's process; Ray's placement groups and their programs remain."""
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._end()
        self._directory.mkdir(mode=0o700, exist_ok=True)  # an ended bridge has deleted it
        self.socket.unlink(missing_ok=True)
        words = ["-m", "dstrial.ray.bridge", f"--address={self._address}", f"--socket={self.socket}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd="/",  # where no modules shadow others
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches the master only
            )
        give_up_at_s = time.monotonic() + _CONNECT_S
        while not self.socket.exists():
            if self._process.poll() is not None:
                raise ConnectionError(f"Ray at {self._address}: {self._last_line()}")
            if time.monotonic() > give_up_at_s:
                self._process.kill()
                raise ConnectionError(f"Ray at {self._address} has not answered for {_CONNECT_S:g} s")
            time.sleep(_POLL_S)

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    def _last_line(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        return "nothing was printed"

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
