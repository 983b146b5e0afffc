"""API of the master's version, config, log and health."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

pytestmark = pytest.mark.process

_LOG = """\
2026-11-21T02:00:00.123 INFO dstrial.master: serving
2026-11-21T02:00:01.000 ERROR dstrial.master.server: a request failed
Traceback (most recent call last):
KeyError: 1
2026-11-21T02:00:02.000 WARNING x: last
"""


@pytest.fixture
def root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_info_reports_version_of_installed_determined(served: Master) -> None:
    import determined

    info = served.get("/info", None).json
    assert info["version"] == determined.__version__
    assert info["cluster_id"] == served.services.cluster_id
    assert "sso_providers" not in info


def test_log_level_is_changed_at_runtime(fresh_master: Master, admin: api.Session, root_level: None) -> None:
    request = bindings.v1PatchMasterConfigRequest(
        config=bindings.v1Config(log=bindings.v1LogConfig(level=bindings.v1LogLevel.ERROR)),
        fieldMask=bindings.protobufFieldMask(paths=["log.level"]),
    )
    bindings.patch_PatchMasterConfig(admin, body=request)
    assert logging.getLogger().level == logging.ERROR
    assert bindings.get_GetMasterConfig(admin).config["log"]["level"] == "error"


def test_text_field_mask_changes_log_settings(fresh_master: Master, root_level: None) -> None:
    log = {"level": "LOG_LEVEL_ERROR", "color": False}
    body = {"fieldMask": "log.level,log.color", "config": {"log": log}}
    assert fresh_master.send("PATCH", "/api/v1/master/config", body, token="admin").status == 200
    assert logging.getLogger().level == logging.ERROR


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"fieldMask": "port", "config": {"log": {}}},
        {"fieldMask": {"paths": ["port"]}, "config": {"log": {}}},
        {"fieldMask": {"paths": ["log.level"]}, "config": {"log": {"level": "LOUD"}}},
        {"fieldMask": {"paths": 1}, "config": {"log": {}}},
        {"fieldMask": {"paths": ["log.level"]}, "config": 3},
    ],
)
def test_patch_config_rejects_other_settings(served: Master, body: dict[str, object]) -> None:
    assert served.send("PATCH", "/api/v1/master/config", body, token="admin").status == 400


def test_master_log_is_streamed_by_line(fresh_master: Master, admin: api.Session) -> None:
    (fresh_master.services.state_dir / "master.log").write_text(_LOG)
    entries = [answer.logEntry for answer in bindings.get_MasterLogs(admin)]
    assert [entry.id for entry in entries] == [0, 1, 2, 3, 4]
    assert entries[0].message == "dstrial.master: serving"
    assert entries[3].message == "KeyError: 1"
    assert [entry.level.name for entry in entries] == ["INFO", "ERROR", "ERROR", "ERROR", "WARNING"]
    assert entries[2].timestamp == entries[1].timestamp


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"offset": -2}, [3, 4]),
        ({"offset": 3}, [3, 4]),
        ({"limit": 2}, [0, 1]),
        ({"offset": -99}, [0, 1, 2, 3, 4]),
        ({"offset": 99}, []),
        ({"offset": -3, "limit": 1, "follow": True}, [2]),
    ],
)
def test_master_log_offset_and_limit(
    fresh_master: Master, admin: api.Session, query: dict[str, int], ids: list[int]
) -> None:
    (fresh_master.services.state_dir / "master.log").write_text(_LOG)
    assert [answer.logEntry.id for answer in bindings.get_MasterLogs(admin, **query)] == ids


def test_master_log_is_followed(fresh_master: Master, admin: api.Session) -> None:
    path = fresh_master.services.state_dir / "master.log"
    path.write_text(_LOG)
    answers = iter(bindings.get_MasterLogs(admin, follow=True, offset=-1, limit=3))
    assert next(answers).logEntry.id == 4
    with path.open("a") as file:
        file.write("2026-11-21T02:00:03.000 INFO x: new\n2026-11-21T02:00:04.000 INFO x: half")
    with path.open("a") as file:
        file.write(" a line\n")
    assert [answer.logEntry.message for answer in answers] == ["x: new", "x: half a line"]


def test_health_without_database_logs_one_line(
    fresh_master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_master.change("ALTER TABLE cluster RENAME TO gone")

    health = fresh_master.get("/health", None)

    assert health.status == 503
    assert "the database does not answer (no such table: cluster)" in health.error
    (told,) = [record for record in caplog.records if "is answered" in record.getMessage()]
    assert told.getMessage() == f"GET /health is answered 503: {health.error}"
    assert not told.exc_info
