"""The lab's server: the page, and the simulator behind one route."""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from hopon.lab.page import render
from hopon.lab.play import Setting, choices, run

MOST_BYTES = 16_384
"""Longest body of a setting."""


async def _page(request: Request) -> Response:
    return HTMLResponse(render("lab", choices()), headers={"cache-control": "no-store"})


async def _run(request: Request) -> Response:
    """A setting in JSON -> its timelines; 400 with a sentence where it cannot work."""
    if request.headers.get("content-type") != "application/json":  # pages of other sites cannot send this one
        return JSONResponse({"error": "send a setting with the header content-type: application/json"}, 415)
    body = await request.body()
    if len(body) > MOST_BYTES:
        return JSONResponse({"error": f"a setting has at most {MOST_BYTES} bytes, got {len(body)}"}, 413)
    try:
        setting = msgspec.json.decode(body, type=Setting)
        found = await run_in_threadpool(run, setting)
    except (ValueError, msgspec.MsgspecError) as error:
        return JSONResponse({"error": str(error)}, 400)
    return Response(msgspec.json.encode(found), media_type="application/json")


def create_app() -> Starlette:
    """The ASGI application."""
    routes = [Route("/", _page), Route("/api/run", _run, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, compresslevel=3)])
