"""The bridge: a process that imports Ray and connects a master to a Ray cluster.

When connected to Ray, ``python -m dstrial.ray.bridge`` listens on a UNIX socket. A client's connection carries one request and
one response, each a line of JSON. A relay (:mod:`dstrial.ray.relay`) is a client that starts a program on a node of a job; the
bridge forwards the program's input and output. When its stdin is closed, the bridge waits up to ``_CLOSE_S`` for the relays to
end, and exits. Placement groups and programs remain.
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
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.ray import node_actor
from dstrial.ray.cluster import GPU, parse_groups, parse_nodes
from dstrial.ray.relay import CODE, ERR, EXIT_CODE_OF_CONNECTION, OUT, framed

NAMESPACE = "dstrial"  # Ray namespace of placement groups and actors
_NODE_ID_LABEL = "ray.io/node-id"  # label that Ray sets to a node's id
_HEAD_S = 5.0  # timeout of the first connection to the head node; Ray itself tries for more than a minute
_START_S = 30.0  # timeout of an actor's start, which imports Ray on the node
_READ_S = 2.0  # timeout of an actor's wait for output; also the interval of checks for closed relays
_LOST_S = 20.0  # timeout of an actor's answer, in case its node is lost
_RELAY = "relay"  # name of the threads that serve relays
_CLOSE_S = 4.0  # grace period for relays after the master's end; shorter than ``client._CLOSE_S``
_BACKLOG = 64  # pending connections of the socket


class _JobGoneError(Exception):
    """The requested job has ended, or does not have the requested node."""


class Bridge:
    """A Ray driver for a master's requests; the constructor connects to Ray."""

    def __init__(self, address: str) -> None:
        import ray

        host, _, port = address.rpartition(":")
        if port.isdecimal():
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_S):
                pass
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        ray.cloudpickle.register_pickle_by_value(node_actor)
        self._actor = ray.remote(node_actor.NodeActor)

    def poll(self) -> dict[str, Any]:
        """Return the cluster's nodes and dstrial's placement groups, as Ray reports them.

        Returns:
            ``nodes``: Ray's list of nodes. ``free``: node id -> resources that are not reserved. ``draining``: ids of nodes
            that Ray drains. ``groups``: id -> row of Ray's table of placement groups.

        Ray 2.60 has no public API for ``free`` and ``draining``; Ray Train uses the same private functions.
        """
        import ray
        from ray._private import state

        table = ray.util.placement_group_table()
        return {
            "nodes": ray.nodes(),
            "free": state.available_resources_per_node(),
            "draining": state.state.get_draining_nodes(),
            "groups": {one: row for one, row in table.items() if row["name"].startswith(f"{NAMESPACE} ")},
        }

    def reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Create a placement group that outlives the bridge; return ``{"id": id}``.

        ``request`` has the group's ``name``, ``bundles`` (the resources on each node) and ``excluded_nodes`` (Ray's ids of
        nodes that the group must not use).
        """
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
        """Remove placement group ``request["id"]`` and its actors; return {}. Idempotent."""
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        row = ray.util.placement_group_table().get(request["id"])
        if row is not None and row["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # removed meanwhile
                remove_placement_group(get_placement_group(row["name"]))
        return {}

    def start(self, request: Mapping[str, Any]) -> tuple[Any, int]:
        """Start a program on a job's node; return (actor, the actor's program number).

        The actor (``NodeActor``) of this node and job is created if it does not exist. ``request`` has ``job`` (id of the
        placement group), ``host`` (the node's name) and ``words`` (the command).

        Raises:
            _JobGoneError: the placement group does not exist or has no such node.
        """
        import ray
        from ray.util.placement_group import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        seen = self.poll()
        nodes = {node.id: node for node in parse_nodes(seen)}
        group = next((one for one in parse_groups(seen) if one.id == request["job"]), None)
        if group is None or group.state == "REMOVED":
            raise _JobGoneError(f"placement group {request['job']} is over")
        names = [nodes[one].name if one in nodes else "" for one in group.node_ids]
        if request["host"] not in names:
            raise _JobGoneError(f"placement group {request['job']} has no node {request['host']}")
        index = names.index(request["host"])
        actor = self._actor.options(
            name=f"node-{group.id}-{index}-{group.node_ids[index]}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            num_gpus=group.bundles[index].get(GPU, 0),
            max_restarts=0,
            max_concurrency=node_actor.NUM_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(get_placement_group(group.name), index),
        ).remote(is_worker=True)
        return actor, ray.get(actor.start.remote(request["words"]), timeout=_START_S)


def _serve(bridge: Bridge, connection: socket.socket) -> None:
    """Read a client's request from a connection, and send the response.

    For a request to start a program, forward the program's input and output until the program or the client ends.
    """
    with connection, contextlib.suppress(OSError), connection.makefile("rb", buffering=0) as lines:
        request = json.loads(lines.readline())
        if request["do"] == "start":
            threading.current_thread().name = _RELAY
            _serve_relay(bridge, request, connection)
            return
        handlers = {"poll": lambda _: bridge.poll(), "reserve": bridge.reserve, "remove": bridge.remove}
        answer: dict[str, Any]
        try:
            answer = {"answer": handlers[request["do"]](request)}
        except Exception as error:  # noqa: BLE001  # whatever Ray raises, the master reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _serve_relay(bridge: Bridge, request: Mapping[str, Any], connection: socket.socket) -> None:
    import ray

    try:
        actor, number = bridge.start(request)
    except (_JobGoneError, ValueError, ray.exceptions.RayError) as error:
        _refuse(connection, str(error))
        return
    threading.Thread(target=_write, args=(connection, actor, number), daemon=True).start()
    try:
        _read(connection, actor, number)
    except ray.exceptions.RayError as error:
        _refuse(connection, f"the actor on {request['host']} is gone: {_without_ids(str(error))}")
    finally:
        actor.abandon.remote(number)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _without_ids(text: str) -> str:
    """Return a Ray error as one line, without the indented lines, which list ids."""
    return " ".join(line for line in text.splitlines() if not line.startswith("\t"))


def _refuse(connection: socket.socket, text: str) -> None:
    line = " ".join(text.split()) + "\n"
    connection.sendall(framed(ERR, line.encode()) + framed(CODE, b"%d" % EXIT_CODE_OF_CONNECTION))


def _write(connection: socket.socket, actor: Any, number: int) -> None:
    import ray

    with contextlib.suppress(OSError, ray.exceptions.RayError):
        while data := connection.recv(node_actor.PIECE_BYTES):
            if not ray.get(actor.write.remote(number, data)):
                break
        actor.end_input.remote(number)


def _read(connection: socket.socket, actor: Any, number: int) -> None:
    import ray

    hung_up = select.poll()
    hung_up.register(connection, select.POLLHUP)
    while True:
        out, err, code = ray.get(actor.read.remote(number, _READ_S), timeout=_LOST_S)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args()
    try:
        bridge = Bridge(options.address)
    except Exception as error:  # noqa: BLE001  # whatever Ray raises, the master reports it
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
        sys.stderr.flush()
        os._exit(1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{options.socket}.new")
    listener.listen(_BACKLOG)
    Path(f"{options.socket}.new").rename(options.socket)
    threading.Thread(target=_accept, args=(bridge, listener), daemon=True).start()
    sys.stdin.read()
    give_up_at_s = time.monotonic() + _CLOSE_S
    for thread in threading.enumerate():
        if thread.name == _RELAY:
            thread.join(max(give_up_at_s - time.monotonic(), 0))
    shutil.rmtree(options.socket.parent, ignore_errors=True)
    # A normal exit would wait for the threads of Ray and of programs. Ray detects that this process has ended.
    os._exit(0)


if __name__ == "__main__":
    main()
