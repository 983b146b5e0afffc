"""The process that connects a master, which never imports Ray, to a Ray cluster.

``python -m dstrial.ray.bridge`` reads requests, a line of JSON each, and answers each by a line. On a UNIX socket each
:mod:`~dstrial.ray.relay` requests a program on a node of a job; the bridge passes its bytes. It decides nothing, and ends with
its input; reservations and programs stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrial.ray import guard, keeper
from dstrial.ray.cluster import GPU, parse_groups, parse_nodes
from dstrial.ray.relay import CODE, ERR, EXIT_CODE_OF_CONNECTION, OUT, framed

NAMESPACE = "dstrial"
"""Ray's namespace of placement groups and actors."""
_KV = NAMESPACE.encode()
_NODE_ID_LABEL = "ray.io/node-id"
_HEAD_S = 5.0
_START_S = 30.0
_POLL_S = 2.0
_LOST_S = 20.0
_BACKLOG = 64


class _NotThereError(Exception):
    """A job has no such node, or is over."""


class Bridge:
    """A driver of Ray's, connected by its constructor, which raises what Ray raises."""

    def __init__(self, address: str) -> None:
        import ray

        host, _, port = address.rpartition(":")
        if port.isdecimal():
            # Ray itself tries for more than a minute.
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_S):
                pass
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self._job = ray.get_runtime_context().get_job_id()
        ray.cloudpickle.register_pickle_by_value(keeper)
        self._keeper = ray.remote(keeper.NodeActor)
        self._places: dict[str, dict[str, str]] = {}
        self._guard = Path(guard.__file__).read_text(encoding="utf-8")

    def look(self) -> dict[str, Any]:
        """Return the nodes and our placement groups, for :mod:`dstrial.ray.cluster`."""
        import ray
        from ray._private import state

        table = ray.util.placement_group_table()
        groups = {one: row for one, row in table.items() if row["name"].startswith(f"{NAMESPACE} ")}
        for number, row in groups.items():
            row["first_node_ids"] = self._first_places(number, row)
        return {
            "nodes": ray.nodes(),
            "free": state.available_resources_per_node(),
            "draining": state.state.get_draining_nodes(),
            "groups": groups,
        }

    def _first_places(self, number: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Return where a group's bundles were when first seen complete.

        Ray moves a dead node's bundle as soon as another has room, without a trace. What ran there is gone all the same, also
        for the next master: so the cluster stores the first places.
        """
        from ray.experimental import internal_kv

        if number not in self._places and row["state"] != "REMOVED":
            places = {index: place for index, place in row["bundles_to_node_id"].items() if place}
            if row["state"] == "CREATED":
                internal_kv._internal_kv_put(number, json.dumps(places), overwrite=False, namespace=_KV)
            kept = internal_kv._internal_kv_get(number, namespace=_KV)
            if kept:
                self._places[number] = json.loads(kept)
        return self._places.get(number, {})

    def reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make a placement group that outlives this process; return its id."""
        from ray.util.placement_group import placement_group

        bundles, excluded = request["bundles"], request["excluded_nodes"]
        selectors = [{_NODE_ID_LABEL: f"!in({','.join(excluded)})"}] * len(bundles) if excluded else None
        group = placement_group(
            bundles,
            strategy="STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD",
            name=request["name"],
            lifetime="detached",
            bundle_label_selector=selectors,
        )
        return {"id": group.id.hex()}

    def remove(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Remove a placement group and the actors in it. Idempotent."""
        import ray
        from ray.experimental import internal_kv
        from ray.util.placement_group import get_placement_group, remove_placement_group

        row = ray.util.placement_group_table().get(request["id"])
        if row is not None and row["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                remove_placement_group(get_placement_group(row["name"]))
        self._places.pop(request["id"], None)
        internal_kv._internal_kv_del(request["id"], namespace=_KV)
        return {}

    def start(self, order: Mapping[str, Any]) -> tuple[Any, int]:
        """Start a program on a node of a job; return the actor and the program's number."""
        import ray
        from ray.util.placement_group import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        seen = self.look()
        nodes = {node.id: node for node in parse_nodes(seen)}
        group = next((one for one in parse_groups(seen) if one.id == order["job"]), None)
        if group is None or group.state == "REMOVED":
            raise _NotThereError(f"placement group {order['job']} is over")
        names = [nodes[one].name if one in nodes else "" for one in group.node_ids]
        if order["host"] not in names:
            raise _NotThereError(f"placement group {order['job']} has no node {order['host']}")
        index = names.index(order["host"])
        actor = self._keeper.options(
            name=f"keeper-{group.id}-{index}-{group.node_ids[index]}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            num_gpus=group.bundles[index].get(GPU, 0),
            max_restarts=0,
            max_concurrency=keeper.NUM_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(get_placement_group(group.name), index),
        ).remote(self._guard, ends_with_daemon=True)
        return actor, ray.get(actor.start.remote(order["words"], self._job), timeout=_START_S)


def _serve(bridge: Bridge, connection: socket.socket) -> None:
    """Run a program for a relay, to its end or the relay's."""
    import ray

    with connection, contextlib.suppress(OSError), connection.makefile("rb", buffering=0) as lines:
        try:
            order = json.loads(lines.readline())
            actor, number = bridge.start(order)
        except (_NotThereError, ValueError, ray.exceptions.RayError) as error:
            _refuse(connection, str(error))
            return
        threading.Thread(target=_write, args=(connection, actor, number), daemon=True).start()
        try:
            _read(connection, actor, number)
        except ray.exceptions.RayError as error:
            _refuse(connection, f"the actor on {order['host']} is gone: {_plain(str(error))}")
        finally:
            actor.forget.remote(number)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _plain(text: str) -> str:
    """Drop the indented lines, with Ray's ids of an actor."""
    return " ".join(line for line in text.splitlines() if not line.startswith("\t"))


def _refuse(connection: socket.socket, text: str) -> None:
    line = " ".join(text.split()) + "\n"
    connection.sendall(framed(ERR, line.encode()) + framed(CODE, b"%d" % EXIT_CODE_OF_CONNECTION))


def _write(connection: socket.socket, actor: Any, number: int) -> None:
    import ray

    with contextlib.suppress(OSError, ray.exceptions.RayError):
        while data := connection.recv(keeper.PIECE_BYTES):
            if not ray.get(actor.write.remote(number, data)):
                break
        actor.end_input.remote(number)


def _read(connection: socket.socket, actor: Any, number: int) -> None:
    import ray

    hung_up = select.poll()
    hung_up.register(connection, select.POLLHUP)
    while True:
        out, err, code = ray.get(actor.read.remote(number, _POLL_S), timeout=_LOST_S)
        if out:
            connection.sendall(framed(OUT, out))
        if err:
            connection.sendall(framed(ERR, err))
        if code is not None:
            connection.sendall(framed(CODE, b"%d" % code))
            return
        if any(event & select.POLLHUP for _, event in hung_up.poll(0)):
            return


def _accept(bridge: Bridge, listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(bridge, connection), daemon=True).start()


def _answered(handlers: Mapping[str, Callable[[Mapping[str, Any]], Any]], text: str) -> dict[str, Any]:
    request = json.loads(text)
    number = {"number": request["number"]}
    try:
        return {**number, "answer": handlers[request["do"]](request)}
    except Exception as error:  # noqa: BLE001  # whatever Ray raises, the master has to hear of it
        return {**number, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer

    def say(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        bridge = Bridge(options.address)
    except Exception as error:  # noqa: BLE001  # whatever Ray raises, the master has to hear of it
        say({"number": 0, "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    options.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(options.socket))
    listener.listen(_BACKLOG)
    threading.Thread(target=_accept, args=(bridge, listener), daemon=True).start()
    say({"number": 0, "answer": {}})
    handlers = {"look": lambda _: bridge.look(), "reserve": bridge.reserve, "remove": bridge.remove}
    for text in sys.stdin:
        say(_answered(handlers, text))
    shutil.rmtree(options.socket.parent, ignore_errors=True)
    # Ray's threads and those of programs would hold up an orderly end; Ray sees that this process is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
