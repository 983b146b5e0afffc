"""A master that does not answer now and may answer later: how that looks through Determined's client."""

from __future__ import annotations

_AWAY_STATUS = (502, 503, 504)


def is_away(error: Exception) -> bool:
    """Say whether an exception of Determined's client means that the master is away, and not that it refuses.

    Source: ``determined.common.api._session`` 0.38.1; exceptions of requests that it lets through are OSErrors.
    """
    from determined.common.api import errors

    if isinstance(error, errors.APIException):
        return error.status_code in _AWAY_STATUS
    is_lost = type(error) in (errors.BadRequestException, errors.MasterNotFoundException)
    return is_lost or isinstance(error, OSError)


def away_kinds() -> tuple[type[Exception], ...]:
    """Return what may be raised where the master is away; :func:`is_away` decides."""
    from determined.common.api import errors

    return (errors.BadRequestException, OSError)
