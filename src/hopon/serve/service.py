"""What is behind the routes: let in, validate, tokenize, and make engine requests of it.

Knows the API's rules; routes are in :mod:`hopon.serve.app`, what happens from the submission on in
:mod:`hopon.serve.making`. A request is refused before anything expensive happens where that is possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastapi import Request, Response

from hopon.core.types import Guide
from hopon.core.types import Request as EngineRequest
from hopon.model.guide import GuideError, Guides
from hopon.serve import answers, render, wire
from hopon.serve import openai as api
from hopon.serve.access_log import Facts, LogFormat
from hopon.serve.chat import CLOSE
from hopon.serve.client import EngineClient
from hopon.serve.keys import Keys, label
from hopon.serve.limits import Cause, Claim, Gate, Limits, Place, TurnedAwayError, default_queue
from hopon.serve.live import Live
from hopon.serve.making import Making, StreamResponse
from hopon.serve.metrics import Metrics
from hopon.serve.output import Output, TextOptions
from hopon.serve.prompts import Prompts, chat_texts, completion_texts, named_fields
from hopon.serve.tokenizer import Tokenizer
from hopon.serve.tools import ToolUse, tool_use
from hopon.serve.trace import MAX_TRACES, Traces


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
