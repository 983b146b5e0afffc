"""Serve a master's HTTP application with two experiments and no scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from rows import add

from dstrial.master.backends.devices import Slot
from dstrial.master.http.connection import Connection
from dstrial.master.pubsub import PubSub
from dstrial.master.server import create_app
from dstrial.master.services import Services, open_services
from dstrial.master.settings import MasterSettings
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Database, Transaction

T = TypeVar("T")
NUM_SLOTS = 4


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> str:
        return str(self.json["error"]["error"])


@dataclasses.dataclass(frozen=True)
class Master:
    """A served master: sends requests with a user's or trial's token, reads the store."""

    services: Services
    port: int
    tokens: dict[str, str]
    """Tokens by name: ``determined``, ``admin``, ``other``, ``trial-1-user`` (users), ``trial-1``, ``trial-2`` (allocations)."""
    checkpoints: dict[int, str]
    """Checkpoint UUIDs by trial id."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send a request; ``token`` is a key of ``tokens`` or a token; bytes go as is."""
        sent = {"Host": f"localhost:{self.port}", **(headers or {})}
        if token is not None:
            value = self.tokens.get(token, token)
            name = (
                "Grpc-Metadata-x-allocation-token"
                if token.startswith("trial") and not token.endswith("user")
                else "Authorization"
            )
            sent.setdefault(name, f"Bearer {value}")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return Answer(
                answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def get(self, path: str, token: str | None = "determined") -> Answer:
        return self.send("GET", path, token=token)

    def write(self, function: Callable[[Transaction], T]) -> T:
        return self.services.database.write(function)

    def change(self, sql: str, *parameters: Any) -> None:
        self.write(lambda tx: tx.execute(sql, parameters))

    def rows(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        with self.services.database.read() as connection:
            return [dict(row) for row in connection.execute(sql, parameters)]


@contextlib.contextmanager
def serving(
    state_dir: Path, *, has_passwords: bool = True, port: int = 0, is_again: bool = False
) -> Iterator[Master]:
    """Serve a new store until the block ends; ``is_again`` serves an existing store."""
    state_dir.mkdir(parents=True, exist_ok=True)
    changes = PubSub()
    with contextlib.ExitStack() as stack:
        database = Database(state_dir / "master.db", changes.publish)
        stack.callback(database.close)
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        stack.callback(listener.close)
        port = listener.getsockname()[1]
        services = open_services(
            settings=MasterSettings.load(None),
            state_dir=state_dir,
            database=database,
            pubsub=changes,
            slots=tuple(Slot(slot, "cpu", "test cpu", f"cpu-{slot}") for slot in range(NUM_SLOTS)),
            port=port,
            has_passwords=has_passwords,
        )
        stack.callback(services.close)
        _start_threads(services)
        known, checkpoints = ({}, {}) if is_again else database.write(fill)
        config = uvicorn.Config(
            create_app(services),
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

        stack.callback(end)
        yield Master(services, port, known, checkpoints)


def _start_threads(services: Services) -> None:
    """Start all pool threads now, so that no test is blamed for leaking them."""
    num_threads = services.executor._max_workers
    together = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        services.executor.submit(together.wait, 20)
    together.wait(20)
    both = threading.Barrier(2, timeout=20)
    for check in [services.checker.submit(both.wait) for _ in range(2)]:
        check.result(20)


def fill(tx: Transaction) -> tuple[dict[str, str], dict[int, str]]:
    """Add a third user and two experiments; experiment ``i`` has running trial ``i``."""
    ids = {row["username"]: row["id"] for row in tx.execute("SELECT id, username FROM users").fetchall()}
    password = users.client_hash("Other-password-1")
    ids["other"] = users.create_user(tx, username="other", admin=False, password=password)
    known = {name: tokens.create_token(tx, user_id) for name, user_id in ids.items()}
    checkpoints = {}
    config = {
        "name": "fuzz",
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "max_length": {"batches": 9},
        },
        "hyperparameters": {"lr": {"type": "const", "val": 0.1}},
        "resources": {"slots_per_trial": 1},
        "entrypoint": "true",
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/nonexistent"},
    }
    for number in (1, 2):
        task, own = f"{number}.request", {"experiment_id": number, "trial_id": number}
        add(
            tx, "experiments", id=number, job_id=f"job-{number}", state="ACTIVE", config=config, original_config="name: fuzz",
            name="fuzz", owner_id=ids["determined"], queue_position=float(number), start_us=1,
        )  # fmt: skip
        add(tx, "model_definitions", experiment_id=number, tgz=b"tgz")
        hparams = {"state": "ACTIVE", "hparams": {"lr": 0.1}}
        add(tx, "trials", id=number, experiment_id=number, task_id=task, run_id=1, start_us=1, **hparams)
        add(tx, "tasks", id=task, **own, start_us=1)
        resources = {"slots": [number - 1], "resources_id": str(uuid.uuid4())}
        add(tx, "allocations", id=f"{task}.1", task_id=task, **own, **resources, start_us=1)
        checkpoints[number] = str(uuid.uuid4())
        add(
            tx, "checkpoints", uuid=checkpoints[number], **own, task_id=task, allocation_id=f"{task}.1", steps=3, size=1,
            resources={"a": 1}, metadata={"steps_completed": 3}, report_us=1,
        )  # fmt: skip
        session, user = f"token-of-trial-{number}", f"token-of-the-user-in-trial-{number}"
        hashes = {"allocation": tokens.hash_token(session), "user": tokens.hash_token(user)}
        tokens.keep_allocation_tokens(tx, f"{task}.1", ids["determined"], hashes)
        known[f"trial-{number}"], known[f"trial-{number}-user"] = session, user
    return known, checkpoints
