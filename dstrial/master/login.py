"""Log ``det`` in: write a master's tokens to the token store of ``det``.

``det`` stores tokens by address, and a master has two addresses: ``localhost`` and ``127.0.0.1``. An entry whose token the
master rejects is treated as another master's, and is kept until the user runs ``dstrial login``.
"""

from __future__ import annotations

import contextlib
import enum
import json
from typing import Any

from dstrial.errors import MasterError, RequestError
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

USERNAME = "determined"  # default login of the state directory's owner; not an administrator


class Login(enum.Enum):
    """What ``log_in`` did with an address's entry in the token store of ``det``."""

    ADDED = enum.auto()
    KEPT = enum.auto()
    FOREIGN = enum.auto()  # the entry belongs to another master and was kept
    REFUSED = enum.auto()  # no entry: the master issued no token for this user


def addresses_of(port: int) -> tuple[str, str]:
    return f"http://localhost:{port}", f"http://127.0.0.1:{port}"


def log_in(record: MasterRecord) -> dict[str, Login]:
    """Log ``det`` in at both addresses of a master; return address -> outcome.

    An address without stored tokens gets a new token of user ``determined``. If the master issues none, the address gets the
    token of the other address. Stored tokens are never replaced, even if this master rejects them, as they may belong to
    another master.

    Source: Determined 0.38.1 determined.common.api.authentication.TokenStore.
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
        elif store.get_all_users():
            outcome[address] = Login.FOREIGN
        else:
            outcome[address] = Login.ADDED
            missing.append((address, store))
    if missing:
        with contextlib.suppress(RequestError):  # on an error, use the token of the other address, if any
            known = USERNAME, new_token(record)
    for address, store in missing:
        if known is None:
            outcome[address] = Login.REFUSED
            continue
        store.set_token(*known)
        store.set_active(known[0])
    return outcome


def log_in_as(record: MasterRecord, username: str) -> None:
    """Make a user the active user of ``det`` for a master; keep other users' tokens.

    If the user's stored token is missing or rejected, request a new one.
    """
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
    """Return a user whose stored token the master accepts, preferably the active user."""
    users = sorted(store.get_all_users(), key=lambda user: user != store.get_active_user())
    return next((user for user in users if is_accepted(record, store.get_token(user))), None)


def is_accepted(record: MasterRecord, token: str) -> bool:
    try:
        Client(record.address, token, record.socket).get("/api/v1/me")
    except RequestError:
        return False
    return True


def new_token(record: MasterRecord, username: str = USERNAME) -> str:
    """Return a new session token of a user, requested through the owner's UNIX socket."""
    client = Client(record.address, socket=record.socket)
    return str(client.post("/owner/login", {"username": username})["token"])


def browser_link(record: MasterRecord, username: str = USERNAME) -> str:
    """Return a one-time login link for browsers, valid for ten minutes.

    The code is in the URL fragment, which browsers do not send; thus it is in no log or ``Referer`` header.
    """
    client = Client(record.address, socket=record.socket)
    code = str(client.post("/owner/link", {"username": username})["code"])
    return f"{record.address}/login#{code}"


def read_credentials(state: StateDirectory) -> dict[str, Any]:
    """Return username -> generated password of the master's first users.

    {} if the first users have blank passwords.
    """
    try:
        value = json.loads(state.credentials_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{state.credentials_path} holds no JSON object")
    return value


def session(record: MasterRecord) -> Client:
    """Return a client with the token of ``det``'s active user.

    If the master does not accept this token, the client has a new token of user ``determined``.
    """
    store = _token_store(record.address)
    user = store.get_active_user()
    token = store.get_token(user) if user is not None else None
    if token is None or not is_accepted(record, token):
        token = new_token(record)
    return Client(record.address, token)
