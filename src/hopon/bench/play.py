"""Plays a schedule to a server: open loop by the clock, closed loop by free places.

In the open loop nothing ever waits for an answer: a request whose time has come is sent, and one that is late (because
the client was busy) keeps its intended time, from which all latencies count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hopon.bench.records import Record, Records, Sample
from hopon.bench.sampling import read_sample
from hopon.bench.schedule import Schedule, Session, Turn
from hopon.bench.target import Client, Message, Prompt, Target, TargetError
from hopon.workload.ask import Piece

LAG_INTERVAL = 0.05
SAMPLE_INTERVAL = 1.0
PREPARED_TOKENS = 2_000_000
"""Prompt tokens that are made up before the run begins; what is beyond is made shortly before it is sent."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    seconds: float = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def open(self) -> int:
        """Requests without an end."""
        return self.sent - self.done - self.failed


Watch = Callable[[Progress], None]


async def play(
    target: Target, schedule: Schedule, *, stop: asyncio.Event | None = None, watch: Watch | None = None
) -> Records:
    """Send a schedule's requests and wait for the answers.

    Args:
        target: to whom.
        schedule: what, and when.
        stop: when it is set, the run ends: what is open is cut, and what was measured is returned.
        watch: called about once in a second.
    """
    return await _Run(target, schedule, watch).play(stop or asyncio.Event())


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The first turn of a session, ready to be sent."""

    number: int
    session: Session
    request: bytes
    said: Prompt


class _Run:
    def __init__(self, target: Target, schedule: Schedule, watch: Watch | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._schedule = schedule
        self._watch = watch
        self._calls: list[Record] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = Progress()
        self._lags: list[float] = []
        self._samples: list[Sample] = []

    async def play(self, stop: asyncio.Event) -> Records:
        """See the function."""
        source = self._prepare_all()
        self._origin = self._loop.time()
        self._client = Client(self._target, self._origin)
        cpu = time.process_time()
        side = [asyncio.create_task(work) for work in (self._watch_lag(), self._sample(), self._report())]
        work = asyncio.create_task(self._open(source) if self._schedule.concurrency is None else self._closed(source))
        ended = asyncio.create_task(stop.wait())
        limit = self._schedule.limit
        done, _ = await asyncio.wait({work, ended}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        await _cancel([ended, *side])
        if work in done:
            work.result()  # an exception of ours
        else:
            await _cancel([work, *self._tasks])
        self._client.close()
        seconds = max((call.ended for call in self._calls if call.ended is not None), default=0.0)
        return Records(
            calls=tuple(self._calls),
            seconds=seconds,
            open_loop=self._schedule.concurrency is None,
            interrupted=ended in done,
            lags=tuple(self._lags),
            cpu_seconds=time.process_time() - cpu,
            samples=tuple(self._samples),
        )

    def _prepare_all(self) -> Iterator[_Prepared]:
        """The first turns in order: as many as may be are made up now, the others when they are taken."""
        ready: list[_Prepared] = []
        tokens = 0
        sessions = enumerate(self._schedule.sessions)
        client = Client(self._target, 0.0)  # only writes here
        for number, session in sessions:
            ready.append(_prepare(client, self._schedule, number, session))
            tokens += _size(session.turns[0])
            if tokens > PREPARED_TOKENS:
                break

        def take() -> Iterator[_Prepared]:
            yield from ready
            for number, session in sessions:
                yield _prepare(client, self._schedule, number, session)

        return take()

    async def _open(self, source: Iterator[_Prepared]) -> None:
        for prepared in source:
            arrival = prepared.session.arrival
            await asyncio.sleep(max(0.0, self._origin + arrival - self._loop.time()))
            task = asyncio.create_task(self._converse(prepared, arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _closed(self, source: Iterator[_Prepared]) -> None:
        async def place() -> None:
            for prepared in source:
                await self._converse(prepared, self._loop.time() - self._origin)

        assert self._schedule.concurrency is not None, "a closed loop has places"
        places = min(self._schedule.concurrency, len(self._schedule.sessions))
        self._tasks = {asyncio.create_task(place()) for _ in range(places)}
        await asyncio.gather(*self._tasks)

    async def _converse(self, prepared: _Prepared, arrival: float) -> None:
        """A session: its first turn now, each other one when it was answered and thought about; ends with a failure."""
        turns = prepared.session.turns
        request, said = prepared.request, prepared.said
        for place, turn in enumerate(turns):
            if place:
                said = _behind(said, self._schedule.writer.prompt(turn.content), self._target.chat)
                request = self._client.request(said, turn.max_tokens, turn.fields)
                arrival = self._loop.time() - self._origin + turn.think
                await asyncio.sleep(turn.think)
            is_last = place == len(turns) - 1
            record = Record(
                number=len(self._calls),
                session=prepared.number,
                turn=place,
                kind=turn.kind,
                asked=turn.max_tokens,
                exact=self._target.ignore_eos and turn.fields.get("ignore_eos", True) is True,
                arrival=arrival,
            )
            self._calls.append(record)
            self._progress.sent += 1
            answer = await self._client.ask(request, record, keep_text=not is_last)
            self._progress.tokens += record.output_tokens
            if not record.completed:
                self._progress.failed += 1
                return
            self._progress.done += 1
            if not is_last:
                said = _answered(said, answer, self._target.chat)

    async def _watch_lag(self) -> None:
        while True:
            due = self._loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self._lags.append(self._loop.time() - due)

    async def _sample(self) -> None:
        """Ask for the server's numbers every second, unless it has none."""
        due = self._loop.time()
        while (page := await self._client.get("/metrics")) is not None:
            sample = read_sample(page, due - self._origin)
            if sample == Sample(time=sample.time):
                return
            self._samples.append(sample)
            due = max(due + SAMPLE_INTERVAL, self._loop.time())
            await asyncio.sleep(due - self._loop.time())

    async def _report(self) -> None:
        while self._watch is not None:
            self._progress.seconds = self._loop.time() - self._origin
            self._watch(self._progress)
            await asyncio.sleep(1.0)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _prepare(client: Client, schedule: Schedule, number: int, session: Session) -> _Prepared:
    turn = session.turns[0]
    said = _behind((), schedule.writer.prompt(turn.content), client.target.chat)
    return _Prepared(number, session, client.request(said, turn.max_tokens, turn.fields), said)


def _size(turn: Turn) -> int:
    content = turn.content
    return sum(one.count if isinstance(one, Piece) else 1 for one in content) if not isinstance(content, str) else 1


def _behind(said: Prompt, new: Prompt, chat: bool) -> Prompt:
    """What a user says, behind all that was said before."""
    if not chat:
        assert not said or (isinstance(said, str) and isinstance(new, str)), "only text can be put behind text"
        return f"{said}\n{new}" if said else new
    if not isinstance(new, str) and (not new or isinstance(new[0], int)):
        raise ValueError("a chat takes text or messages, not token ids")
    before: tuple[Message, ...] = said  # type: ignore[assignment]
    messages: tuple[Message, ...] = ({"role": "user", "content": new},) if isinstance(new, str) else new
    return (*before, *messages)


def _answered(said: Prompt, answer: str, chat: bool) -> Prompt:
    if not chat:
        return f"{said}{answer}"
    before: tuple[Message, ...] = said  # type: ignore[assignment]
    return (*before, {"role": "assistant", "content": answer})


async def check(target: Target, prompt: Prompt, *, count: int = 1, max_tokens: int = 4) -> Record:
    """Send a few requests one after another, so that first-time costs are paid; the last record.

    Raises:
        TargetError: one was not answered; the message has the server's words.
    """
    loop = asyncio.get_running_loop()
    client = Client(target, loop.time())
    record = Record(number=0)
    for number in range(count):
        record = Record(number=number, arrival=0.0, asked=max_tokens)
        await client.ask(client.request(_behind((), prompt, target.chat), max_tokens, {}), record)
        if not record.completed:
            client.close()
            raise TargetError(f"{target.base}: {record.error}: {record.message}")
    client.close()
    return record
