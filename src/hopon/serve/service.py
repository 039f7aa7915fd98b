"""What is behind the routes: validate, tokenize, submit, follow, answer.

Knows the API's rules; engines are behind :class:`hopon.serve.client.EngineClient`, routes in :mod:`hopon.serve.app`. A
request is refused before anything expensive happens where that is possible, and always before headers are sent: a
stream's headers wait for its first token. Whoever leaves has his request aborted, in whatever phase it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastapi import Request, Response
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from hopon.core.types import FinishReason, Guide
from hopon.core.types import Request as EngineRequest
from hopon.model.guide import GuideError, Guides
from hopon.serve import answers, render, wire
from hopon.serve import openai as api
from hopon.serve.access_log import Facts, LogFormat
from hopon.serve.chat import CLOSE
from hopon.serve.client import ConsumerGoneError, EngineClient, Ticket
from hopon.serve.door import answer
from hopon.serve.feed import Feed, Gathered
from hopon.serve.http import Writer
from hopon.serve.keys import Keys, label
from hopon.serve.limits import Cause, Claim, Gate, Limits, Place, TurnedAwayError, default_queue
from hopon.serve.link import EngineError
from hopon.serve.live import Live
from hopon.serve.metrics import Metrics
from hopon.serve.output import News, Output, TextOptions
from hopon.serve.prompts import Prompts, chat_texts, completion_texts, named_fields
from hopon.serve.slo import Judgement, Slo, judge
from hopon.serve.tokenizer import Tokenizer
from hopon.serve.tools import ToolUse, tool_use
from hopon.serve.trace import MAX_TRACES, Trace, Traces


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the routes need to know.

    Args:
        model_names: served names; the first one is shown.
        defaults: sampling defaults of the model, by field name.
        max_body_bytes: longest request body.
        stall_timeout: seconds without news of open requests after which the engine counts as hung.
        max_queued_requests, max_queued_tokens: see :class:`Limits`; None is the default for the engine's size.
        queue_timeout, request_timeout: see :class:`Limits`.
        read_timeout: seconds within which a body must be there.
        keys: API keys.
        isolate_keys: cached prefixes are shared under one API key only.
        fair_share: whose requests share the engine fairly: those of an API key, or of a ``user``.
        allowed_origins: of web pages that may call the server; none by default.
        log_format: of one line per request.
        metrics_colon_names: metrics are called ``vllm:name``.
        request_traces: keep the newest requests' lives for GET /v1/requests/ID/trace.
        lab_page: the page at /lab, which shows the running engine; empty: there is none.
    """

    model_names: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    max_body_bytes: int = 16 << 20
    stall_timeout: float = 60.0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    queue_timeout: float = 600.0
    request_timeout: float = 0.0
    read_timeout: float = 60.0
    keys: Keys = field(default_factory=Keys)
    isolate_keys: bool = False
    fair_share: Literal["none", "key", "user"] = "none"
    allowed_origins: tuple[str, ...] = ()
    log_format: LogFormat = "none"
    metrics_colon_names: bool = False
    request_traces: bool = False
    lab_page: str = field(default="", repr=False)


class Service:
    """Everything behind the routes.

    Args:
        client: a ready engine.
        tokenizer: of its model.
        settings: see there.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: Settings) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        requests, tokens = default_queue(client.config)
        self.gate = Gate(
            Limits(
                max_queued_requests=requests if settings.max_queued_requests is None else settings.max_queued_requests,
                max_queued_tokens=tokens if settings.max_queued_tokens is None else settings.max_queued_tokens,
                queue_timeout=settings.queue_timeout,
                request_timeout=settings.request_timeout,
            ),
            client.config.max_num_seqs,
        )
        self.places: dict[str, Place] = {}
        """Of the open requests, by the engine's id."""
        self.traces = Traces() if settings.request_traces else None
        self.live = Live(client, settings.model_names[0]) if settings.lab_page else None
        client.on_news = self._hear
        # Ids that both the tokenizer and the model know.
        vocab_size = min(tokenizer.vocab_size, int(client.summary.get("vocab_size", tokenizer.vocab_size)))
        self.prompts = Prompts(tokenizer, vocab_size, client.config.max_model_len)
        self.metrics = Metrics(client, self.gate, settings.model_names[0], colon_names=settings.metrics_colon_names)
        self.created = int(time.time())
        self._guides = Guides(lambda: tokenizer.vocabulary, int(client.summary.get("vocab_size", tokenizer.vocab_size)))
        self._guide_thread = ThreadPoolExecutor(1, thread_name_prefix="guide")
        self._num_requests = 0

    # ---- endpoints ----

    async def complete(self, body: api.CompletionRequest, http: Request) -> Response:
        """POST /v1/completions."""
        self._check(body)
        texts = completion_texts(body)
        if len(texts) * body.num_choices > api.MAX_OUTPUTS:
            message = f"n {body.num_choices} for {len(texts)} prompts: at most {api.MAX_OUTPUTS} answers in all"
            raise api.ApiError(400, message, "n")
        with self._entering(body, http, texts) as claim:
            guide = await self._guide(body, None)
            max_tokens = 1 if body.scores_only else body.max_tokens  # engines always generate; Output drops it
            prompts = [self.prompts.cut(prompt, body, max_tokens) for prompt in await self.prompts.completions(body)]
            longest = max(map(len, prompts))
            if max_tokens is None:
                max_tokens = max(1, min(16, self.client.config.max_model_len - longest))
            self.prompts.check_length(longest, max_tokens, "max_tokens")
            return await self._answer(body, http, prompts, max_tokens, "cmpl-", render.CompletionRenderer, claim, guide)

    async def chat(self, body: api.ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions."""
        self._check(body)
        with self._entering(body, http, ["".join(chat_texts(body))]) as claim:
            field_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            max_tokens = getattr(body, field_name)
            with named_fields():
                tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
            guide = await self._guide(body, tools)
            prompt = self.prompts.cut(await self.prompts.conversation(body, tools), body, max_tokens)
            if max_tokens is None:
                max_tokens = max(1, self.client.config.max_model_len - len(prompt))
            self.prompts.check_length(len(prompt), max_tokens, field_name)
            return await self._answer(
                body, http, [prompt], max_tokens, "chatcmpl-", render.ChatRenderer, claim, guide, tools
            )

    def admit(self, now: float) -> None:
        """Raise ApiError when not even one more request would be let in; before anything is read of it.

        Raises:
            ApiError: 429 with the time to come back, or 503.
        """
        try:
            self.gate.check(now)
        except TurnedAwayError as error:
            raise _turned_away(error) from error

    def problem(self) -> str:
        """Why the server is not healthy; empty when it is."""
        if self.client.dead.is_set():
            return "the engine has failed; the server's log says why"
        silence = self.client.silent_for()
        if silence > self.settings.stall_timeout:
            if self.client.is_restarting:
                return f"the engine has died, and there has been no sign of its successor for {silence:.0f} s"
            return f"the engine has not reported for {silence:.0f} s although {self.client.num_open} requests are open"
        return ""

    def obstacle(self) -> str:
        """Why no request should be sent here just now; empty when one may. A full queue is none: it says so itself."""
        if self.client.refusal:
            return self.client.refusal
        return "the engine is being restarted" if self.client.is_restarting else self.problem()

    async def tokenize(self, body: api.TokenizeRequest) -> answers.Tokens:
        """POST /tokenize."""
        self._check_name(body)
        return await self.prompts.tokenize(body)

    async def detokenize(self, body: api.DetokenizeRequest) -> dict[str, str]:
        """POST /detokenize."""
        self._check_name(body)
        return {"prompt": await self.prompts.detokenize(body)}

    def tokenizer_info(self) -> dict[str, Any]:
        """GET /tokenizer_info: null for what the model does not declare."""
        vocabulary = self.tokenizer.vocabulary
        named = {name: vocabulary.tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {
            **named,
            "vocab_size": self.tokenizer.vocab_size,
            "model_max_length": self.client.config.max_model_len,
            "chat_template": vocabulary.chat_templates.get("default"),
        }

    def trace(self, answer_id: str, key: str | None) -> dict[str, Any]:
        """GET /v1/requests/ID/trace."""
        if self.traces is None:
            raise api.ApiError(404, "requests are not traced here: start the server with --request-traces")
        trace = self.traces.get(answer_id, key)
        if trace is None:
            raise api.ApiError(404, f"no trace of {answer_id[: api.MAX_ID_CHARS]!r}; the newest {MAX_TRACES} are kept")
        return trace.shown()

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        length = self.client.config.max_model_len
        names = self.settings.model_names
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": self.created,
                    "owned_by": "hopon",
                    "root": names[0],
                    "parent": None,
                    "max_model_len": length,
                }
                for name in names
            ],
        }

    def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME."""
        self._check_model(name)
        return next(entry for entry in self.models()["data"] if entry["id"] == name)

    # ---- who is let in ----

    @contextlib.contextmanager
    def _entering(self, body: api.CommonRequest, http: Request, texts: Sequence[str | list[int]]) -> Iterator[Claim]:
        """Places for what a request asks for. A token has a byte at least, so bytes bound its tokens."""
        count = body.num_choices
        fewest = sum(self.tokenizer.fewest_tokens(len(t)) if isinstance(t, str) else len(t) for t in texts)
        most = sum(_num_bytes(text) + 1 if isinstance(text, str) else len(text) for text in texts)
        most = min(most, len(texts) * self.client.config.max_model_len)
        try:
            with self.gate.entering(
                len(texts) * count, min(fewest, most) * count, most * count, http.scope["hopon.arrival"]
            ) as claim:
                yield claim
        except TurnedAwayError as error:
            raise _turned_away(error) from error

    def _hear(self, news: wire.News) -> None:
        """Seats were given: those who got one do not wait any more."""
        self.metrics.heard(news)
        now = time.monotonic()
        if self.traces is not None:
            self.traces.hear(news, now)
        if self.live is not None:
            self.live.hear(news, now)
        for name in news.notes.admitted:
            place = self.places.get(name)
            if place is not None:
                place.start(now)

    def timed_out(self, limit: Literal["queue", "request"]) -> api.ApiError:
        """The error for a time limit that has passed: 503 for the queue, where nothing was done yet, else 504."""
        limits, gate = self.gate.limits, self.gate
        self.metrics.timed_out(limit)
        if limit == "queue":
            message = (
                f"no seat within {limits.queue_timeout:g} s (queue_timeout): {gate.num_waiting} requests wait for "
                f"{gate.num_seats} seats"
            )
            return api.ApiError(503, message, retry_after=gate.time_to_drain())
        return api.ApiError(504, f"not done within {limits.request_timeout:g} s (request_timeout)")

    def _scope_of(self, body: api.CommonRequest, key: str | None) -> tuple[str, str]:
        """(the cache's salt, whose share of the engine it is)."""
        salt = body.cache_salt or ""
        if self.settings.isolate_keys and key is not None:
            salt = f"{key}/{salt}"
        match self.settings.fair_share:
            case "key":
                return salt, key or ""
            case "user":
                return salt, label(body.user) if body.user else key or ""
            case _:
                return salt, ""

    # ---- what a request asks for ----

    def _check(self, body: api.CommonRequest) -> None:
        if self.client.dead.is_set():
            raise api.ApiError(503, self.problem())
        self._check_name(body)
        body.check_supported()
        limit = self.prompts.vocab_size
        for name, ids in body.token_ids().items():
            for token in ids:
                if not 0 <= token < limit:
                    raise api.ApiError(400, f"{name} must be in [0, {limit}), got {token}", name)

    def _check_name(self, body: api.ModelRequest) -> None:
        if body.model is not None:
            self._check_model(body.model)

    def _check_model(self, name: str) -> None:
        names = self.settings.model_names
        if name not in names:
            raise api.ApiError(404, f"there is no model {name[:80]!r} here; served: {', '.join(names)}", "model")

    async def _guide(self, body: api.CommonRequest, tools: ToolUse | None) -> Guide | None:
        """What the output must keep to, after a look at whether it can."""
        with named_fields():
            asked = body.guide()
        checks = [] if asked is None else [asked]
        if tools is not None:
            if asked is not None:
                field_name = asked[0].partition(".")[0]
                message = f"{asked[0]} and tools exclude each other: leave one out, or say tool_choice none"
                raise api.ApiError(400, message, field_name)
            checks += [(f"parameters of {name!r} in tools", guide) for name, guide in tools.schemas.items()]
            if tools.guide is not None:
                checks.append(("tools", tools.guide))
        if not checks:
            return None
        loop = asyncio.get_running_loop()
        for where, guide in checks:
            try:
                await loop.run_in_executor(self._guide_thread, self._guides.check, guide)
            except GuideError as error:
                field_name = "tools" if tools is not None else where.partition(".")[0]
                raise api.ApiError(400, f"{where}: {error}", field_name) from error
        return checks[-1][1]

    def _text_options(self, body: api.CommonRequest, tools: ToolUse | None) -> TextOptions:
        stop_tokens: dict[int, int | str] = {token: token for token in body.stop_token_ids or ()}
        for stop in body.stops():
            # Control tokens have no text, so a stop string that spells one has to be found among the ids.
            token = self.tokenizer.special_texts.get(stop)
            if token is not None:
                stop_tokens[token] = stop
        # Where one call is all that is wanted, its end is the end.
        one_call = (CLOSE,) if tools is not None and tools.most == 1 and not tools.is_forced else ()
        return TextOptions(
            stop=body.stops() + one_call,
            stop_tokens=stop_tokens,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            scores_only=isinstance(body, api.CompletionRequest) and body.scores_only,
        )

    # ---- serving ----

    async def _answer(
        self,
        body: api.CommonRequest,
        http: Request,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
        prefix: str,
        renderer: type[render.Renderer],
        claim: Claim,
        guide: Guide | None,
        tools: ToolUse | None = None,
    ) -> Response:
        arrival: float = http.scope["hopon.arrival"]
        facts: Facts = http.scope["hopon.facts"]
        salt, user = self._scope_of(body, facts.key)
        options = self._text_options(body, tools)
        ends = () if body.ignore_eos else self.tokenizer.eos_ids
        stop_token_ids = tuple(sorted({*ends, *options.stop_tokens}))
        # Without a seed each prompt gets one of its own; with one, each gets what it would get alone.
        seeds = [secrets.randbits(64) if body.seed is None else body.seed for _ in prompts]
        bad_words = self.prompts.bad_words(body)
        requests = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            self._num_requests += 1
            first = EngineRequest(
                request_id=f"r{self._num_requests}",
                prompt=prompt,
                params=body.sampling(self.settings.defaults, max_tokens, seed, bad_words, guide),
                seed=seed,
                arrival=arrival,
                stop_token_ids=stop_token_ids,
                priority=body.priority or 0,
                cache_salt=salt,
                user=user,
            )
            requests += [first, *followers(first, body.num_choices)]
        claim.correct([len(request.prompt) for request in requests], time.monotonic())
        echoes: list[render.Echo] = []
        if isinstance(body, api.CompletionRequest) and body.echo:
            echoes = await self.prompts.echoes(prompts)
        elif isinstance(body, api.ChatRequest) and body.echo and not body.opens_turn:
            echoes = [render.Echo(body.messages[-1].text)]
        extras = body.stream_options
        name = body.request_id or http.headers.get("x-request-id")
        api.check_id("x-request-id", name)
        form = render.Form(
            id=prefix + (name or secrets.token_hex(12)),
            created=int(time.time()),
            model=body.model or self.settings.model_names[0],
            prompts=prompts,
            num_choices=body.num_choices,
            logprobs=body.num_logprobs(),
            prompt_logprobs=body.prompt_logprobs,
            echoes=echoes,
            token_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            tools=tools,
            usage=(extras is not None and bool(extras.include_usage)) or body.slo is not None,
            usage_in_chunks=extras is not None and bool(extras.continuous_usage_stats),
        )
        outputs = [Output(request, self.tokenizer, options, self.metrics) for request in requests]
        headers = {"x-hopon-seed": ",".join(map(str, seeds if body.seed is None else seeds[:1]))}
        facts.id, facts.num_outputs = form.id, len(outputs)
        facts.prompt_tokens = sum(map(len, prompts))
        self.metrics.asked(len(outputs) // len(prompts), max_tokens)
        slo = None if body.slo is None else body.slo.limits()
        making = Making(self, outputs, renderer(form, self.tokenizer), headers, claim, facts, slo)
        return StreamResponse(making) if body.stream else await making.whole(http.receive)


class Making:
    """An answer in the making: the outputs of one HTTP request and how they are shown."""

    def __init__(
        self,
        service: Service,
        outputs: Sequence[Output],
        renderer: render.Renderer,
        headers: dict[str, str],
        claim: Claim,
        facts: Facts,
        slo: Slo | None,
    ) -> None:
        self._service = service
        self.outputs = outputs
        self.renderer = renderer
        self.headers = headers
        self._claim = claim
        self.facts = facts
        self._slo = slo

    def usage(self) -> answers.Usage:
        """Tokens so far."""
        first = [output for output in self.outputs if output.request.choice == 0]  # a prompt counts once
        prompt = sum(len(output.request.prompt) for output in first)
        cached = sum(output.cached_tokens for output in first)
        completion = sum(output.num_tokens for output in self.outputs)
        details = answers.PromptTokensDetails(cached)
        return answers.Usage(prompt, completion, prompt + completion, details, self._judgement() or UNSET)

    def _judgement(self) -> Judgement | None:
        """Of the request's own limits, once all outputs have ended."""
        if self._slo is None or any(output.finish is None for output in self.outputs):
            return None
        return judge(self._slo, [output.times for output in self.outputs])

    @contextlib.asynccontextmanager
    async def following(self, receive: Receive) -> AsyncIterator[Feed]:
        """Submit the requests and iterate over their news, per output, until all have ended.

        Leaving early aborts what is still open. Iterating raises ConsumerGoneError when the client has left.

        Raises:
            ApiError: 503, the engine is dead. When iterating: 503 or 504, a time limit.
        """
        service, client = self._service, self._service.client
        tickets: list[Ticket] = []

        def ended(slot: int, now: float) -> None:
            output = self.outputs[slot]
            self._claim.places[slot].leave(now)
            if service.traces is not None:
                service.traces.end(output.request.request_id, output.finish or "abort", output.num_tokens, now)
            client.abort(tickets[slot])  # a stop string: the engine does not know

        feed = Feed(self.outputs, ended)
        watcher = asyncio.create_task(_watch(receive, feed))
        timers = self._timers(feed)
        try:
            try:
                for i, (output, place) in enumerate(zip(self.outputs, self._claim.places, strict=True)):
                    service.places[output.request.request_id] = place
                    tickets.append(client.submit(output.request, feed, i))
                if service.traces is not None:
                    trace = Trace(id=self.renderer.form.id, key=self.facts.key, arrival=self.outputs[0].request.arrival)
                    names = [output.request.request_id for output in self.outputs]
                    lengths = [len(output.request.prompt) for output in self.outputs]
                    service.traces.begin(trace, names, lengths, time.monotonic())
            except EngineError as error:
                raise api.ApiError(503, str(error)) from error
            yield feed
        finally:
            watcher.cancel()
            for timer in timers:
                timer.cancel()
            now = time.monotonic()
            self._note_facts(now)
            for ticket, output in zip(tickets, self.outputs, strict=False):
                client.abort(ticket)
                output.end(FinishReason.ABORT, now)
            for output in self.outputs:
                service.places.pop(output.request.request_id, None)
                if service.traces is not None:
                    service.traces.end(output.request.request_id, output.finish or "abort", output.num_tokens, now)
            service.metrics.answered(max(output.num_tokens for output in self.outputs))
            judgement = self._judgement()
            if judgement is not None and not feed.is_left:
                service.metrics.judged(judgement)
            self._claim.leave(now)

    def _timers(self, feed: Feed) -> list[asyncio.TimerHandle]:
        """Time limits, which count from the arrival."""
        limits = self._service.gate.limits
        loop = asyncio.get_running_loop()
        passed = time.monotonic() - self.outputs[0].request.arrival

        def queued_too_long() -> None:
            if self._claim.is_waiting:
                feed.fail(self._service.timed_out("queue"))

        def took_too_long() -> None:
            feed.fail(self._service.timed_out("request"))

        timers = []
        if limits.queue_timeout:
            timers.append(loop.call_later(max(0.0, limits.queue_timeout - passed), queued_too_long))
        if limits.request_timeout:
            timers.append(loop.call_later(max(0.0, limits.request_timeout - passed), took_too_long))
        return timers

    def _note_facts(self, now: float) -> None:
        """For the log."""
        facts, outputs = self.facts, self.outputs
        arrival = outputs[0].request.arrival
        facts.cached_tokens = sum(output.cached_tokens for output in outputs)
        facts.output_tokens = sum(output.num_tokens for output in outputs)
        firsts = [output.first_token for output in outputs if output.first_token is not None]
        seats = [output.admitted for output in outputs if output.admitted is not None]
        facts.first_token = min(firsts) - arrival if firsts else None
        facts.queued = min(seats) - arrival if seats else None
        facts.finish = ",".join(dict.fromkeys(output.finish or FinishReason.ABORT for output in outputs))

    async def whole(self, receive: Receive) -> Response:
        """The answer as one body.

        Raises:
            ApiError: an output was refused or failed.
        """
        totals = [News() for _ in self.outputs]
        try:
            async with self.following(receive) as feed:
                async for gathered in feed:
                    for slot, news in gathered.items():
                        if (error := trouble(news)) is not None:
                            raise error
                        add(totals[slot], news)
        except ConsumerGoneError:
            return Response(status_code=499)  # nobody reads it
        body = self.renderer.whole(totals, self.usage())
        return Response(body, media_type="application/json", headers=self.headers)


class StreamResponse(Response):
    """Server-sent events. Headers wait for the first news, so that a refusal has a status of its own."""

    def __init__(self, making: Making) -> None:
        self.making = making
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        self.headers.update(making.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; each engine message is one write.

        Between the first and the last one, news goes to the connection where it arrives, unless the client is slow.
        """
        making, renderer = self.making, self.making.renderer
        writer: Writer | None = scope.get("hopon.writer")
        started = False

        def write_now(gathered: Gathered) -> bool:
            if not started or writer is None or not writer.is_ready:
                return False
            if events := self._events(gathered):
                writer.write(events)
            return True

        try:
            async with making.following(receive) as feed:
                feed.take_now = write_now
                async for gathered in feed:
                    events = self._events(gathered)
                    if not events:
                        continue
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    if all(output.finish is not None for output in making.outputs):
                        events += renderer.end(making.usage())
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ConsumerGoneError:
            return
        except api.ApiError as error:
            making.facts.error = error.message
            if not started:
                await answer(error)(scope, receive, send)
                return
            # The status has been sent; the error is the last event before the end.
            body = render.event(error.body()) + render.DONE
            await send({"type": "http.response.body", "body": body})

    def _events(self, gathered: Gathered) -> bytes:
        making = self.making
        events = b""
        for slot, news in gathered.items():
            if (error := trouble(news)) is not None:
                raise error
            if news.tokens or news.finish is not None:
                events += making.renderer.chunk(slot, news, making.usage)
        return events


def _turned_away(error: TurnedAwayError) -> api.ApiError:
    """Full is 429, closed is 503; both say when to come back."""
    return api.ApiError(503 if error.cause is Cause.CLOSED else 429, str(error), retry_after=error.retry_after)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def followers(first: EngineRequest, num_choices: int) -> list[EngineRequest]:
    """Requests for the other answers to a prompt: they share its computation, so it is scored once."""
    params = replace(first.params, prompt_logprobs=None)
    return [
        replace(first, request_id=f"{first.request_id}.{choice}", params=params, choice=choice, leader=first.request_id)
        for choice in range(1, num_choices)
    ]


def trouble(news: News) -> api.ApiError | None:
    """The error that an output ended with, if it did."""
    match news.finish:
        case FinishReason.REFUSED:
            return api.ApiError(400, news.message, "prompt")
        case FinishReason.ERROR:
            return api.ApiError(503, news.message)
        case FinishReason.FATAL:
            error = api.ApiError(500, news.message)
            error.headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again unless they are told not to
            return error
        case FinishReason.ABORT:
            return api.ApiError(503, news.message or "the request was aborted by the server")
        case _:
            return None


def add(total: News, news: News) -> None:
    """Append news to what came before."""
    total.text += news.text
    total.tokens += news.tokens
    total.logprobs += news.logprobs
    total.offsets += news.offsets
    total.prompt_logprobs += news.prompt_logprobs
    total.finish = news.finish
    total.stop_reason = news.stop_reason


async def _watch(receive: Receive, feed: Feed) -> None:
    """Wait for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.leave()
