"""What happens to every HTTP request before and after the routes: who may come in, how much is read, what is logged.

Knows HTTP and keys; the routes are in :mod:`hopon.serve.app`. Whatever goes wrong inside, a client is told a number
under which the log has the details, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
import traceback
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hopon.serve import openai as api
from hopon.serve.access_log import AccessLog, Facts
from hopon.serve.keys import Keys

OPEN_PATHS = frozenset(("/health", "/ready", "/lab"))
"""Open without a key: for probes, and a page that shows nothing before it was told a key."""

MAX_DEPTH = 64
"""Lists and objects within each other in a body."""


class Door:
    """Wraps the application.

    Args:
        app: the routes.
        keys: of the server.
        admit: called for requests to ``busy_paths`` before their body is read; raises ApiError to refuse.
        busy_paths: routes that make the engine work.
        max_body_bytes: longest body.
        read_timeout: seconds within which a body must be there.
        log: one line per request.
        responded: told the status of every answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        admit: Callable[[float], None],
        busy_paths: frozenset[str],
        max_body_bytes: int,
        read_timeout: float,
        log: AccessLog,
        responded: Callable[[int], None] = lambda status: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._admit = admit
        self._busy_paths = busy_paths
        self._limit = max_body_bytes
        self._read_timeout = read_timeout
        self._log = log
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = scope["hopon.arrival"] = time.monotonic()
        facts = scope["hopon.facts"] = Facts()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
            await send(message)

        try:
            await self._handle(scope, receive, noting, facts)
        except api.ApiError as error:
            facts.error = error.message
            await answer(error)(scope, receive, noting)
        except Exception:
            failure = facts.error or failure_name()
            print(f"hopon: {failure}\n{traceback.format_exc()}", end="", file=sys.stderr, flush=True)
            facts.error = failure
            if facts.status is None:
                await answer(internal_error(failure))(scope, receive, noting)
        finally:
            if facts.status is None:
                facts.status = 499
            self._responded(facts.status)
            self._log.write(scope["method"], scope["path"], time.monotonic() - arrival, facts)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, facts: Facts) -> None:
        path = scope["path"]
        if self._keys and path not in OPEN_PATHS:
            facts.key = self._keys.name(scope["headers"])
            if facts.key is None:
                error = api.ApiError(401, "an API key is needed: send it as 'authorization: Bearer KEY'")
                error.headers["www-authenticate"] = "Bearer"
                raise error
        if path in self._busy_paths and scope["method"] == "POST":
            self._admit(scope["hopon.arrival"])
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
                raise self._too_long(int(value))
        try:
            async with asyncio.timeout(self._read_timeout):
                body = await self._read(receive)
        except TimeoutError:
            error = api.ApiError(408, f"the body was not there within {self._read_timeout:g} s")
            error.headers["connection"] = "close"
            raise error from None
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None when the client leaves first."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                raise self._too_long(len(body))
        return bytes(body)

    def _too_long(self, size: int) -> api.ApiError:
        error = api.ApiError(413, f"the body has {size} bytes or more; at most {self._limit} are accepted")
        error.headers["connection"] = "close"
        return error


def answer(error: api.ApiError) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error.body(), error.status, error.headers)


def failure_name() -> str:
    """A name for something that went wrong, for the client and for the log."""
    return f"failure {secrets.token_hex(6)}"


def internal_error(failure: str) -> api.ApiError:
    """What a client is told."""
    return api.ApiError(500, f"the server made a mistake; its log has the details under '{failure}'")


def check_body(body: bytes, parsed: object) -> None:
    """Raise ApiError for what JSON allows and nobody can use; ``parsed`` is what the body says.

    That is: lists and objects too deep within each other, and halves of surrogate pairs, which are no text.
    """
    if b"\\u" in body:
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise api.ApiError(
                400, "the body has half of a surrogate pair (such as \\ud800), which is no text"
            ) from None
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    level: list[object] = [parsed]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += [item for item in value.values() if isinstance(item, dict | list)]
            elif isinstance(value, list) and not set(map(type, value)) <= {int, str, float}:
                below += [item for item in value if isinstance(item, dict | list)]
        if not below:
            return
        level = below
    raise too_deep()


def too_deep() -> api.ApiError:
    """The error for such a body."""
    return api.ApiError(400, f"the body has more than {MAX_DEPTH} lists and objects within each other")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive function that yields a body that has been read already, then whatever comes."""
    waiting = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False} if waiting else await receive()

    return replay
