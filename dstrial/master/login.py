"""Logs the user in with ``det``: this master's entries in its token store.

``det`` keeps tokens by address, and a master has two: ``localhost`` and ``127.0.0.1``. An entry that this master did not issue
is a login to another master and is replaced only with the user's consent.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable
from typing import Any

from dstrial.errors import MasterError, RequestError
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

USERNAME = "determined"  # The user as whom the operating system's user is logged in; not an administrator


class Login(enum.Enum):
    ADDED = enum.auto()
    KEPT = enum.auto()
    REPLACED = enum.auto()
    FOREIGN = enum.auto()  # It belongs to another master and stays
    REFUSED = enum.auto()  # There is none, as the master gives this user no token


def addresses_of(port: int) -> tuple[str, str]:
    return f"http://localhost:{port}", f"http://127.0.0.1:{port}"


def log_in(record: MasterRecord, may_replace: Callable[[str], bool]) -> dict[str, Login]:
    """Make ``det`` know this master by both addresses; return address -> result.

    An entry with a token that this master accepts stays, whoever its user is. ``may_replace`` is asked with an address whose
    entry belongs to another master.

    Source: Determined 0.38.1 determined.common.api.authentication.TokenStore (file and places), ``det`` addresses
    of the form ``http://host:port``.
    """
    outcome: dict[str, Login] = {}
    known: tuple[str, str] | None = None
    missing = []
    for address in addresses_of(record.port):
        store = _token_store(address)
        user = _accepted_user(store, record)
        if user is not None:
            if store.get_active_user() not in store.get_all_users():
                store.set_active(user)
            known = known or (user, str(store.get_token(user)))
            outcome[address] = Login.KEPT
        elif store.get_all_users() and not may_replace(address):
            outcome[address] = Login.FOREIGN
        else:
            outcome[address] = Login.REPLACED if store.get_all_users() else Login.ADDED
            missing.append((address, store))
    if missing:
        with contextlib.suppress(RequestError):  # A login at the other name serves as well.
            known = USERNAME, new_token(record)
    for address, store in missing:
        if known is None:
            outcome[address] = Login.REFUSED
            continue
        for user in store.get_all_users():
            store.drop_user(user)
        store.set_token(*known)
        store.set_active(known[0])
    return outcome


def log_in_as(record: MasterRecord, username: str) -> None:
    """Make a user active at both of a master's addresses, and keep others."""
    token: str | None = None
    for address in addresses_of(record.port):
        store = _token_store(address)
        kept = store.get_token(username) if username in store.get_all_users() else None
        if kept is None or not is_accepted(record, kept):
            token = token or new_token(record, username)
            store.set_token(username, token)
        store.set_active(username)


def _token_store(address: str) -> Any:
    from determined.common.api import authentication, errors

    try:
        return authentication.TokenStore(address)
    except errors.CorruptTokenCacheException as error:
        raise MasterError(
            "det's token store auth.json was damaged and is removed; expected JSON of version 2. Log in again with "
            "`dstrial login`."
        ) from error


def _accepted_user(store: Any, record: MasterRecord) -> str | None:
    """Return the user of an entry whose token this master accepts, active first."""
    users = sorted(store.get_all_users(), key=lambda user: user != store.get_active_user())
    return next((user for user in users if is_accepted(record, store.get_token(user))), None)


def is_accepted(record: MasterRecord, token: str) -> bool:
    try:
        Client(record.address, token, record.socket).get("/api/v1/me")
    except RequestError:
        return False
    return True


def new_token(record: MasterRecord, username: str = USERNAME) -> str:
    """Return a token for the directory's owner, through the UNIX socket."""
    client = Client(record.address, socket=record.socket)
    return str(client.post("/owner/login", {"username": username})["token"])


def browser_link(record: MasterRecord, username: str = USERNAME) -> str:
    """Return a browser's login link, valid once within ten minutes.

    The code stands behind the ``#``, which a browser keeps to itself: no request, log or ``Referer`` has it.
    """
    client = Client(record.address, socket=record.socket)
    code = str(client.post("/owner/link", {"username": username})["code"])
    return f"{record.address}/login#{code}"


def read_credentials(state: StateDirectory) -> dict[str, Any]:
    """Return username -> password of the first start; empty for blank passwords."""
    try:
        value = json.loads(state.credentials_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{state.credentials_path} holds no JSON object")
    return value


def session(record: MasterRecord) -> Client:
    """Return a client for ``det``'s logged-in user, else for ``determined``."""
    store = _token_store(record.address)
    user = store.get_active_user()
    token = store.get_token(user) if user is not None else None
    if token is None or not is_accepted(record, token):
        token = new_token(record)
    return Client(record.address, token)
