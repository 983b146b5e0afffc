"""Serve ``RayEngine`` over pipes: JSON requests on stdin, replies on stdout."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from dstrial.master.backends.engine import EngineRefusedError, JobRequest
from dstrial.master.backends.queued.ray import RayEngine


def _answer(engine: RayEngine, request: dict[str, Any]) -> Any:
    what = request.pop("do")
    if what == "submit":
        excluded = frozenset(request.pop("excluded_nodes", ()))
        return engine.submit(JobRequest(**request, excluded_nodes=excluded))
    if what == "jobs":
        return [dataclasses.asdict(job) for job in engine.jobs()]
    if what == "cancel":
        return engine.cancel(request["id"])
    if what == "words":
        return engine.transport(request["id"]).words(request["host"], sys.executable)
    return {name: node.num_slots for name, node in engine.nodes().items()}


def main() -> None:
    """Answer one JSON request per line until stdin ends."""
    engine = RayEngine(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        try:
            said = {"answer": _answer(engine, json.loads(line))}
        except (EngineRefusedError, ConnectionError) as error:
            said = {"error": type(error).__name__, "text": str(error)}
        # A master must never import Ray; tests check this flag.
        said["has_ray"] = "ray" in sys.modules
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
    engine.close()


if __name__ == "__main__":
    main()
