"""``Services``: the objects that request handlers and the scheduler share."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from dstrial.file_writes import replace_file
from dstrial.master.backends import local
from dstrial.master.backends.backend import Backend
from dstrial.master.backends.fork_servers import ForkServers
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.status import ENGINE_NAME, HOSTS_NAME
from dstrial.master.clock import now_us
from dstrial.master.daemon import ENGINES
from dstrial.master.http.access import LoginLinks, ServiceGrants
from dstrial.master.lifecycle.storages import Storages
from dstrial.master.pubsub import PubSub
from dstrial.master.state_directory import StateDirectory
from dstrial.master.store import nodes, users
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Database, Transaction, make_cluster_id
from dstrial.master.webhooks.delivery import Sender, load_key
from dstrial.master.webhooks.events import LogTriggers

if TYPE_CHECKING:
    from dstrial.config.secrets import SecretNames
    from dstrial.hosts.hostfile import Host
    from dstrial.hosts.transport import Transport
    from dstrial.master.backends.devices import Slot
    from dstrial.master.backends.engine import Engine
    from dstrial.master.backends.hosts.link import AgentSettings
    from dstrial.master.settings import MasterSettings

T = TypeVar("T")
P = ParamSpec("P")

_NUM_READERS = 4  # threads that read the database
_NUM_CHECKERS = 2  # threads for slow checks
_SCHEDULER_LATE_S = 30.0  # a scheduler step that lasts longer is reported as a health problem

VERSION = "0.38.1"  # release of Determined whose API is served; clients warn about any other version


class Activity:
    """Time of the last proxied request of each task, for idle timeouts."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def touch(self, task_id: str) -> None:
        self._last_s[task_id] = time.monotonic()

    def idle_s(self, task_id: str) -> float:
        """Return the seconds since a task's services were last used.

        If they were never used, return the seconds since the first call of this method for the task.
        """
        return time.monotonic() - self._last_s.setdefault(task_id, time.monotonic())

    def forget(self, task_id: str) -> None:
        self._last_s.pop(task_id, None)


@dataclasses.dataclass(slots=True)
class Services:
    """The parts of a running master that handlers, web page and scheduler use."""

    settings: MasterSettings
    state_dir: Path
    database: Database
    pubsub: PubSub
    own_slots: tuple[Slot, ...]  # slots of the master's machine
    cluster_id: str
    master_id: str  # new at every start
    agent_id: str
    address: str  # URL for local processes, without a trailing slash
    hosts: tuple[Host, ...] = ()  # empty: this machine only
    transport: Transport | None = None  # how to reach the hosts; None for ssh
    engine: str | None = None  # Slurm or Ray; None if the nodes are fixed
    start_us: int = dataclasses.field(default_factory=now_us)
    executor: ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="dstrial-reader")
    )
    # Slow checks have a separate thread pool, so that they do not delay database reads.
    checker: ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(_NUM_CHECKERS, thread_name_prefix="dstrial-checker")
    )
    password_lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    links: LoginLinks = dataclasses.field(default_factory=LoginLinks)
    grants: ServiceGrants = dataclasses.field(default_factory=ServiceGrants)
    activity: Activity = dataclasses.field(default_factory=Activity)
    signing_key: str = dataclasses.field(default="", repr=False)
    scheduler_step: tuple[str, float] | None = None
    scheduler_problem: str = ""  # error of the scheduler's last iteration
    webhook_sender: Sender = dataclasses.field(init=False)
    log_triggers: LogTriggers = dataclasses.field(init=False)
    storages: Storages = dataclasses.field(init=False)
    backend: Backend = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.webhook_sender = Sender(self.signing_key)
        self.log_triggers = LogTriggers(self.database, self.pubsub)
        self.storages = Storages(self.database, umask=local.trial_umask)
        settings = self.settings
        fork_servers = ForkServers(
            self.state_dir / "fork-server.log", is_on=settings.warm, idle_timeout_s=settings.warm_idle_timeout
        )
        own = LocalBackend(
            self.agent_id,
            self.own_slots,
            fork_servers,
            is_warm=settings.warm,
            forks_with_accelerators=settings.warm_accelerators,
        )
        for name in (HOSTS_NAME, ENGINE_NAME):
            (self.state_dir / name).unlink(missing_ok=True)  # stale file of an earlier master
        self.backend = self._make_backend(own)

    def _wake_scheduler(self) -> None:
        self.pubsub.publish(("scheduler",))

    def _make_backend(self, own: LocalBackend) -> Backend:
        if self.settings.backend in ENGINES:
            return self._engine_backend(own)
        return self._hosts_backend(own) if self.hosts else own

    def _engine_backend(self, own: LocalBackend) -> Backend:
        from dstrial.master.backends.queued.backend import QueuedBackend

        settings = self.settings
        if settings.backend == "slurm":
            from dstrial.master.backends.queued.slurm import SlurmEngine, wants_devices

            has_devices = wants_devices(settings.slurm)
            engine: Engine = SlurmEngine(
                self.state_dir / "slurm", self.cluster_id, settings.slurm, wants_devices=has_devices
            )
        else:
            from dstrial.master.backends.queued.ray import RayEngine

            engine = ray = RayEngine(settings.ray_address, self.cluster_id)
            has_devices = ray.wants_devices()
        self.engine = engine.name
        return QueuedBackend(
            own,
            engine,
            self._agent_settings(),
            lambda names: self.database.write(lambda tx: nodes.ids_of(tx, names)),
            self._wake_scheduler,
            self.state_dir,
            wants_devices=has_devices,
        )

    def _agent_settings(self) -> AgentSettings:
        from dstrial.hosts.transport import SshTransport
        from dstrial.master.backends.hosts.link import AgentSettings

        return AgentSettings(
            python=self.settings.hosts_python or sys.executable,
            cluster_id=self.cluster_id,
            master_port=int(self.address.rpartition(":")[2]),
            umask=local.trial_umask,
            is_warm=self.settings.warm,
            forks_with_accelerators=self.settings.warm_accelerators,
            warm_idle_timeout_s=self.settings.warm_idle_timeout,
            transport=self.transport or SshTransport(),
        )

    def _hosts_backend(self, own: LocalBackend) -> Backend:
        from dstrial.master.backends.hosts.backend import HostsBackend

        names = [host.name for host in self.hosts]
        ids = self.database.write(lambda tx: nodes.ids_of(tx, names))
        hosts = {ids[host.name]: host for host in self.hosts}
        return HostsBackend(own, hosts, self._agent_settings(), self._wake_scheduler, self.state_dir)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of all nodes, including slots that are disabled or on a down node."""
        return tuple(slot for node in self.backend.nodes() for slot in node.slots)

    def node_name(self, node_id: int) -> str:
        return next((node.name for node in self.backend.nodes() if node.id == node_id), self.agent_id)

    def agent_of(self, allocation: Allocation) -> str:
        """Return the names of an allocation's nodes, separated by commas.

        If the allocation has no slots, or its nodes are unknown now, return the name of the master's machine.
        """
        wanted = {nodes.node_of(slot_id) for slot_id in allocation.slots}
        return ", ".join(node.name for node in self.backend.nodes() if node.id in wanted) or self.agent_id

    @property
    def secret_names(self) -> SecretNames:
        return self.settings.secret_names

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function(connection, *args)`` in a reader thread and return its result.

        The function sees one snapshot of the database.
        """

        def run() -> T:
            with self.database.read() as connection:
                return function(connection, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self.executor, run)

    def record_scheduler_step(self, step: str) -> None:
        """Record that the scheduler begins a step, for :meth:`describe_trouble`.

        ``step`` is a text such as "assigning slots".
        """
        self.scheduler_step = step, time.monotonic()

    def describe_trouble(self) -> str:
        """Return a message about a health problem of the master; empty if there is none."""
        what, since_s = self.scheduler_step or ("", math.inf)
        late_s = time.monotonic() - since_s
        scheduler = (
            f"the scheduler has been {what} for {late_s:.0f} s; expected at most {_SCHEDULER_LATE_S:.0f} s. No trial starts or "
            f"ends: see `dstrial logs`. Trials that run go on while the master restarts: `kill -9 {os.getpid()}; dstrial up`."
        )
        problem = self.scheduler_problem and (
            f"the scheduler has failed and tries again: {self.scheduler_problem}. No trial starts or ends: see `dstrial logs`."
        )
        return (
            self.database.describe_trouble() or problem or (scheduler if late_s > _SCHEDULER_LATE_S else "")
        )

    async def write(self, function: Callable[[Transaction], T]) -> T:
        """Run ``function(transaction)`` in the writer thread and return its result.

        The method returns once the transaction is committed.
        """
        return await asyncio.wrap_future(self.database.submit(function))

    async def run(self, function: Callable[[], T]) -> T:
        """Run a blocking function, for example file I/O, in the readers' thread pool."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function)

    async def check(self, function: Callable[[], T]) -> T:
        """Run a slow validation in a separate thread pool, so that reads are not delayed."""
        return await asyncio.get_running_loop().run_in_executor(self.checker, function)

    def close(self) -> None:
        """Shut down back end, webhook sender and thread pools, but not the database."""
        self.backend.close()
        self.webhook_sender.end()
        self.checker.shutdown(wait=True, cancel_futures=True)
        self.executor.shutdown(wait=True, cancel_futures=True)


def open_services(
    *,
    settings: MasterSettings,
    state_dir: Path,
    database: Database,
    pubsub: PubSub,
    slots: tuple[Slot, ...],
    port: int,
    has_passwords: bool,
    hosts: tuple[Host, ...] = (),
    transport: Transport | None = None,
) -> Services:
    """Create the services of a master.

    At the first start, also store a new cluster id and create the first users. If ``has_passwords``, these users get random
    passwords, which are written to ``credentials.json`` in ``state_dir`` (mode 0600). Otherwise their passwords are blank, as
    in Determined.
    """
    with database.read() as connection:
        is_new = not users.has_users(connection)
    if is_new:
        passwords = users.new_passwords(is_blank=not has_passwords)
        path = StateDirectory(state_dir).credentials_path
        if has_passwords:
            # Write the file before the rows of users, so that a crash cannot leave unknown passwords.
            replace_file(path, json.dumps(passwords, indent=2) + "\n", is_private=True)
        else:
            path.unlink(missing_ok=True)
        database.write(lambda tx: users.create_first_users(tx, passwords))
    return Services(
        settings=settings,
        state_dir=state_dir,
        database=database,
        pubsub=pubsub,
        own_slots=slots,
        cluster_id=database.write(make_cluster_id),
        master_id=str(uuid.uuid4()),
        agent_id=socket.gethostname() or "localhost",
        address=f"http://127.0.0.1:{port}",
        hosts=hosts,
        transport=transport,
        signing_key=load_key(StateDirectory(state_dir).webhook_key_path),
    )
