"""The master process: create its parts, serve on loopback, shut down cleanly.

``dstrial up`` starts ``python -m dstrial.master.server STATE_DIR READY_FD OPTIONS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from dstrial import __version__
from dstrial.errors import DstrialError, MasterError
from dstrial.hosts.hostfile import Host, read_hosts
from dstrial.hosts.srun import hosts_of_allocation, own_allocation, transport_of
from dstrial.master import owner_socket
from dstrial.master.daemon import DEFAULT_PORT, ENGINES, HOST, KILL_SIGNAL, MasterOptions
from dstrial.master.file_limit import raise_limit
from dstrial.master.pubsub import PubSub
from dstrial.master.state_directory import (
    STATE_DIR_VARIABLE,
    MasterRecord,
    StateDirectory,
    StateInUseError,
    process_start_time,
)
from dstrial.master.store.database import Database
from dstrial.visible_text import visible, visible_line

if TYPE_CHECKING:
    from dstrial.master.backends.devices import Slot
    from dstrial.master.http.router import Route
    from dstrial.master.proxy import ProxyMiddleware
    from dstrial.master.scheduler.scheduler import Scheduler
    from dstrial.master.services import Services
    from dstrial.master.settings import MasterSettings
    from dstrial.master.webhooks.delivery import Delivery

logger = logging.getLogger("dstrial.master")

_STREAM_END_S = 2.0  # grace period of open streams at shutdown

_STOP_TIMEOUT_S = 24 * 3600.0
"""Timeout for trials' last checkpoints at shutdown, seconds; must exceed each trial's ``preemption_timeout``."""

_DRAIN_S = 5.0  # timeout for pending webhook events at shutdown

_PRIVATE_UMASK = 0o077
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BACKLOG = 2048
_LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_LOG_INDENT = "    "  # of tracebacks, which must not look like log lines


class MasterServer(uvicorn.Server):
    """uvicorn server without signal handlers; calls ``on_ready`` when it is ready."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], owner_listener: socket.socket
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._owner_listener = owner_listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the master's own handlers first stop the trials."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        from dstrial.master.http.connection import OwnerConnection

        await super().startup(sockets)
        if self.started:
            # A separate listener distinguishes the owner's requests from requests to the TCP port.
            self.servers.append(
                await asyncio.get_running_loop().create_unix_server(  # type: ignore[call-arg]  # of Python 3.10
                    lambda: OwnerConnection(self.config, self.server_state, self.lifespan.state),
                    sock=self._owner_listener,
                    # With True, uvloop tries from Python 3.13 on to unlink the path to which the socket was bound.
                    cleanup_socket=False,
                )
            )
            self._on_ready()


def serve(
    state: StateDirectory,
    options: MasterOptions,
    *,
    on_ready: Callable[[MasterRecord], None],
    shows_log: bool = False,
) -> None:
    """Serve until a signal shuts the master down.

    SIGTERM, SIGINT and SIGHUP first stop the trials with a checkpoint. A further SIGINT, or ``KILL_SIGNAL``, kills the trials.
    ``on_ready`` is called when the master begins to serve requests, and must not send requests itself. With ``shows_log``, the
    log also goes to stderr.
    """
    from dstrial.master.backends import local
    from dstrial.master.backends.devices import find_slots
    from dstrial.master.services import open_services
    from dstrial.master.settings import MasterSettings

    settings = MasterSettings.load(None if options.config_file is None else Path(options.config_file))
    settings = with_options(settings, options)
    with contextlib.ExitStack() as stack:
        # Trials use the user's umask, as their files may be meant for other accounts.
        local.trial_umask = os.umask(_PRIVATE_UMASK)
        stack.enter_context(state.lock())
        state.restrict_to_owner()
        listener = stack.enter_context(_listen(DEFAULT_PORT if options.port is None else options.port))
        port = int(listener.getsockname()[1])
        owner_listener, socket_path = stack.enter_context(owner_socket.listening(state))
        _configure_log(state, settings.log_level, shows_log=shows_log)
        num_connections = raise_limit()
        hosts = hosts_of(options, settings)
        slots = () if hosts or settings.backend in ENGINES else tuple(find_slots(options.num_slots))
        pubsub = PubSub()
        database = Database(state.database_path, pubsub.publish)
        stack.callback(database.close)
        services = open_services(
            settings=settings,
            state_dir=state.path,
            database=database,
            pubsub=pubsub,
            slots=slots,
            port=port,
            has_passwords=options.has_passwords,
            hosts=hosts,
            transport=transport_of(own_allocation()) if options.is_under_slurm else None,
        )
        stack.callback(services.close)
        record = _record(services, services.slots, port, socket_path)
        # Exclude startup objects from garbage collection.
        gc.freeze()
        _run(state, services, record, listener, owner_listener, num_connections, on_ready)


def with_options(settings: MasterSettings, options: MasterOptions) -> MasterSettings:
    """Return the settings, with interpreter and back end from ``options`` if set."""
    return dataclasses.replace(
        settings,
        hosts_python=options.python or settings.hosts_python,
        backend=options.backend or settings.backend,
    )


def hosts_of(options: MasterOptions, settings: MasterSettings) -> tuple[Host, ...]:
    """Return the hosts that run allocations; () if the master's machine runs them."""
    if options.is_under_slurm:
        return hosts_of_allocation(own_allocation(), options.num_slots)
    hostfile = options.hostfile or settings.hostfile
    if hostfile is None:
        return ()
    return read_hosts(Path(hostfile), include=options.include, exclude=options.exclude)


def _record(services: Services, slots: Sequence[Slot], port: int, socket_path: Path) -> MasterRecord:
    return MasterRecord(
        pid=os.getpid(),
        start_time=str(process_start_time(os.getpid())),
        port=port,
        slots=tuple(
            {"id": slot.id, "kind": slot.kind, "brand": slot.brand, "uuid": slot.uuid} for slot in slots
        ),
        cluster_id=services.cluster_id,
        version=__version__,
        socket=str(socket_path),
    )


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise MasterError(
            f"port {port} of {HOST} is taken by another program ({error.strerror}); expected a free one. Pass another "
            "with --port."
        ) from error
    return listener


class LogFormatter(logging.Formatter):
    """Escapes messages and indents tracebacks: user text must not forge log lines."""

    def __init__(self) -> None:
        super().__init__(_LOG_FORMAT, "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"{_LOG_INDENT}{visible(line)}" for line in text.split("\n"))


def _configure_log(state: StateDirectory, level: str, *, shows_log: bool) -> None:
    handlers: list[logging.Handler] = [logging.FileHandler(state.log_path, encoding="utf-8")]
    if shows_log:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(LogFormatter())
    logging.basicConfig(level=getattr(logging, level.upper(), logging.INFO), handlers=handlers, force=True)
    # uvicorn logs a warning per bad request, with which any local user could fill the disk, and cancelled requests as errors.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)


def all_routes() -> list[Route]:
    """Return the routes of all modules in ``dstrial.master.api`` and ``.web``."""
    from dstrial.master import api, web

    names = [
        name
        for package in (api, web)
        for name in sorted(
            module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        )
    ]
    return [route for name in names for route in getattr(importlib.import_module(name), "routes", ())]


def create_app(services: Services) -> ProxyMiddleware:
    """Return the ASGI application: API, web page and proxied services of tasks."""
    from dstrial.master.http.router import Api
    from dstrial.master.proxy import ProxyMiddleware

    return ProxyMiddleware(services, Api(services, all_routes()))


def _run(
    state: StateDirectory,
    services: Services,
    record: MasterRecord,
    listener: socket.socket,
    owner_listener: socket.socket,
    num_connections: int,
    on_ready: Callable[[MasterRecord], None],
) -> None:
    from dstrial.master.http.connection import MAX_CONNECTIONS, MAX_HEAD_BYTES, Connection
    from dstrial.master.proxy import websocket_protocol
    from dstrial.master.scheduler.scheduler import Scheduler
    from dstrial.master.webhooks.delivery import Delivery

    scheduler = Scheduler(services)
    delivery = Delivery(services)

    def begin_work() -> None:
        scheduler.start()
        delivery.start()
        state.write_record(record)
        logger.info("serving at %s with %d slots from %s", record.address, len(record.slots), state.path)
        on_ready(record)

    server = MasterServer(
        uvicorn.Config(
            create_app(services),
            loop="uvloop",
            http=Connection,
            ws=websocket_protocol(services),
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(_STREAM_END_S),
            timeout_keep_alive=25,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            limit_concurrency=min(MAX_CONNECTIONS, num_connections),
        ),
        begin_work,
        owner_listener,
    )

    async def main() -> None:
        ending = Shutdown(server, scheduler, delivery)
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signal_, ending.request, signal_.name)
        loop.add_signal_handler(KILL_SIGNAL, ending.request_now)
        await server.serve([listener])

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    logger.info("the master has ended")


class Shutdown:
    """Shuts the master down: stops or kills the trials, then stops the server.

    Until the server stops, trials can send reports, submitted experiments are stored for the next master, and ``delivery``
    sends pending webhook events.
    """

    def __init__(self, server: MasterServer, scheduler: Scheduler, delivery: Delivery) -> None:
        self._server = server
        self._scheduler = scheduler
        self._delivery = delivery
        self._is_stopping = self._is_killing = False

    def request(self, cause: str) -> None:
        """Stop the trials with a checkpoint; a SIGINT (Ctrl-C) during the stop kills them.

        ``cause`` is a signal's name. A further SIGTERM (a second `dstrial down`) or SIGHUP (a closed session) has no effect.
        """
        if self._is_stopping:
            if cause == signal.SIGINT.name:
                self.request_now()
            return
        logger.info("%s: stopping the trials with a checkpoint", cause)
        self._is_stopping = True
        self._begin(is_graceful=True)

    def request_now(self) -> None:
        if self._is_killing:
            return
        self._is_stopping = self._is_killing = True
        logger.info("killing the trials")
        self._begin(is_graceful=False)

    def _begin(self, *, is_graceful: bool) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            try:
                self._scheduler.stop(graceful=is_graceful, timeout_s=_STOP_TIMEOUT_S)
                self._delivery.stop(_DRAIN_S if is_graceful else 0.0)
            finally:
                loop.call_soon_threadsafe(setattr, self._server, "should_exit", True)

        threading.Thread(target=stop, name="dstrial-ending", daemon=True).start()


def main(words: list[str]) -> int:
    """Run a master and return its exit code; ``words`` are STATE_DIR READY_FD OPTIONS."""
    state = StateDirectory(Path(words[0]))
    ready = int(words[1])
    os.set_inheritable(ready, False)

    def report(message: dict[str, Any]) -> None:
        with os.fdopen(ready, "w", encoding="utf-8") as pipe:
            json.dump(message, pipe)

    def on_ready(record: MasterRecord) -> None:
        report({"record": dataclasses.asdict(record)})

    options = MasterOptions.from_arguments(words[2:])
    if options.owner_pid is not None:
        _exit_with_parent(options.owner_pid)
        # The state directory is in a run directory; agents store their files here too, so that nothing is left elsewhere.
        os.environ[STATE_DIR_VARIABLE] = str(state.path)
    try:
        serve(state, options, on_ready=on_ready)
    except DstrialError as error:
        logger.error("%s", error)
        with contextlib.suppress(OSError):
            report({"error": str(error), "is_in_use": isinstance(error, StateInUseError)})
        return 1
    return 0


def _exit_with_parent(owner_pid: int) -> None:
    """Have the kernel send SIGTERM at the parent's death; exit if it has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner_pid:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
