"""Access tokens, managed with Determined's ``det`` command."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.common.api import bindings
from serving import Master

from dstrial.master.clock import now_us
from dstrial.master.store import users

pytestmark = pytest.mark.process

_DAY_US = 24 * 3600 * 1_000_000


@pytest.fixture
def admin(fresh_master: Master, tmp_path: Path) -> DetHere:
    return DetHere(fresh_master.address, "admin", fresh_master.tokens["admin"], tmp_path / "admin")


@pytest.fixture
def other(fresh_master: Master, tmp_path: Path) -> DetHere:
    return DetHere(fresh_master.address, "other", fresh_master.tokens["other"], tmp_path / "other")


def created(det: DetHere, *words: str) -> tuple[int, str]:
    made = json.loads(det.ok("token", "create", *words, "--json"))
    return made["tokenId"], made["token"]


def described(det: DetHere, token_id: int) -> dict[str, object]:
    rows = json.loads(det.ok("token", "describe", str(token_id), "--json"))
    assert len(rows) == 1, rows
    return dict(rows[0])


def test_token_created_by_det_authenticates_clients(
    fresh_master: Master, det: DetHere, tmp_path: Path
) -> None:
    shown = det.ok("token", "create", "--description", "nightly")
    found = re.fullmatch(r"TokenID: (\d+)\nAccess-Token: (\S+)\n", shown)
    assert found is not None, shown
    token = found[2]

    assert fresh_master.get("/api/v1/me", token).json["user"]["username"] == "determined"
    session = api.Session(fresh_master.address, "determined", token, None)
    assert bindings.get_GetExperiments(session).experiments
    fresh = DetHere(fresh_master.address, "determined", "", tmp_path / "fresh")
    assert "Authenticated as determined" in fresh.ok("token", "login", token)
    assert json.loads((tmp_path / "fresh" / "determined" / "auth.json").read_text())["masters"]
    assert "fuzz" in DetHere(fresh_master.address, "determined", token, tmp_path / "x").ok("e", "list")


def test_only_token_hash_is_stored(fresh_master: Master, det: DetHere) -> None:
    token_id, token = created(det)

    (row,) = fresh_master.rows("SELECT * FROM access_tokens")
    assert (row["id"], row["token_hash"]) == (token_id, hashlib.sha256(token.encode()).hexdigest())
    files = list(fresh_master.services.state_dir.glob("master.db*"))
    assert files
    assert all(token.encode() not in path.read_bytes() for path in files)
    assert token not in det.ok("token", "list", "--json") + json.dumps(described(det, token_id))


def test_token_lifespan_defaults_to_30_days(fresh_master: Master, det: DetHere) -> None:
    def days(token_id: int) -> float | None:
        (row,) = fresh_master.rows("SELECT * FROM access_tokens WHERE id = ?", token_id)
        if row["expires_us"] is None:
            return None
        return round((row["expires_us"] - row["created_us"]) / _DAY_US, 3)

    assert days(created(det)[0]) == 30
    assert days(created(det, "-e", "2")[0]) == 2
    never = created(det, "-e", "-1")[0]
    assert days(never) is None
    assert described(det, never)["expiry"] is None
    for lifespan in ("-3h", "0h", "48", "x", "2 h", "1h30m", "1e9h", "9999999999h", ""):
        body = {"userId": 2, "lifespan": lifespan}
        answer = fresh_master.send("POST", "/api/v1/tokens", body, token="determined")
        assert answer.status == 400, (lifespan, answer)
        assert "expected" in answer.error


def test_expired_access_token_is_rejected(fresh_master: Master, det: DetHere) -> None:
    token_id, token = created(det, "-e", "1")
    assert fresh_master.get("/api/v1/me", token).status == 200

    fresh_master.change("UPDATE access_tokens SET expires_us = ? WHERE id = ?", now_us() - 1, token_id)

    assert fresh_master.get("/api/v1/me", token).status == 401
    assert str(token_id) not in _ids(det.ok("token", "list", "--json"))
    assert str(token_id) in _ids(det.ok("token", "list", "--show-inactive", "--json"))
    assert "no longer active" in det.refused("token", "edit", str(token_id), "-d", "again")


def test_revoked_token_is_rejected(fresh_master: Master, det: DetHere) -> None:
    token_id, token = created(det)
    assert fresh_master.get("/api/v1/me", token).status == 200

    assert "Successfully revoked" in det.ok("token", "revoke", str(token_id))

    assert fresh_master.get("/api/v1/me", token).status == 401
    assert "no longer active" in det.run("token", "revoke", str(token_id)).stderr
    rows = json.loads(det.ok("token", "list", "--show-inactive", "--json"))
    assert [(row["id"], row["revoked"], row["tokenType"]) for row in rows] == [
        (token_id, True, "TOKEN_TYPE_ACCESS_TOKEN")
    ]


def test_token_description_is_edited_and_validated(fresh_master: Master, det: DetHere) -> None:
    token_id, _ = created(det, "-d", "first")
    det.ok("token", "edit", str(token_id), "-d", "second")
    assert described(det, token_id)["description"] == "second"
    assert "second" in det.ok("token", "list")
    det.ok("token", "edit", str(token_id))
    assert described(det, token_id)["description"] == "second"
    for text in ("x" * 10_000, "a\x1b[2Jb"):
        answer = fresh_master.send(
            "PATCH", f"/api/v1/tokens/{token_id}", {"description": text}, token="determined"
        )
        assert answer.status == 400, text[:20]
    assert "access token 999 is not found" in det.refused("token", "edit", "999", "-d", "x")


def test_users_manage_own_tokens_and_admins_all(
    fresh_master: Master, det: DetHere, admin: DetHere, other: DetHere
) -> None:
    mine, _ = created(det)
    theirs, token = created(admin, "other", "-d", "made by admin")
    assert fresh_master.get("/api/v1/me", token).json["user"]["username"] == "other"

    assert _ids(det.ok("token", "list", "--json")) == [str(mine)]
    assert _ids(other.ok("token", "list", "--json")) == [str(theirs)]
    assert _ids(admin.ok("token", "list", "--json")) == [str(mine), str(theirs)]
    assert _ids(admin.ok("token", "list", "other", "--json")) == [str(theirs)]
    assert json.loads(det.ok("token", "describe", str(theirs), "--json")) == []
    for words in (
        ("create", "admin"),
        ("list", "other"),
        ("edit", str(theirs), "-d", "x"),
        ("revoke", str(theirs)),
    ):
        done = det.run("token", *words)
        assert done.code != 0, words
        assert "no administrator" in done.stderr, done
    assert fresh_master.get("/api/v1/me", token).status == 200
    admin.ok("token", "revoke", str(theirs))
    assert fresh_master.get("/api/v1/me", token).status == 401


def test_password_change_and_deactivation_revoke_tokens(
    fresh_master: Master, det: DetHere, admin: DetHere
) -> None:
    _, old = created(det)
    _, kept = created(det)
    password = {"password": users.client_hash("Another-password-1"), "isHashed": True}
    assert fresh_master.send("PATCH", "/api/v1/users/2", password, token=kept).status == 200

    assert fresh_master.get("/api/v1/me", old).status == 401
    assert fresh_master.get("/api/v1/me", "determined").status == 401
    assert fresh_master.get("/api/v1/me", kept).status == 200
    admin.ok("user", "deactivate", "determined")
    assert fresh_master.get("/api/v1/me", kept).status in (401, 403)
    admin.ok("user", "activate", "determined")
    assert fresh_master.get("/api/v1/me", kept).status == 401
    admin.ok("user", "deactivate", "other")
    assert "not active" in admin.run("token", "create", "other").stderr


def test_logout_keeps_access_token(fresh_master: Master, det: DetHere) -> None:
    _, token = created(det)
    assert fresh_master.send("POST", "/api/v1/auth/logout", {}, token=token).status == 200
    assert fresh_master.get("/api/v1/me", token).status == 200


def test_access_and_task_tokens_cannot_create_tokens(fresh_master: Master, det: DetHere) -> None:
    for token in (created(det, "-e", "2")[1], "trial-1-user"):
        answer = fresh_master.send("POST", "/api/v1/tokens", {"userId": 2}, token=token)
        assert (answer.status, "outlive" in answer.error) == (403, True)


def test_token_list_is_sorted_and_paged(session: api.Session, det: DetHere) -> None:
    ids = [created(det, "-d", text, "-e", days)[0] for text, days in (("b", "3"), ("c", "1"), ("a", "2"))]

    def listed(**query: object) -> list[int]:
        found = bindings.get_GetAccessTokens(session, **query)  # type: ignore[arg-type]
        return [ids.index(one.id) for one in found.tokenInfo]

    sort = bindings.v1GetAccessTokensRequestSortBy
    assert listed() == [0, 1, 2]
    assert listed(sortBy=sort.DESCRIPTION) == [2, 0, 1]
    assert listed(sortBy=sort.EXPIRY, orderBy=bindings.v1OrderBy.DESC) == [0, 2, 1]
    assert listed(offset=1, limit=1) == [1]
    assert listed(tokenIds=[ids[2], ids[0]]) == [0, 2]


def _ids(text: str) -> list[str]:
    return [str(row["id"]) for row in json.loads(text)]
