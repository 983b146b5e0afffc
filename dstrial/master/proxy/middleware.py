"""The application in front of the API, which sends proxied paths to services.

Requests of the proxy are held to the same rules as those of the API: a loopback name, a user's token or the cookie of the
master's own page. The token itself never reaches a service.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.errors import error_response, status_and_text
from dstrial.master.proxy import targets as named
from dstrial.master.proxy.http_proxy import ServiceGoneError, relay
from dstrial.master.services import Services
from dstrial.master.web.page import ended_page, login_page, task_state, waiting_page

logger = logging.getLogger("dstrial.master.proxy")

INTERACTIVE = "/det/interactive/"
"""What ``det tensorboard start`` and ``open`` open in the browser: a page that waits, and goes to the service."""


class Front:
    """Answers requests of the proxy, and hands the others on.

    Args:
        services: of the running master.
        api: answers everything else.
    """

    def __init__(self, services: Services, api: ASGIApp) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not path.startswith((named.PREFIX, INTERACTIVE)):
            await self._api(scope, receive, send)
            return
        # The boundary of a request: what went wrong is told to the log, and to the client only if it is to blame.
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            response = await self._answer(scope, receive, watched)
        except ServiceGoneError:
            # The server closes a connection whose answer is not complete.
            return
        except Exception as error:
            if has_begun:
                raise
            problem = status_and_text(error)
            if problem.status >= 500 and problem.status != 503:
                logger.exception("%s %s is answered %d", scope["method"], path, problem.status)
            response = error_response(problem)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        headers = Headers(scope=scope)
        access.check_host_and_origin(headers)
        is_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        changes_nothing = scope["method"] in ("GET", "HEAD", "OPTIONS")
        try:
            identity = await access.identify(
                self._services, headers, "GET" if changes_nothing else scope["method"]
            )
        except RequestError as error:
            if error.status == 401 and is_page:
                return login_page(self._services, 401)
            raise
        if identity.allocation is not None:
            raise RequestError(
                403,
                "an allocation's token does not open the proxy; expected a user's. Use DET_USER_TOKEN in a task.",
            )
        raw = scope["raw_path"].split(b"?", 1)[0].decode("latin-1")
        if raw.startswith(INTERACTIVE):
            return await self._interactive(raw)
        name = named.service_of(raw)
        service = await self._services.read(named.find, name)
        self._services.activity.touch(service.task_id)
        if "/" not in raw[len(named.PREFIX) :]:
            return RedirectResponse(f"{raw}/", status_code=307)
        if not service.is_ready and is_page:
            return waiting_page(service.task_id)
        await relay(service, scope, receive, send)
        self._services.activity.touch(service.task_id)
        return None

    async def _interactive(self, raw: str) -> Response:
        task_id = raw[len(INTERACTIVE) :].partition("/")[0]
        state = await self._services.read(task_state, task_id)
        if state == "ready":
            return RedirectResponse(f"{named.PREFIX}{task_id}/", status_code=307)
        if state == "ended":
            return ended_page(task_id)
        return waiting_page(task_id)
