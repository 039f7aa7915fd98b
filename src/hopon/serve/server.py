"""One server from start to end: the engine process, the HTTP server, signals, the exit status.

The order is chosen for a quick start and quick failures: take the port, start the engine process, and only then import
the HTTP stack and read the tokenizer, while the engine loads its weights. It knows no model and reads no environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.serve.client import EngineClient
from hopon.serve.link import EngineError, EngineHandle, Progress, launch

if TYPE_CHECKING:
    import uvicorn

    from hopon.serve.service import Service
    from hopon.serve.tokenizer import Tokenizer

log = logging.getLogger("hopon.serve")

LINGER = 1.0
"""Seconds for which a server whose engine has died still answers, with 503, so that clients and probes learn why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What to serve, and where.

    Args:
        factory: executor factory, "package.module:function".
        engine: options of the engine; ``engine.model`` is a path.
        served_model_names: names for clients; the first one is shown. Default: the file's or folder's name.
        host, port: where to listen; port 0 takes a free one.
        sampling_defaults: "model" takes temperature, top_p, top_k, min_p and repetition_penalty that a request leaves
            open from the folder's ``generation_config.json``; "neutral" does not. Fields of a request always go first.
        max_body_bytes: longest request body.
        stall_timeout: seconds of silence after which a working engine counts as hung.
        step_timeout: seconds of silence after which it is ended and replaced; 0: never.
        max_queued_requests, max_queued_tokens: most that wait for a seat; None is the default for the engine's size,
            see :func:`hopon.serve.limits.default_queue`.
        queue_timeout, request_timeout: seconds for a seat, and for everything; 0 is no limit.
        read_timeout: seconds for a request's headers, and for its body.
        drain_timeout: seconds that open requests have to end after a SIGTERM.
        api_keys: keys that clients must send; none leaves the server open.
        isolate_keys: cached prefixes are shared under one API key only.
        fair_share: the engine is shared fairly between API keys, or between the ``user`` values of requests.
        allowed_origins: origins of web pages that may call the server.
        log_format: of a line per request on stderr.
        metrics_colon_names: metrics are called ``vllm:name``, as existing dashboards have them.
        request_traces: keep the newest requests' lives for GET /v1/requests/ID/trace.
        lab_page: a page for GET /lab, which shows the running engine; empty: there is none.
    """

    factory: str
    engine: EngineOptions
    served_model_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    sampling_defaults: Literal["model", "neutral"] = "model"
    max_body_bytes: int = 16 << 20
    stall_timeout: float = 60.0
    step_timeout: float = 0.0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    queue_timeout: float = 600.0
    request_timeout: float = 0.0
    read_timeout: float = 30.0
    drain_timeout: float = 25.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    isolate_keys: bool = False
    fair_share: Literal["none", "key", "user"] = "none"
    allowed_origins: tuple[str, ...] = ()
    log_format: Literal["none", "text", "json"] = "none"
    metrics_colon_names: bool = False
    request_traces: bool = False
    lab_page: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        least = {"max_queued_requests": 0, "max_queued_tokens": 1, "max_body_bytes": 1, "read_timeout": 0.001}
        least |= dict.fromkeys(
            ("queue_timeout", "request_timeout", "drain_timeout", "stall_timeout", "step_timeout"), 0
        )
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not value >= limit:
                raise ValueError(f"{name} must be at least {limit:g}, got {value}")
        if self.isolate_keys and not self.api_keys:
            raise ValueError("isolate_keys needs API keys, and there are none")
        if self.fair_share == "key" and not self.api_keys:
            raise ValueError("fair_share between keys needs API keys, and there are none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyServer:
    """What a started server is like.

    Args:
        url: its address.
        model_names: served names.
        summary: what the engine says of itself.
        notices: sentences that whoever started it should read.
    """

    url: str
    model_names: tuple[str, ...]
    summary: dict[str, str | int | float]
    notices: list[str] = field(default_factory=list)

    def curl(self) -> str:
        """A command line that works."""
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": self.model_names[0], "messages": messages, "max_tokens": 60, "temperature": 0})
        return f"curl {self.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


OnReady = Callable[[ReadyServer], None]


def run_server(options: ServerOptions, on_ready: OnReady | None = None, on_progress: Progress | None = None) -> int:
    """Serve until a signal.

    SIGTERM ends it in order: no request is taken any more, those that are open have the drain timeout to end, the rest
    get an error, the engine leaves, the status is 0. SIGINT does the same without waiting for anybody. A second signal
    ends everything at once (128 plus its number). An engine that dies is replaced. When it cannot load in the first
    place, or dies again and again without a token in between, the reason goes to stderr and the status is 1.

    Args:
        options: see there.
        on_ready: called when requests are accepted.
        on_progress: called while the model loads.

    Raises:
        OSError: the address cannot be used, or the tokenizer's files cannot be read.
        ValueError: the tokenizer is not supported.
    """
    _log_to_stderr()
    with _listen(options.host, options.port) as sock:
        handle = launch(options.factory, options.engine, traces=options.request_traces)
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Server(options, sock, handle).run(on_ready, on_progress))
        except EngineError as error:
            print(f"hopon: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            if handle.process.poll() is None:
                handle.process.kill()
                handle.process.wait()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class _Server:
    def __init__(self, options: ServerOptions, sock: socket.socket, handle: EngineHandle) -> None:
        self._options = options
        self._sock = sock
        self._handle = handle
        self._kill = handle.process.kill
        self._stop = asyncio.Event()
        self._patience = 0.0  # for open requests

    async def run(self, on_ready: OnReady | None, on_progress: Progress | None) -> int:
        """From loading to the end; returns the exit status."""
        with self._signals():
            loading = asyncio.create_task(self._load(on_progress))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await loading
                return 0
            stopping.cancel()
            client, service, notices = loading.result()
            self._kill = client.kill
            try:
                return await self._serve(client, service, notices, on_ready)
            finally:
                await client.close()

    async def _load(self, on_progress: Progress | None) -> tuple[EngineClient, Service, list[str]]:
        options = self._options
        loop = asyncio.get_running_loop()
        attaching = asyncio.create_task(
            EngineClient.attach(self._handle, on_progress, self._relaunch, options.step_timeout)
        )
        try:
            # In a thread: importing and reading take as long as some engines take to load.
            tokenizer = await loop.run_in_executor(
                None, _load_tokenizer, options.engine.tokenizer or options.engine.model
            )
            client = await attaching
        except BaseException:
            attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await (await attaching).close()
            raise
        from hopon.serve.keys import Keys
        from hopon.serve.service import Service, Settings

        model = Path(options.engine.model)
        defaults, notices = sampling_defaults(model) if options.sampling_defaults == "model" else ({}, [])
        if not tokenizer.vocabulary.chat_templates:
            notices.append("the model has no chat template: /v1/chat/completions answers 400, /v1/completions works")
        settings = Settings(
            model_names=options.served_model_names or (model.stem if model.suffix == ".gguf" else model.name,),
            defaults=defaults,
            max_body_bytes=options.max_body_bytes,
            stall_timeout=options.stall_timeout,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            queue_timeout=options.queue_timeout,
            request_timeout=options.request_timeout,
            read_timeout=options.read_timeout,
            keys=Keys(options.api_keys),
            isolate_keys=options.isolate_keys,
            fair_share=options.fair_share,
            allowed_origins=options.allowed_origins,
            log_format=options.log_format,
            metrics_colon_names=options.metrics_colon_names,
            request_traces=options.request_traces,
            lab_page=options.lab_page,
        )
        return client, Service(client, tokenizer, settings), notices

    def _relaunch(self, incarnation: int, config: SchedulerConfig) -> EngineHandle:
        """The next engine. It takes no other sizes than the first one: what fitted once must fit again."""
        options = replace(
            self._options.engine,
            num_kv_blocks=config.num_blocks,
            kv_cache_memory=None,
            max_model_len=config.max_model_len,
        )
        return launch(self._options.factory, options, incarnation=incarnation, traces=self._options.request_traces)

    async def _drain(self, client: EngineClient, service: Service) -> None:
        """Take no more requests, and let open ones end as far as they do in time."""
        service.gate.close("the server is shutting down")
        if client.num_open and self._patience:
            log.info("stopping: %d requests are open, they have %g s to end", client.num_open, self._patience)
            num_left = await client.drain(self._patience)
            log.info("stopping: %s", f"{num_left} requests are cut off" if num_left else "all requests have ended")
        await client.close()  # ends what is still open, so that nobody keeps the HTTP server

    async def _serve(self, client: EngineClient, service: Service, notices: list[str], on_ready: OnReady | None) -> int:
        server = _http_server(service)
        gc.collect()
        gc.freeze()  # modules and vocabulary stay; collections need not look at them again
        serving = asyncio.create_task(server.serve([self._sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if on_ready is not None and not serving.done():
            host, port = self._sock.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            names = service.settings.model_names
            on_ready(ReadyServer(url=url, model_names=names, summary=client.summary, notices=notices))
        stopping = asyncio.create_task(self._stop.wait())
        dying = asyncio.create_task(client.dead.wait())
        await asyncio.wait((serving, stopping, dying), return_when=asyncio.FIRST_COMPLETED)
        if client.dead.is_set():
            print(f"hopon: the engine has failed: {client.problem}", file=sys.stderr, flush=True)
            await asyncio.wait((stopping,), timeout=LINGER)
        else:
            await self._drain(client, service)
        server.should_exit = True
        await serving
        for task in (stopping, dying):
            task.cancel()
        return 1 if client.dead.is_set() else 0

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT asks to stop; the second one ends everything at once."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if self._stop.is_set():
                self._kill()
                os._exit(128 + number)
            self._patience = self._options.drain_timeout if number == signal.SIGTERM else 0.0
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _log_to_stderr() -> None:
    """Where nobody has said otherwise, show what the server does."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hopon: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _load_tokenizer(path: str) -> Tokenizer:
    import uvicorn  # noqa: F401 - imported here, in the thread, because it takes a while

    import hopon.serve.app  # noqa: F401
    from hopon.serve.tokenizer import Tokenizer

    return Tokenizer.load(path)


def _http_server(service: Service) -> uvicorn.Server:
    import uvicorn

    from hopon.serve.app import create_app
    from hopon.serve.http import LimitedProtocol

    class Protocol(LimitedProtocol):
        header_timeout = service.settings.read_timeout

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are ours

    config = uvicorn.Config(
        create_app(service),
        loop="none",
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=3,
    )
    return Server(config)


def sampling_defaults(model: Path) -> tuple[dict[str, float], list[str]]:
    """Sampling fields of a folder's ``generation_config.json``, and what to tell about them.

    Raises:
        ValueError: the file is not a JSON object.
    """
    path = model / "generation_config.json"
    if not path.is_file():
        return {}, []
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: content[name] for name in names if content.get(name) is not None}
    notices = []
    if defaults:
        listed = ", ".join(f"{name} {value}" for name, value in defaults.items())
        notices.append(f"where a request leaves them open, generation_config.json sets {listed}")
    return defaults, notices
