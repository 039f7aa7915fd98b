"""The API process's side of the engine: submit and abort requests, hand out news, and let nobody notice its death.

It knows tokens and processes; texts and HTTP are elsewhere. One asyncio loop owns a client; nothing here is for several
threads.

Every open request keeps what was delivered of it. When the engine dies, the next incarnation is started with the same
limits and gets every open request again, with the delivered tokens behind its prompt: an engine goes on from there as
if it had made them itself, so the client sees one life. Who runs when is said in :mod:`hopon.serve.supervisor`. What
holds for a request's news:

- Every message carries the incarnation and every delta the index of its first token. Only the engine of today is heard,
  and only the next index is accepted; an engine that says anything else is ended.
- What an engine wrote before it died is read first, unless something had to be written to it in that very moment. A
  token that was not read is sampled again, and is the same one.
- Scores of the prompt (``prompt_logprobs``) come in order, before the first token. Those that were delivered are
  counted and, where an engine has to score the prompt again, that many are dropped; once all of them are delivered,
  they are not asked for again.
- When it was admitted and how much of its prompt was cached stays as it was first told.

Requests that arrive while there is no engine wait for the next one. After ``MAX_DEATHS`` deaths without a token from
anyone, the client gives up: every open request ends with an error, and :attr:`EngineClient.dead` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any

from hopon.core.config import SchedulerConfig
from hopon.core.engine import EngineStats
from hopon.core.scheduler import Counters
from hopon.core.types import Delta, FinishReason, Request
from hopon.serve import wire
from hopon.serve.link import EngineError, EngineHandle, Link, Progress
from hopon.serve.supervisor import Trials

MAX_DEATHS = 5
"""In a row, without a token from anyone: then the client gives up."""

Relaunch = Callable[[int, SchedulerConfig], EngineHandle]
"""Starts the engine of this incarnation, with these limits."""

log = logging.getLogger("hopon.serve")


class ConsumerGoneError(Exception):
    """Whoever waited for the news has left."""


class Consumer(ABC):
    """Where the news of some requests goes, and somebody may wait for it."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._end: Exception | None = None

    @abstractmethod
    def put(self, slot: int, delta: Delta) -> None:
        """News of the consumer's request number ``slot``."""

    def flush(self) -> None:
        """All the news of one engine message has been put."""
        self._wake()

    def leave(self) -> None:
        """Whoever waits for the news is gone: waiting raises ConsumerGoneError from now on."""
        self.fail(ConsumerGoneError())

    def fail(self, error: Exception) -> None:
        """Nothing more shall be handed out: waiting raises this from now on."""
        if self._end is None:
            self._end = error
        self._wake()

    @property
    def is_left(self) -> bool:
        """Whether the consumer is gone."""
        return isinstance(self._end, ConsumerGoneError)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits, and has not been told of anything yet."""
        return self._waiter is not None and not self._waiter.done()

    async def _wait(self) -> None:
        if self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _raise_end(self) -> None:
        if self._end is not None:
            raise self._end

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Mailbox(Consumer):
    """News as it is, in order of arrival. News that piles up is handed out together."""

    def __init__(self) -> None:
        super().__init__()
        self._news: list[tuple[int, Delta]] = []

    def put(self, slot: int, delta: Delta) -> None:
        """See base."""
        self._news.append((slot, delta))

    async def get(self) -> list[tuple[int, Delta]]:
        """Everything that has arrived; waits for something.

        Raises:
            ConsumerGoneError: after :meth:`leave`.
            Exception: what :meth:`fail` was given.
        """
        if not self._news:
            await self._wait()
        self._raise_end()
        news, self._news = self._news, []
        return news


class Place(Enum):
    """Where a request is."""

    HERE = auto()  # waits for its turn in the API process
    ENGINE = auto()
    LEAVING = auto()  # the engine was asked to forget it, and has not confirmed


@dataclass(eq=False, slots=True)
class Ticket:
    """An open request: where its news goes, and what has been handed out."""

    request: Request
    consumer: Consumer
    slot: int
    delivered: list[int] = field(default_factory=list)
    place: Place = Place.HERE
    num_submits: int = 0
    num_scored: int = 0  # scores of the prompt that were handed out
    num_repeated: int = 0  # scores that the engine of today will tell again
    admitted: float | None = None
    num_cached: int = 0

    def remaining(self) -> Request:
        """What an engine has to be told: the request, behind what was delivered of it."""
        request = self.request
        self.num_submits += 1
        if self.num_submits == 1:
            return request
        self.num_repeated = self.num_scored
        params = request.params
        if params.prompt_logprobs is not None and self.num_scored == len(request.prompt) - 1:
            self.num_repeated = 0
            params = replace(params, prompt_logprobs=None)
        return replace(request, params=params, output=tuple(self.delivered))

    def accept(self, delta: Delta) -> Delta:
        """Take in the engine's news; returns it as it is to be delivered.

        Raises:
            ConnectionError: it does not begin with the next token.
        """
        if delta.tokens:
            if delta.index != len(self.delivered):
                raise ConnectionError(
                    f"output {delta.index} of {delta.request_id} where {len(self.delivered)} is the next one"
                )
            self.delivered += delta.tokens
        if self.num_submits > 1:
            delta = self._as_if_never_interrupted(delta)
        if self.admitted is None:
            self.admitted, self.num_cached = delta.admitted, delta.cached_tokens
        self.num_scored += len(delta.prompt_logprobs)
        return delta

    def _as_if_never_interrupted(self, delta: Delta) -> Delta:
        scores = delta.prompt_logprobs
        num_dropped = min(self.num_repeated, len(scores))
        self.num_repeated -= num_dropped
        entry: dict[str, Any] = {}
        if self.admitted is not None:
            entry = {"admitted": self.admitted, "cached_tokens": self.num_cached}
        return replace(delta, prompt_logprobs=scores[num_dropped:], **entry)


COUNTERS = tuple(counter.name for counter in fields(Counters))
"""Fields of EngineStats that only grow; the others are gauges."""


class EngineClient:
    """Talks to the engine of the day. Made by :meth:`attach`.

    Args:
        link: to a ready engine.
        relaunch: starts the next one; without it, the first death is the end.
        step_timeout: seconds after which an engine that completes no step is ended; 0: it is waited for.
    """

    def __init__(self, link: Link, relaunch: Relaunch | None = None, step_timeout: float = 0.0) -> None:
        self._link = link
        link.on_news = self._take
        self._relaunch = relaunch
        self._ready = link.ready.result()
        self._tickets: dict[str, Ticket] = {}
        self._trials = Trials()
        self._gathering = False  # not everybody is in the engine
        self._latest: EngineStats | None = None
        self._past: dict[str, int] = {}  # counters of dead engines
        self._deaths_in_vain = 0
        self.refusal = ""
        """Why no request is taken any more; empty while they are."""
        self.dead = asyncio.Event()
        """Set when there is no engine and none will come."""
        self.problem = ""
        """Why."""
        self.num_deaths = 0
        """Engines that died."""
        self.num_replayed_requests = 0
        """Requests that were given to another engine after one had died."""
        self.num_replayed_tokens = 0
        """Their tokens, of prompts and outputs, that were known to be computed and have to be computed again."""
        self.on_news: Callable[[wire.News], None] = lambda news: None
        """Called with every message of news before its deltas are handed out."""
        self._tasks = [asyncio.create_task(self._supervise())]
        if step_timeout:
            self._tasks.append(asyncio.create_task(self._watch(step_timeout)))

    @classmethod
    async def attach(
        cls,
        handle: EngineHandle,
        on_progress: Progress | None = None,
        relaunch: Relaunch | None = None,
        step_timeout: float = 0.0,
    ) -> EngineClient:
        """Connect to a launched engine and wait until it is ready.

        Raises:
            EngineError: it could not load; the message says why.
        """
        link = await Link.open(handle, on_progress)
        try:
            await link.until_ready()
        except BaseException:
            handle.process.kill()  # a loading engine does not read its messages
            link.close()
            await link.exit_status(5.0)
            raise
        return cls(link, relaunch, step_timeout)

    @property
    def config(self) -> SchedulerConfig:
        """Limits of the engine, the same in every incarnation."""
        return self._ready.config

    @property
    def summary(self) -> dict[str, str | int | float]:
        """What the engine says of itself."""
        return self._ready.summary

    @property
    def num_open(self) -> int:
        """Unfinished requests."""
        return len(self._tickets)

    @property
    def open_tickets(self) -> Collection[Ticket]:
        """Of unfinished requests, oldest first; for reading."""
        return self._tickets.values()

    def ticket(self, request_id: str) -> Ticket | None:
        """Of an unfinished request, for reading."""
        return self._tickets.get(request_id)

    @property
    def step_members(self) -> tuple[str, ...]:
        """Requests in the step that runs now, or ran last."""
        return self._link.step

    @property
    def oldest_unanswered(self) -> float | None:
        """Arrival of the oldest request that has not had a token yet, on the monotonic clock; None if there is none."""
        return min((t.request.arrival for t in self._tickets.values() if not t.delivered), default=None)

    @property
    def is_restarting(self) -> bool:
        """The engine has died and the next one is not ready yet."""
        return not self._link.is_ready

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges, and counters of all engines together; None before the first step."""
        latest = self._latest
        if latest is None:
            return None
        if not self._past and not self._gathering:
            return latest
        totals = {name: getattr(latest, name) + past for name, past in self._past.items()}
        num_here = sum(ticket.place is Place.HERE for ticket in self._tickets.values())
        return replace(latest, num_waiting=latest.num_waiting + num_here, **totals)

    def silent_for(self) -> float:
        """Seconds without progress: no iteration completed although requests are open, or no part of an engine loaded.

        An engine at work reports after every step.
        """
        idle = self._link.is_ready and not self._tickets
        return 0.0 if idle else time.monotonic() - self._link.last_heard

    def submit(self, request: Request, consumer: Consumer, slot: int = 0) -> Ticket:
        """Take a request in; its news goes to the consumer. Ends exactly once unless it is aborted.

        It waits here while there is no engine, or while others have to prove themselves.

        Raises:
            EngineError: no engine will come any more, or the client is leaving.
        """
        if self.dead.is_set():
            raise EngineError("the engine has failed")
        if self.refusal:
            raise EngineError(self.refusal)
        assert request.request_id not in self._tickets, f"request id {request.request_id} is in use"
        if not self._tickets and self._link.is_ready:
            self._link.last_heard = time.monotonic()  # idle engines have nothing to report
        ticket = Ticket(request, consumer, slot)
        if not self._gathering:
            self._send(ticket)
        self._tickets[request.request_id] = ticket  # what cannot be sent is not open
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Forget a request; no more news of it comes. Does nothing when it has ended."""
        if self._tickets.pop(ticket.request.request_id, None) is not None:
            if ticket.place is Place.ENGINE:
                self._link.send(wire.Cancel(ticket.request.request_id))
            self._trials.proved(ticket.request.request_id)
            self._advance()

    def fail_all(self, reason: FinishReason, message: str) -> None:
        """End every open request from this side, with a message for its client."""
        for ticket in list(self._tickets.values()):
            self._end(ticket, reason, message)

    async def drain(self, patience: float) -> int:
        """Take no more requests and wait until those that are open have ended. Returns how many have not in time."""
        self.refusal = "the server is shutting down"
        deadline = time.monotonic() + patience
        while self._tickets and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return len(self._tickets)

    async def close(self, patience: float = 5.0) -> int:
        """Ask the engine to leave, wait, make it leave if it does not. Returns its exit status (negative: a signal)."""
        self.refusal = "the server is shutting down"
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.fail_all(FinishReason.ABORT, self.refusal)
        if self._link.is_ready:
            self._link.send(wire.Stop())
        else:
            self._link.handle.process.kill()  # dead, or loading: then it does not read its messages
        status = await self._link.exit_status(patience)
        self._link.close()
        return status

    def kill(self) -> None:
        """End the engine process at once."""
        self._link.handle.process.kill()

    # ---- news ----

    def _take(self, news: wire.News) -> None:
        self._latest = news.stats
        self.on_news(news)
        told: list[Consumer] = []
        for delta in news.deltas:
            ticket = self._tickets.get(delta.request_id)
            if ticket is None:
                continue  # aborted meanwhile
            if ticket.place is Place.LEAVING and delta.finish is FinishReason.ABORT:
                ticket.place = Place.HERE
                continue
            delta = ticket.accept(delta)
            if delta.tokens:
                self._deaths_in_vain = 0
            if delta.finish is not None:
                del self._tickets[delta.request_id]
            if delta.tokens or delta.finish is not None:
                self._trials.proved(delta.request_id)
            ticket.consumer.put(ticket.slot, delta)
            told.append(ticket.consumer)
        for consumer in told:
            consumer.flush()
        self._advance()

    def _end(self, ticket: Ticket, reason: FinishReason, message: str) -> None:
        del self._tickets[ticket.request.request_id]
        delta = Delta(
            request_id=ticket.request.request_id,
            time=time.monotonic(),
            index=len(ticket.delivered),
            finish=reason,
            message=message,
            cached_tokens=ticket.num_cached,
            admitted=ticket.admitted,
        )
        ticket.consumer.put(ticket.slot, delta)
        ticket.consumer.flush()

    # ---- who is in the engine ----

    def _send(self, ticket: Ticket) -> None:
        ticket.place = Place.ENGINE
        self._link.send(wire.Submit(ticket.remaining()))

    def _advance(self) -> None:
        """Let into the engine whoever may enter now; see the supervisor's rule."""
        if not self._gathering or not self._link.is_ready or self._trials.undecided:
            return
        tickets = self._tickets
        waiting = [ticket for ticket in tickets.values() if ticket.place is Place.HERE]
        if waiting:
            for request_id in self._trials.group:
                proven = tickets.get(request_id)
                if proven is not None and proven.place is Place.ENGINE:
                    proven.place = Place.LEAVING
                    self._link.send(wire.Cancel(request_id))
        if group := self._trials.next_group(tickets):
            for request_id in group:
                self._send(tickets[request_id])
        elif not any(ticket.place is Place.LEAVING for ticket in tickets.values()):
            for ticket in waiting:
                self._send(ticket)
            self._gathering = False

    # ---- life and death ----

    async def _supervise(self) -> None:
        """Replace every engine that dies, until that is in vain."""
        try:
            await self._replace_engines()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise

    async def _replace_engines(self) -> None:
        while True:
            await asyncio.wait((self._link.lost,))
            await self._bury()
            if self.dead.is_set():
                return
            await asyncio.sleep(0.25 * (self._deaths_in_vain - 1))
            try:
                self._link = await self._next_link()
            except OSError as error:
                self._link.last_words = f"no engine process can be started: {error}"
                continue
            await asyncio.wait((self._link.ready, self._link.lost), return_when=asyncio.FIRST_COMPLETED)
            self._advance()

    async def _next_link(self) -> Link:
        assert self._relaunch is not None, "without it, the first death is the end"
        handle = self._relaunch(self._link.handle.incarnation + 1, self.config)
        try:
            link = await Link.open(handle)
        except BaseException:
            handle.process.kill()
            raise
        link.on_news = self._take
        return link

    async def _bury(self) -> None:
        """Take note of a death: who is a suspect, who is guilty, whether it is the last one."""
        self._gathering = True
        link = self._link
        cause = await link.obituary()
        self.num_deaths += 1
        self._deaths_in_vain += 1
        lost = [ticket for ticket in self._tickets.values() if ticket.place is not Place.HERE]
        suspects = [t.request.request_id for t in lost if t.place is Place.ENGINE and t.request.request_id in link.step]
        for ticket in lost:
            ticket.place = Place.HERE
            self.num_replayed_requests += 1
            if ticket.delivered:
                self.num_replayed_tokens += len(ticket.request.prompt) + len(ticket.delivered)
        self._keep_counters()
        guilty = self._trials.died(suspects)
        if guilty is not None:
            log.error("request %s is failed: alone in the step, it ended two engines (%s)", guilty, cause)
            message = "the engine died twice while it worked on this request alone, so it is not tried again"
            self._end(self._tickets[guilty], FinishReason.FATAL, message)
        if self._relaunch is None or self._deaths_in_vain >= MAX_DEATHS:
            in_vain = f" ({self._deaths_in_vain} deaths in a row without a token)" if self._relaunch is not None else ""
            self._give_up(f"{cause}{in_vain}")
            return
        log.warning(
            "the engine died: %s; %d requests were in its step; starting it again, %d open requests will go on",
            *(cause, len(suspects), len(self._tickets)),
        )

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.fail_all(FinishReason.ERROR, "the engine has failed")
        self.dead.set()

    def _keep_counters(self) -> None:
        """What the dead engine counted stays counted."""
        if self._latest is not None:
            for name in COUNTERS:
                self._past[name] = self._past.get(name, 0) + getattr(self._latest, name)
            nothing = dict.fromkeys((*COUNTERS, "num_running", "num_waiting", "num_used_blocks"), 0)
            self._latest = replace(self._latest, **nothing)

    async def _watch(self, timeout: float) -> None:
        """End an engine that completes no step; the supervisor replaces it."""
        while True:
            await asyncio.sleep(timeout / 8)
            if self._link.is_ready and self.silent_for() > timeout:
                self._link.kill(f"no step was completed in {timeout:g} s")
