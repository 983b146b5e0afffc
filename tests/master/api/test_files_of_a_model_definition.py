"""Files of a model definition are shown one by one, and nothing else is."""

from __future__ import annotations

import base64
import io
import tarfile
from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from serving import Master

from dstrial.context_directory import MAX_BYTES
from dstrial.master.backends.model_definition import MAX_SHOWN_BYTES

pytestmark = pytest.mark.process
CONFIG = "entrypoint: 'true'\nsearcher: {name: single, metric: loss}\n"
PNG = b"\x89PNG\r\n\x1a\n\x00\x00"


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)


def sent(path: str, content: bytes | None) -> bindings.v1File:
    return bindings.v1File(
        path=path,
        content=base64.b64encode(content or b"").decode(),
        type=53 if content is None else 48,
        mtime="86400",
        mode=0o644,
        uid=0,
        gid=0,
    )


def submitted(session: api.Session, *files: tuple[str, bytes | None]) -> int:
    body = bindings.v1CreateExperimentRequest(
        config=CONFIG, activate=False, modelDefinition=[sent(*file) for file in files]
    )
    return bindings.post_CreateExperiment(session, body=body).experiment.id


def archive(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for member in members:
            made.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, link, size
    return found


def store(master: Master, tgz: bytes) -> None:
    """Have experiment 1 a model definition that no client could send."""
    master.change("UPDATE model_definitions SET tgz = ? WHERE experiment_id = 1", tgz)


def shown(session: api.Session, experiment_id: int) -> list[dict[str, Any]]:
    tree = bindings.get_GetModelDefTree(session, experimentId=experiment_id)
    return [one.to_json(omit_unset=True) for one in tree.files or []]


def paths(nodes: list[dict[str, Any]]) -> list[str]:
    return [path for node in nodes for path in (node["path"], *paths(node["files"]))]


def content(session: api.Session, experiment_id: int, path: str) -> bytes:
    body = bindings.v1GetModelDefFileRequest(path=path, experimentId=experiment_id)
    file = bindings.post_GetModelDefFile(session, body=body, experimentId=experiment_id).file
    assert file is not None
    return base64.b64decode(file)


def test_the_files_of_a_submission_are_a_tree_and_can_be_read(session: api.Session) -> None:
    code = "größe = 1\n".encode()
    experiment_id = submitted(
        session, ("code", None), ("code/train.py", code), ("a b/ü.png", PNG), ("exp.yaml", b"")
    )
    files = shown(session, experiment_id)
    assert paths(files) == ["a b", "a b/ü.png", "code", "code/train.py", "exp.yaml"]
    (folder, written, config) = files
    assert folder["isDir"]
    assert (folder["files"][0]["name"], folder["files"][0]["contentType"]) == ("ü.png", "image/png")
    assert written["files"] == [
        {
            "path": "code/train.py",
            "name": "train.py",
            "isDir": False,
            "contentLength": len(code),
            "contentType": "text/plain; charset=utf-8",
            "modifiedTime": "1970-01-02T00:00:00.000000Z",
            "files": [],
        }
    ]
    assert (config["contentLength"], config["contentType"]) == (0, "text/plain; charset=utf-8")
    assert content(session, experiment_id, "code/train.py") == code
    assert content(session, experiment_id, "./a b//ü.png") == PNG
    assert content(session, experiment_id, "exp.yaml") == b""


def test_an_experiment_without_files_has_an_empty_tree(session: api.Session, fresh_master: Master) -> None:
    store(fresh_master, b"")
    assert shown(session, 1) == []
    with pytest.raises(errors.NotFoundException):
        content(session, 1, "train.py")


@pytest.mark.parametrize("path", ["../secret", "code/../../secret", "/etc/passwd", "", "a\0b", "x" * 2000])
def test_a_path_that_leads_out_is_refused(session: api.Session, path: str) -> None:
    experiment_id = submitted(session, ("train.py", b"x = 1\n"))
    with pytest.raises(errors.APIException) as refused:
        content(session, experiment_id, path)
    assert refused.value.status_code == 400


def test_pack_path_depth_over_100_is_refused(session: api.Session) -> None:
    submitted(session, ("a/" * 100 + "train.py", b""))
    with pytest.raises(errors.APIException, match="100 directories"):
        submitted(session, ("a/" * 101 + "train.py", b""))


def test_pack_below_marked_directory_is_left_out(session: api.Session) -> None:
    names = ["env/pyvenv.cfg", "env/bin/python", "env-2/kept.py", "a/b/pyvenv.cfg", "a/b", "a/c.py"]
    experiment_id = submitted(session, *((name, b"") for name in names))
    assert paths(shown(session, experiment_id)) == ["a", "a/c.py", "env-2", "env-2/kept.py"]


def test_links_and_what_leads_out_are_neither_shown_nor_read(
    session: api.Session, fresh_master: Master
) -> None:
    store(
        fresh_master,
        archive(
            member("../out.py", size=1),
            member("/etc/out.py", size=1),
            member("soft", tarfile.SYMTYPE, "/etc/passwd"),
            member("hard", tarfile.LNKTYPE, "in.py"),
            member("pipe", tarfile.FIFOTYPE),
            member("in.py", size=1),
        ),
    )
    assert paths(shown(session, 1)) == ["in.py"]
    for path in ("soft", "hard", "pipe"):
        with pytest.raises(errors.APIException, match="expected a file"):
            content(session, 1, path)
    for path in ("out.py", "etc/out.py", "soft/x"):
        with pytest.raises(errors.NotFoundException):
            content(session, 1, path)
    assert content(session, 1, "in.py") == b"x"


def test_a_directory_is_no_file(session: api.Session) -> None:
    experiment_id = submitted(session, ("code/train.py", b"x = 1\n"))
    with pytest.raises(errors.APIException, match="is a directory"):
        content(session, experiment_id, "code")


@pytest.mark.parametrize(
    "tgz", [b"tgz", b"\x1f\x8b", archive(member("a", size=9))[:-30]], ids=["text", "magic", "cut short"]
)
def test_a_damaged_archive_is_told_of(session: api.Session, fresh_master: Master, tgz: bytes) -> None:
    store(fresh_master, tgz)
    for ask in (lambda: shown(session, 1), lambda: content(session, 1, "a")):
        with pytest.raises(errors.APIException, match="is damaged"):
            ask()


def test_what_unpacks_to_too_much_is_refused(session: api.Session, fresh_master: Master) -> None:
    store(fresh_master, archive(member("large", size=MAX_SHOWN_BYTES + 1)))
    assert paths(shown(session, 1)) == ["large"]
    with pytest.raises(errors.APIException, match="of a file that is shown"):
        content(session, 1, "large")
    store(fresh_master, archive(member("larger", size=MAX_BYTES + 1)))
    with pytest.raises(errors.APIException, match="too large"):
        shown(session, 1)


def test_files_are_for_whom_the_experiment_is(served: Master) -> None:
    tree, file = "/api/v1/experiments/1/file_tree", "/api/v1/experiments/1/file"
    assert served.get(tree, None).status == 401
    assert served.get(tree, "trial-2").status == 403
    assert served.get("/api/v1/experiments/99/file_tree").status == 404
    assert served.send("POST", file, {"path": "a"}).status == 401
    assert served.send("POST", file, {"path": "a"}, token="trial-1").status == 403
    other = served.send("POST", "/api/v1/experiments/99/file", {"path": "a"}, token="determined")
    assert other.status == 404
    for body in ({}, {"path": 1}, {"path": "a", "experimentId": 2}):
        assert served.send("POST", file, body, token="determined").status == 400
