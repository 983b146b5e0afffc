"""Error responses: a status and one JSON shape, never a traceback."""

from __future__ import annotations

import dataclasses

from starlette.responses import Response

from dstrial.errors import DatabaseDamagedError, DstrialError, MasterError, RequestError
from dstrial.master import file_limit
from dstrial.master.http.messages import to_json
from dstrial.master.store.database import OperationalError
from dstrial.master.store.errors import ConflictError, InvalidError, NotFoundError, StoreError

_RETRY_AFTER_S = 1

_SQL_ERROR = 1  # SQLITE_ERROR: a wrong statement, so a retry cannot succeed

_STATUSES: dict[type[StoreError], int] = {NotFoundError: 404, ConflictError: 409, InvalidError: 400}

# HTTP status -> gRPC code and name, as in Determined's gateway.
_CODES = {
    400: (3, "InvalidArgument"),
    401: (16, "Unauthenticated"),
    403: (7, "PermissionDenied"),
    404: (5, "NotFound"),
    405: (12, "Unimplemented"),
    409: (6, "AlreadyExists"),
    413: (8, "ResourceExhausted"),
    429: (8, "ResourceExhausted"),
    500: (13, "Internal"),
    501: (12, "Unimplemented"),
    502: (14, "Unavailable"),
    503: (14, "Unavailable"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    status: int
    code: int
    reason: str
    text: str


def status_and_text(error: BaseException) -> Problem:
    """Return the HTTP status and message for an exception.

    Transient write failures are 503, which sessions in trials retry. Errors of the request are 4xx. All other exceptions are
    bugs: 500, with the cause in the master's log only.
    """
    if file_limit.is_shortage(error):
        return problem(503, file_limit.shortage() or str(error))
    if isinstance(error, RequestError):
        return problem(error.status, str(error))
    if isinstance(error, StoreError):
        return problem(_STATUSES[type(error)], str(error))
    if isinstance(error, DatabaseDamagedError):
        return problem(503, str(error))
    if isinstance(error, MasterError) or (isinstance(error, OperationalError) and _is_transient(error)):
        return problem(
            503, f"the master cannot answer now ({error}); expected it to. Send the request again."
        )
    if isinstance(error, DstrialError):
        return problem(400, str(error))
    if isinstance(error, OverflowError):
        return problem(
            400,
            "a number in the request is larger than the master can store; expected 64 bits. Send a smaller one.",
        )
    return problem(
        500, "the master has failed to answer this request; expected an answer. See why with `dstrial logs`."
    )


def _is_transient(error: OperationalError) -> bool:
    """Return whether a SQLite error is transient; always True before Python 3.11."""
    return getattr(error, "sqlite_errorcode", None) != _SQL_ERROR


def problem(status: int, text: str) -> Problem:
    code, reason = _CODES.get(status, (2, "Unknown"))
    return Problem(status, code, reason, text)


def error_response(refusal: Problem) -> Response:
    """Return an error response as Determined's client expects it: ``{"error": {…}}``."""
    body = {"error": {"code": refusal.code, "reason": refusal.reason, "error": refusal.text}}
    headers = {}
    if refusal.status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return Response(to_json(body), status_code=refusal.status, media_type="application/json", headers=headers)
