"""The model registry, used with Determined's SDK and ``det`` command."""

from __future__ import annotations

import pytest
from det_here import DetHere
from determined.common.api import errors
from determined.experimental import client
from serving import Master

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("name", "status"), [("NET", 409), ("", 400), ("  ", 400), ("a/b", 400), ("17", 400)]
)
def test_invalid_or_duplicate_model_name_is_rejected(fresh_master: Master, name: str, status: int) -> None:
    for asked, expected in (("net", 200), (name, status)):
        body = {"name": asked}
        assert fresh_master.send("POST", "/api/v1/models", body, token="determined").status == expected


def test_model_version_numbers_are_never_reused(determined: client.Determined, fresh_master: Master) -> None:
    model = determined.create_model("net")
    assert model.get_version() is None
    first = model.register_version(fresh_master.checkpoints[1])
    second = model.register_version(fresh_master.checkpoints[2])
    assert (first.model_version, second.model_version, second.model_id) == (1, 2, model.model_id)
    assert second.checkpoint is not None
    assert second.checkpoint.uuid == fresh_master.checkpoints[2]

    second.set_name("the second")
    second.set_notes("# notes")
    found = model.get_version(2)
    assert found is not None
    assert (found.name, found.notes) == ("the second", "# notes")
    found.delete()
    third = model.register_version(fresh_master.checkpoints[2])
    assert third.model_version == 3
    assert [one.model_version for one in model.list_versions()] == [3, 1]
    assert [one.model_version for one in model.list_versions(client.OrderBy.ASC)] == [1, 3]
    latest = model.get_version()
    assert latest is not None
    assert latest.model_version == 3
    with pytest.raises(errors.NotFoundException):
        model.get_version(2)


def test_only_complete_checkpoints_are_registered(
    determined: client.Determined, fresh_master: Master
) -> None:
    model = determined.create_model("net")
    fresh_master.change(
        "UPDATE checkpoints SET state = 'PARTIALLY_DELETED' WHERE uuid = ?", fresh_master.checkpoints[1]
    )

    with pytest.raises(errors.APIException, match="is PARTIALLY_DELETED; expected a COMPLETED one"):
        model.register_version(fresh_master.checkpoints[1])
    with pytest.raises(errors.NotFoundException):
        model.register_version("none")
    fresh_master.change("UPDATE checkpoints SET state = 'COMPLETED', deleting_us = 1")
    with pytest.raises(errors.APIException, match="is being deleted; expected a COMPLETED one"):
        model.register_version(fresh_master.checkpoints[1])
    fresh_master.change("UPDATE checkpoints SET deleting_us = NULL")
    fresh_master.change("UPDATE experiments SET state = 'DELETING' WHERE id = 1")
    with pytest.raises(errors.APIException, match="is being deleted; expected a COMPLETED one"):
        model.register_version(fresh_master.checkpoints[1])
    assert model.list_versions() == []


def test_archived_model_is_read_only(determined: client.Determined, fresh_master: Master) -> None:
    model = determined.create_model("net")
    model.archive()
    assert determined.get_model("net").archived
    for change in (
        lambda: model.set_description("x"),
        lambda: model.register_version(fresh_master.checkpoints[1]),
    ):
        with pytest.raises(errors.APIException, match="is archived"):
            change()
    model.unarchive()
    model.set_description("x")
    assert determined.get_model("net").description == "x"


def test_only_owner_or_admin_deletes_or_archives_model(fresh_master: Master) -> None:
    body = {"name": "net"}
    assert fresh_master.send("POST", "/api/v1/models", body, token="determined").status == 200
    version = {"checkpointUuid": fresh_master.checkpoints[1]}
    assert fresh_master.send("POST", "/api/v1/models/net/versions", version, token="determined").status == 200
    for method, path in (
        ("POST", "/archive"),
        ("DELETE", "/versions/1"),
        ("DELETE", ""),
    ):
        assert fresh_master.send(method, f"/api/v1/models/net{path}", token="other").status == 403
    assert fresh_master.send("PATCH", "/api/v1/models/net", {"notes": "n"}, token="other").status == 200
    assert fresh_master.send("DELETE", "/api/v1/models/net", token="admin").status == 200


def test_registered_checkpoints_cannot_be_deleted(
    determined: client.Determined, fresh_master: Master, det: DetHere
) -> None:
    uuid = fresh_master.checkpoints[1]
    model = determined.create_model("net")
    version = model.register_version(uuid)
    fresh_master.change("UPDATE experiments SET state = 'COMPLETED', end_us = 2 WHERE id = 1")

    assert "is version 1 of model 'net'" in det.refused("checkpoint", "rm", "--yes", uuid, "--glob", "**/*")
    answer = fresh_master.send(
        "DELETE", "/api/v1/checkpoints", {"checkpointUuids": [uuid]}, token="determined"
    )
    assert (answer.status, "is version 1 of model 'net'" in answer.error) == (400, True)
    assert "registered as net version 1" in det.refused("experiment", "delete", "1", "--yes")
    assert fresh_master.rows("SELECT * FROM work") == []

    version.delete()
    answer = fresh_master.send(
        "DELETE", "/api/v1/checkpoints", {"checkpointUuids": [uuid]}, token="determined"
    )
    assert answer.status == 200
    det.ok("experiment", "delete", "1", "--yes")
    assert [row["kind"] for row in fresh_master.rows("SELECT kind FROM work ORDER BY id")] == [
        "delete_checkpoints",
        "delete_experiment",
    ]
