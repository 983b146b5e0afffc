"""Passwords, logins and tokens of users."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from determined.common import api
from determined.common.api import authentication, errors
from serving import Master, serving

from dstrial.master.store import tokens, users


def test_client_hash_matches_determined_client() -> None:
    assert users.client_hash("Secret-1") == api.salt_and_hash("Secret-1")
    assert users.client_hash("") == ""


def test_stored_hash_is_salted_and_hides_password() -> None:
    hashed = users.client_hash("Secret-1")
    one, two = users.stored_hash(hashed), users.stored_hash(hashed)
    assert one != two
    assert hashed not in one
    assert users.is_password(one, hashed)
    assert users.is_password(two, hashed)
    assert not users.is_password(one, users.client_hash("secret-1"))
    assert not users.is_password(one, "")
    assert not users.is_password("", hashed)
    assert users.is_password("", "")


process = pytest.mark.process


def _log_in(master: Master, body: dict[str, Any]) -> Any:
    return master.send("POST", "/api/v1/auth/login", body)


@process
def test_client_logs_in_with_credentials_file_passwords(fresh_master: Master) -> None:
    path = fresh_master.services.state_dir / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    passwords = json.loads(path.read_text())
    assert set(passwords) == {"determined", "admin"}
    assert len(set(passwords.values())) == 2
    assert min(map(len, passwords.values())) >= 20
    for username, password in passwords.items():
        session = authentication.login(fresh_master.address, username, password)
        me = session.get("api/v1/me").json()["user"]
        assert (me["username"], me["admin"]) == (username, username == "admin")
    with pytest.raises(errors.UnauthenticatedException):
        authentication.login(fresh_master.address, "determined", "wrong")


@process
def test_master_without_passwords_writes_no_credentials_file(tmp_path: Path) -> None:
    with serving(tmp_path / "state", has_passwords=False) as master:
        assert authentication.login(master.address, "determined", "").get("api/v1/me").status_code == 200
        assert not (master.services.state_dir / "credentials.json").exists()


@process
def test_login_with_plain_password_sets_strict_cookie(fresh_master: Master) -> None:
    answer = _log_in(fresh_master, {"username": "OTHER", "password": "Other-password-1"})
    assert answer.status == 200
    assert answer.json["user"]["username"] == "other"
    assert fresh_master.get("/api/v1/me", answer.json["token"]).status == 200
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@process
@pytest.mark.parametrize(
    "body",
    [
        {"username": "other", "password": "wrong"},
        {"username": "other", "password": ""},
        {"username": "other"},
        {"username": "nobody", "password": "Other-password-1"},
        {"username": "other", "password": "Other-password-1", "isHashed": True},
    ],
)
def test_login_wrong_credentials_return_uniform_401(served: Master, body: dict[str, Any]) -> None:
    answer = _log_in(served, body)
    assert answer.status == 401
    assert answer.error == "invalid credentials"


@process
def test_login_of_inactive_user_returns_403(fresh_master: Master) -> None:
    user_id = fresh_master.rows("SELECT id FROM users WHERE username = 'other'")[0]["id"]
    answer = fresh_master.send("PATCH", f"/api/v1/users/{user_id}", {"active": False}, token="admin")
    assert answer.status == 200
    answer = _log_in(fresh_master, {"username": "other", "password": "Other-password-1"})
    assert (answer.status, answer.error) == (403, "user is not active")
    assert fresh_master.get("/api/v1/me", "other").status == 401


@process
def test_logout_revokes_only_its_token(fresh_master: Master) -> None:
    other = fresh_master.services.database.write(lambda tx: tokens.create_token(tx, 2))
    assert fresh_master.send("POST", "/api/v1/auth/logout", token="determined").status == 200
    assert fresh_master.get("/api/v1/me", "determined").status == 401
    assert fresh_master.get("/api/v1/me", other).status == 200
