"""Browser login links: single use, ten minutes' lifetime, never stored on disk."""

from __future__ import annotations

import http.client
import json
import re
from urllib.parse import urlsplit

import pytest

from dstrial.errors import RequestError
from dstrial.master.client import Client
from dstrial.master.http.access import LIFETIME_S, LoginLinks, ServiceGrants
from dstrial.master.login import browser_link
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process


def code_of(master: MasterForTest, username: str = "determined") -> str:
    link = browser_link(master.record, username)
    assert link is not None
    return link.partition("/login#")[2]


def post(master: MasterForTest, code: object, **headers: str) -> http.client.HTTPResponse:
    url = urlsplit(master.address)
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=30)
    connection.request(
        "POST",
        "/api/v1/auth/link",
        json.dumps({"code": code}),
        {"Host": url.netloc, "Origin": f"http://{url.netloc}", **headers},
    )
    answer = connection.getresponse()
    answer.body = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_up_and_login_print_single_use_link(shared_master: MasterForTest) -> None:
    for command in ("up", "login"):
        told = shared_master.dstrial(command, "--state-dir", str(shared_master.state.path)).stdout
        found = re.search(r"browser: +(http://localhost:\d+)/login#(\S+) \(once, within 10 minutes\)", told)
        assert found is not None, told
        assert found[1] == shared_master.address

        answer = post(shared_master, found[2])

        assert answer.status == 200
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        token = cookie.partition("=")[2].partition(";")[0]
        assert Client(shared_master.address, token).get("/api/v1/me")["user"]["username"] == "determined"
        again = post(shared_master, found[2])
        assert again.status == 401
        assert "Set-Cookie" not in again.headers


@pytest.mark.parametrize("origin", ["", "http://localhost:1", "http://evil.example", "null"])
def test_login_code_from_foreign_origin_is_rejected(shared_master: MasterForTest, origin: str) -> None:
    code = code_of(shared_master)

    refused = post(shared_master, code, Origin=origin)

    assert refused.status == 403
    assert "Set-Cookie" not in refused.headers
    assert post(shared_master, code).status == 200


@pytest.mark.parametrize("code", ["", "x", "x" * 2000, None, 3, ["x"]])
def test_invalid_login_code_opens_no_session(shared_master: MasterForTest, code: object) -> None:
    answer = post(shared_master, code)

    assert answer.status in (400, 401, 413)
    assert "Set-Cookie" not in answer.headers


def test_login_link_requires_active_user(shared_master: MasterForTest) -> None:
    admin = shared_master.client("admin")
    given = {"username": "linked", "active": True, "admin": False}
    body = {"user": given, "password": "Long-enough-1", "isHashed": False}
    user = admin.post("/api/v1/users", body)["user"]
    code = code_of(shared_master, "linked")
    admin.send("PATCH", f"/api/v1/users/{user['id']}", body={"active": False})

    assert post(shared_master, code).status == 403
    with pytest.raises(RequestError, match="not active"):
        browser_link(shared_master.record, "linked")


def test_login_codes_expire_and_oldest_are_evicted() -> None:
    now = [0.0]
    links = LoginLinks(lambda: now[0])
    old = links.create(1)
    now[0] = LIFETIME_S + 1
    assert links.spend(old) is None

    codes = [links.create(number) for number in range(17)]

    assert [links.spend(code) for code in codes] == [None, *range(1, 17)]
    assert [links.spend(code) for code in codes] == [None] * 17


def test_service_grants_are_task_bound_and_lru_evicted() -> None:
    grants = ServiceGrants()
    first, kept = grants.create("token", "a"), grants.create("token", "a")
    assert (grants.token_of(first, "b"), grants.renew(first, "b")) == (None, None)
    for _ in range(1000):
        assert grants.token_of(kept, "a") == "token"
        grants.create("token", "a")
    assert (grants.token_of(first, "a"), grants.token_of(kept, "a")) == (None, "token")
