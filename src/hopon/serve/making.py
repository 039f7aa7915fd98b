"""An answer in the making: the outputs of one HTTP request from their submission to the last byte.

It submits, follows and aborts, and sends the answer whole or as a stream; what a request asks for has been worked out
before, in :mod:`hopon.serve.service`, and what the answer looks like is :mod:`hopon.serve.render`'s. A failure has a
status of its own until headers are sent: a stream's wait for its first token. Whoever leaves has his requests aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from fastapi import Response
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from hopon.core.types import FinishReason
from hopon.serve import answers, render
from hopon.serve import openai as api
from hopon.serve.access_log import Facts
from hopon.serve.client import ConsumerGoneError, Ticket
from hopon.serve.door import answer
from hopon.serve.feed import Feed, Gathered
from hopon.serve.http import Writer
from hopon.serve.limits import Claim
from hopon.serve.link import EngineError
from hopon.serve.output import News, Output
from hopon.serve.slo import Judgement, Slo, judge
from hopon.serve.trace import Trace

if TYPE_CHECKING:
    from hopon.serve.service import Service


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
