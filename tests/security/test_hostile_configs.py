"""Hostile configs against the loader and a running master."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hostile_configs import CONFIGS, TEXTS, Hostile

from dstrial.config.documents import read_json, read_yaml_text
from dstrial.errors import ConfigError
from dstrial.master.server import all_routes
from dstrial.testing.master import MasterForTest, master_for_test

_MAX_MIB = 200
_ADDRESS_SPACE_BYTES = 8 * 2**30


@dataclasses.dataclass(frozen=True)
class Played:
    """A master's response to a request, with its extra peak memory."""

    status: int
    text: str
    peak_mib: float


class Player:
    """Sends hostile texts to a running master."""

    def __init__(self, master: MasterForTest) -> None:
        self.pid = master.record.pid
        self._netloc = urlsplit(master.address).netloc
        self._headers = {"Authorization": f"Bearer {master.client().token}"}
        # With this limit, a successful attack ends the master, not the machine.
        resource.prlimit(self.pid, resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))

    def send(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Send a request with bytes or a value for JSON as body; return status and text."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self._netloc, timeout=60)
        try:
            connection.request(method, path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def play(self, method: str, path: str, body: Any) -> Played:
        """Send a request; measure the master's memory."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        before = self._memory_mib("VmRSS")
        status, text = self.send(method, path, body)
        return Played(status, text, self._memory_mib("VmHWM") - before)

    def _memory_mib(self, name: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1024


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    with master_for_test(tmp_path_factory.mktemp("hostile")) as master:
        yield Player(master)


def _ids(hostile: Hostile) -> str:
    return hostile.name


def submissions(hostile: Hostile) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the requests that contain a text: the text's role, method, path, body."""
    text = hostile.value
    yield "config", "POST", "/api/v1/experiments", {"config": text, "validateOnly": True}
    if not hostile.is_document:
        for key in ("hyperparameters", "data"):
            body = {"config": hostile.below(key), "validateOnly": True}
            yield key, "POST", "/api/v1/experiments", body
    yield "task", "POST", "/api/v1/generic-tasks", {"config": text}
    if hostile.is_json:
        template = b'{"config": {"data": ' + text.encode("utf-8", "surrogatepass") + b"}}"
        yield "template", "POST", "/api/v1/templates/hostile", template
        yield "template", "PATCH", "/api/v1/templates/hostile", template
        preview = b'{"config": {"hyperparameters": ' + text.encode("utf-8", "surrogatepass") + b"}}"
        yield "preview", "POST", "/api/v1/preview-hp-search", preview
        yield "command", "POST", "/api/v1/commands", template


@pytest.mark.parametrize("hostile", TEXTS, ids=_ids)
def test_yaml_loader_handles_hostile_text(hostile: Hostile, tmp_path: Path) -> None:
    if hostile.says is None:
        read_yaml_text(hostile.value, "exp.yaml")
        return
    with pytest.raises(ConfigError, match=hostile.says) as refused:
        read_yaml_text(hostile.value, "exp.yaml")
    assert len(str(refused.value)) < 64 * 1024
    assert str(refused.value).startswith("exp.yaml")


@pytest.mark.parametrize("hostile", [one for one in TEXTS if one.is_json], ids=_ids)
def test_json_loader_refuses_hostile_text(hostile: Hostile, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(hostile.value.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"ds\.json") as refused:
        read_json(path, "ds.json")
    assert len(str(refused.value)) < 64 * 1024


def test_yaml_alias_yields_copy() -> None:
    value = read_yaml_text("a: &a {b: 1}\nc: *a\nd: {<<: *a}", "exp.yaml").value
    value["a"]["b"] = 2
    assert (value["c"], value["d"]) == ({"b": 1}, {"b": 1})


@pytest.mark.process
@pytest.mark.parametrize("hostile", TEXTS, ids=_ids)
def test_master_rejects_hostile_text_with_little_memory(hostile: Hostile, player: Player) -> None:
    for what, method, path, body in submissions(hostile):
        played = player.play(method, path, body)
        # The JSON parser of the request keeps the last of duplicate keys, so the master does not see them.
        is_refused = hostile.says and not (isinstance(body, bytes) and hostile.says == "given twice")
        assert played.status in ((400,) if is_refused else (200, 400, 404, 409)), (what, played)
        assert played.peak_mib < _MAX_MIB, (what, played)
        if hostile.says and what in ("hyperparameters", "data"):
            assert re.search(hostile.says, json.loads(played.text)["error"]["error"]), (
                what,
                played.text[:300],
            )


@pytest.mark.process
@pytest.mark.parametrize("name", CONFIGS)
def test_master_checks_expensive_config_with_little_memory(name: str, player: Player) -> None:
    config, says = CONFIGS[name]
    played = player.play("POST", "/api/v1/experiments", {"config": config(), "validateOnly": True})
    assert played.peak_mib < _MAX_MIB, played
    assert played.status == (200 if says is None else 400), played.text[:300]
    if says is not None:
        assert re.search(says, played.text), played.text[:300]


@pytest.mark.process
def test_routes_survive_deeply_nested_body(player: Player) -> None:
    deep = b'{"config": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    statuses = {}
    for route in all_routes():
        if route.method != "GET" and "logout" not in route.path:
            path = re.sub(r"\{\w+(:int)?\}", "1", route.path)
            statuses[f"{route.method} {route.path}"] = player.send(route.method, path, deep)[0]
    assert {one: status for one, status in statuses.items() if status >= 500 and status != 501} == {}
    for one in ("POST /api/v1/experiments", "PATCH /api/v1/templates/{template}"):
        assert statuses[one] == 400


@pytest.mark.process
def test_body_with_millions_of_values_is_refused(player: Player) -> None:
    many = b'{"config": [' + b"[]," * 5_000_000 + b"[]]}"
    played = player.play("PATCH", "/api/v1/templates/many", many)
    assert played.status == 400
    assert "holds more than" in played.text
    assert played.peak_mib < _MAX_MIB
    _, answer = player.send("POST", "/task-logs", [{"task_id": "x", "log": 'a,[{\\"' * 500_000}])
    assert "holds more than" not in answer
