"""The HTTP routes, errors as OpenAI has them, and what happens to bodies before they are parsed.

Knows HTTP; what the routes do is in :mod:`hopon.serve.service`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import hopon
from hopon.serve import openai as api
from hopon.serve.access_log import AccessLog
from hopon.serve.door import Door, answer, check_body, failure_name, internal_error, too_deep
from hopon.serve.live import MOST_WATCHERS
from hopon.serve.metrics import Metrics
from hopon.serve.render import encode
from hopon.serve.service import Service

BUSY_PATHS = frozenset(("/v1/completions", "/v1/chat/completions"))
"""Routes that make the engine work."""


def create_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="hopon", version=hopon.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: api.CompletionRequest, request: Request) -> Response:
        """Continue texts or token sequences."""
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: api.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(body, request)

    @app.post("/tokenize", response_class=Response)
    async def tokenize(body: api.TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation as the chat template has it."""
        return Response(encode(await service.tokenize(body)), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: api.DetokenizeRequest) -> dict[str, str]:
        """The text of token ids."""
        return await service.detokenize(body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Special tokens and chat template, for clients that render and score by themselves."""
        return service.tokenizer_info()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served names."""
        return service.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of the served names."""
        return service.model(name)

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 when the engine lives and makes progress, else 503 with the reason. A busy engine is healthy."""
        problem = service.problem()
        return JSONResponse({"status": "error", "reason": problem}, 503) if problem else JSONResponse({"status": "ok"})

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 when requests are taken, else 503 with the reason: a restart, or a server that is shutting down."""
        obstacle = service.obstacle()
        return JSONResponse({"ready": not obstacle, "reason": obstacle}, 503 if obstacle else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Of hopon."""
        return {"version": hopon.__version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """How many answers are being made or waited for; one request with several counts for each of them."""
        return {"server_load": service.client.num_open}

    @app.get("/v1/requests/{answer_id:path}/trace")
    async def trace(answer_id: str, request: Request) -> dict[str, Any]:
        """The life of one request step by step; only where the server keeps them."""
        return service.trace(answer_id, request.scope["hopon.facts"].key)

    if (live := service.live) is not None:

        @app.get("/lab", response_class=HTMLResponse)
        async def lab() -> Response:
            """A page that shows the running engine. It asks for a key by itself."""
            return HTMLResponse(service.settings.lab_page, headers={"cache-control": "no-store"})

        @app.get("/lab/events", response_class=StreamingResponse)
        async def events() -> Response:
            """What the page shows, as server-sent events."""
            if live.is_full:
                raise api.ApiError(429, f"{MOST_WATCHERS} pages are open on this server already")
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(live.follow(), media_type="text/event-stream", headers=headers)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), media_type=Metrics.content_type)

    @app.exception_handler(api.ApiError)
    async def api_error(request: Request, error: api.ApiError) -> Response:
        return _told(request, error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return _told(request, _explain(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _told(request, api.ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def server_error(request: Request, error: Exception) -> Response:
        failure = request.scope["hopon.facts"].error = failure_name()  # it is raised again, and logged by the door
        return answer(internal_error(failure))

    settings = service.settings
    door = Door(
        app,
        keys=settings.keys,
        admit=service.admit,
        busy_paths=BUSY_PATHS,
        max_body_bytes=settings.max_body_bytes,
        read_timeout=settings.read_timeout,
        log=AccessLog(settings.log_format),
        responded=service.metrics.responded,
    )
    if not settings.allowed_origins:
        return door
    return CORSMiddleware(
        door,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-hopon-seed", "x-should-retry"),
    )


def _told(request: Request, error: api.ApiError) -> Response:
    request.scope["hopon.facts"].error = error.message
    return answer(error)


_SHAPES = {
    "stop": "a string or a list of strings",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
    "guided_json": "a JSON schema",
}
"""What to say of fields that may have several types."""


def _explain(error: RequestValidationError) -> api.ApiError:
    """One sentence about what is wrong with a body, naming the field."""
    entry = error.errors()[0]
    place = [str(part) for part in entry["loc"][1:]]  # the first part is "body"
    if entry["type"] == "json_invalid":
        return api.ApiError(400, f"the body is not valid JSON: {entry.get('ctx', {}).get('error', entry['msg'])}")
    if not place:
        return api.ApiError(400, "the body must be a JSON object, with the header content-type: application/json")
    param = place[0]
    where = param + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in place[1:] if "[" not in part)
    if param in _SHAPES and entry["type"] != "missing":
        return api.ApiError(400, f"{param} must be {_SHAPES[param]}", param)
    if entry["type"] == "extra_forbidden":
        return api.ApiError(400, f"unknown field {where[:80]!r}", where[:80])
    if entry["type"] == "missing":
        return api.ApiError(400, f"{where} is missing", param)
    if entry["type"] == "value_error":
        return api.ApiError(400, str(entry["ctx"]["error"]), param)
    return api.ApiError(400, f"{where}: {entry['msg']}", param)


class BodyRoute(APIRoute):
    """Routes whose requests are :class:`BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(BodyRequest(request.scope, request.receive))

        return handle


class BodyRequest(Request):
    """Parses large bodies four times as fast: no garbage collections among millions of new lists."""

    async def json(self) -> Any:
        """The parsed body."""
        body = await self.body()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            parsed = json.loads(body)
            check_body(body, parsed)
        except RecursionError:
            raise HTTPException(400, too_deep().message) from None
        except api.ApiError as error:
            raise HTTPException(error.status, error.message) from error  # others would be told in general terms
        finally:
            if was_enabled:
                gc.enable()
        return parsed
