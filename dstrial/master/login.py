"""Log the operating system's user in with ``det``: the entries of this master in Determined's token store.

A master has two names, ``localhost`` and ``127.0.0.1``, and ``det`` keeps its tokens by name. An entry that this
master did not issue is somebody's login to another master and is replaced only with the user's consent.
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

USERNAME = "determined"
"""The user as whom the operating system's user is logged in; not an administrator."""


class Login(enum.Enum):
    """What became of one name's entry in the token store."""

    ADDED = enum.auto()
    KEPT = enum.auto()
    REPLACED = enum.auto()
    FOREIGN = enum.auto()
    """It belongs to another master and stays."""
    UNKNOWN = enum.auto()
    """There is none, as the password has been changed since the first start."""


def addresses_of(port: int) -> tuple[str, str]:
    """Return both names of a master, as ``det`` writes them."""
    return f"http://localhost:{port}", f"http://127.0.0.1:{port}"


def log_in(
    state: StateDirectory, record: MasterRecord, may_replace: Callable[[str], bool]
) -> dict[str, Login]:
    """Make ``det`` know this master under both of its names.

    Where an entry has a token that this master accepts, it stays as it is, whoever its user is.

    Args:
        state: where the passwords are.
        record: the running master.
        may_replace: asked with an address whose entry belongs to another master.

    Returns:
        Address -> what became of its entry.

    Raises:
        MasterError: the token store is damaged.

    Source: Determined 0.38.1 determined.common.api.authentication.TokenStore (file and places), ``det`` addresses
    of the form ``http://host:port``.
    """
    from determined.common.api import authentication, errors

    outcome: dict[str, Login] = {}
    known: tuple[str, str] | None = None
    missing = []
    for address in addresses_of(record.port):
        try:
            store = authentication.TokenStore(address)
        except errors.CorruptTokenCacheException as error:
            raise MasterError(
                "det's token store auth.json was damaged and is removed; expected JSON of version 2. Log in again with "
                "`det user login`."
            ) from error
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
        with contextlib.suppress(MasterError):  # A login at the other name serves as well.
            known = USERNAME, new_token(state, record)
    for address, store in missing:
        if known is None:
            outcome[address] = Login.UNKNOWN
            continue
        for user in store.get_all_users():
            store.drop_user(user)
        store.set_token(*known)
        store.set_active(known[0])
    return outcome


def _accepted_user(store: Any, record: MasterRecord) -> str | None:
    """Return the user of an entry whose token this master accepts, the active one first."""
    users = sorted(store.get_all_users(), key=lambda user: user != store.get_active_user())
    return next((user for user in users if is_accepted(record.address, store.get_token(user))), None)


def is_accepted(address: str, token: str) -> bool:
    """Whether the master at an address accepts a user's token."""
    try:
        Client(address, token).get("/api/v1/me")
    except RequestError:
        return False
    return True


def new_token(state: StateDirectory, record: MasterRecord) -> str:
    """Log in with the password of the credentials file and return the token.

    Raises:
        MasterError: the file cannot be read, or the password has been changed since.
    """
    try:
        password = read_credentials(state).get(USERNAME, "")
        body = {"username": USERNAME, "password": password, "isHashed": False}
        return str(Client(record.address).post("/api/v1/auth/login", body)["token"])
    except (RequestError, ValueError) as error:
        raise MasterError(
            f"the password of user {USERNAME!r} in {state.credentials_path} is not that of the master ({error}); expected "
            f"it unchanged. Log in with `det -m {record.address} user login {USERNAME}`."
        ) from error


def read_credentials(state: StateDirectory) -> dict[str, Any]:
    """Return username -> password as the first start made them; empty where passwords are blank.

    Raises:
        ValueError: the file holds no JSON object.
    """
    try:
        value = json.loads(state.credentials_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{state.credentials_path} holds no JSON object")
    return value


def session(state: StateDirectory, record: MasterRecord) -> Client:
    """Return a client that asks as the user who is logged in with ``det``, else as ``determined``.

    Raises:
        MasterError: nobody is logged in and the credentials file does not help.
    """
    from determined.common.api import authentication

    store = authentication.TokenStore(record.address)
    user = store.get_active_user()
    token = store.get_token(user) if user is not None else None
    if token is None or not is_accepted(record.address, token):
        token = new_token(state, record)
    return Client(record.address, token)
