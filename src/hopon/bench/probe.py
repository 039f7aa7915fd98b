"""Does this server batch continuously? What decides is when a newcomer is let in, not what the server calls itself.

Long streams of different lengths saturate the server; short requests come while they run. In a continuous batch a
newcomer's first token comes in the middle of older streams. In a request-level batch it comes only after all streams
that ran when it was sent have ended. Streaming proves nothing: a static batch can stream, too. A server that tells an
answer as a whole is judged by its ends: a request-level one tells answers of different lengths at the same moment.

Among request-level servers a *static* one waits for company: a request alone on an idle server is kept waiting for more
than :data:`LONG_WAIT` seconds (or for ever). A *dynamic* one takes what is there, at once or after a short delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from hopon.bench.records import Record
from hopon.bench.schedule import Writer
from hopon.bench.target import Client, Target, TargetError
from hopon.sim.report import number, table
from hopon.workload.ask import Piece

LONG_WAIT = 1.0
"""Seconds on an idle server beyond which a wait for company makes a batcher static."""
PATIENCE = 15.0
"""Seconds after which a lone request gets company."""
MIDDLE = 4
"""Pieces that a stream has told before a newcomer's first token counts as being in its middle."""
SHORT_TOKENS = 4
LONE_TOKENS = 36
PREFILL_STEPS = 20
"""A short prompt takes no longer than so many tokens: what a lone request waits beyond is waiting for company."""
MOST_SHORTS = 24
TOGETHER = 0.5
"""Ends that are closer than this share of the distance to be expected are one moment."""

Kind = Literal["continuous", "dynamic", "static", "inconclusive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the probe found.

    Args:
        kind: how the server batches.
        reason: in a sentence.
        lone_wait: seconds that a request alone on an idle server waited for company; None: for ever.
        streams: answers come piece by piece.
        joins: requests whose first token came in the middle of an older stream.
        waits: short requests that waited for the end of all streams that ran when they came.
        longs: the long streams.
        shorts: the short requests.
    """

    kind: Kind
    reason: str
    lone_wait: float | None
    streams: bool
    joins: int
    waits: int
    longs: tuple[Record, ...]
    shorts: tuple[Record, ...]

    def text(self) -> str:
        """For people."""
        lone = "for ever" if self.lone_wait is None else f"{1000 * self.lone_wait:.0f} ms"
        rows = [_row("long", record, self.longs) for record in self.longs]
        rows += [_row("short", record, self.longs) for record in self.shorts]
        head = ("", "tokens", "sent", "first token", "answered", "long ones ended before its first token")
        told = "streams" if self.streams else "tells answers as a whole"
        seen = (
            f"{told}; a request alone waits {lone} for company; {self.joins} requests joined older streams, "
            f"{self.waits} short ones waited for the end of all that ran"
        )
        return "\n\n".join([table(head, rows), seen, f"{self.kind}: {self.reason}"])


def _row(name: str, record: Record, longs: Sequence[Record]) -> tuple[str, ...]:
    first, last = record.first_token, record.e2e
    over = sum(_last(one) <= first for one in longs if one is not record) if first is not None else 0
    return (
        name,
        str(record.output_tokens),
        number(record.arrival),
        number(first),
        number(None if last is None else record.arrival + last),
        f"{over} of {len(longs) - (record in longs)}",
    )


async def probe(target: Target, writer: Writer, *, num_streams: int = 8, tokens: int = 64) -> Verdict:
    """Find out.

    Args:
        target: must serve nobody else meanwhile.
        writer: of the prompts; another salt in every probe.
        num_streams: long streams.
        tokens: of the shortest long stream; the longest has four times as many.

    Raises:
        TargetError: a request failed.
        ValueError: fewer than 2 streams or than 32 tokens.
    """
    if num_streams < 2:
        raise ValueError(f"the probe needs at least 2 long streams, got {num_streams}")
    if tokens < 32:
        raise ValueError(f"long streams must have at least 32 tokens, got {tokens}")
    return await _Probe(target, writer).run(num_streams, tokens)


class _Probe:
    def __init__(self, target: Target, writer: Writer) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._client = Client(target, self._origin)
        self._target = target
        self._writer = writer
        self._count = 0
        self._tasks: list[asyncio.Task[str]] = []

    async def run(self, num_streams: int, tokens: int) -> Verdict:
        try:
            lone = await self._lone(SHORT_TOKENS)
            if lone is None:
                token_time, wait = 0.01, None
            else:
                longer = await self._lone(LONE_TOKENS)
                assert longer is not None, "the same request was answered before"
                token_time = max(1e-5, (_took(longer) - _took(lone)) / (LONE_TOKENS - SHORT_TOKENS))
                wait = max(0.0, min(_waited(lone), _waited(longer)) - PREFILL_STEPS * token_time)
            longs, shorts = await self._crowd(num_streams, tokens, token_time)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._client.close()
        return judge(longs, shorts, wait)

    def _send(self, tokens: int) -> Record:
        """Send a request; its record fills itself."""
        self._count += 1
        said = self._writer.prompt((Piece(-100 - self._count, 16),))
        record = Record(number=self._count, asked=tokens, arrival=self._loop.time() - self._origin)
        prompt = ({"role": "user", "content": said},) if self._target.chat else said
        request = self._client.request(prompt, tokens, {})
        self._tasks.append(asyncio.create_task(self._client.ask(request, record)))
        return record

    async def _until(self, condition: Callable[[], bool], patience: float, interval: float = 0.002) -> bool:
        end = self._loop.time() + patience
        while not condition() and self._loop.time() < end:
            await asyncio.sleep(interval)
        return condition()

    async def _lone(self, tokens: int) -> Record | None:
        """A request alone; None when it is answered in company only."""
        record = self._send(tokens)
        if not await self._until(lambda: record.ended is not None, PATIENCE):
            company = [record]
            while record.ended is None and len(company) < 256:
                company += [self._send(SHORT_TOKENS) for _ in range(len(company))]
                await self._until(lambda: record.ended is not None, 1.0 + PATIENCE / 10)
            if record.ended is None:
                raise TargetError(f"{self._target.base}: {len(company)} short requests, and none is answered")
            # Those that are left over wait for company, too, and would be in the way of what comes.
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return None
        _check(record, self._target)
        return record

    async def _crowd(self, num_streams: int, tokens: int, token_time: float) -> tuple[list[Record], list[Record]]:
        step = 3 * tokens / (num_streams - 1)
        longs = [self._send(tokens + round(step * place)) for place in range(num_streams)]
        shorts: list[Record] = []

        def is_over() -> bool:
            return all(record.ended is not None for record in longs)

        def is_under_way() -> bool:
            return is_over() or any(len(record.piece_times) >= 2 * MIDDLE for record in longs)

        # A server that tells whole answers is under way without a sign.
        await self._until(is_under_way, max(0.1, 2 * PREFILL_STEPS * token_time) if token_time else 0.1)
        while not is_over() and len(shorts) < MOST_SHORTS:
            shorts.append(self._send(SHORT_TOKENS))
            await self._until(is_over, max(0.01, 8 * token_time))
        everybody = [*longs, *shorts]
        limit = self._target.timeout
        if not await self._until(lambda: all(record.ended is not None for record in everybody), limit):
            everybody = [record for record in everybody if record.ended is not None]
        for record in everybody:
            _check(record, self._target)
        return [r for r in longs if r in everybody], [r for r in shorts if r in everybody]


def judge(longs: Sequence[Record], shorts: Sequence[Record], lone_wait: float | None) -> Verdict:
    """The verdict on what was seen.

    Args:
        longs: finished long streams.
        shorts: finished short requests, sent while those ran.
        lone_wait: see Verdict.
    """
    everybody = [*longs, *shorts]
    streams = sum(len(set(record.piece_times)) > 2 * MIDDLE for record in longs) > len(longs) / 2
    joins = sum(any(_joined(record, other) for other in longs if other is not record) for record in everybody)
    waits = sum(_waited_for_all(record, longs) for record in shorts)
    kind: Kind
    if streams:
        is_continuous, is_request_level = joins > 0, joins == 0 and waits > 0
        if is_continuous:
            reason = f"{joins} requests got their first token in the middle of older streams"
        else:
            reason = f"none joined a running batch, and {waits} short ones waited until all that ran had ended"
    else:
        together = _told_together(longs)
        is_continuous = together == 0
        is_request_level = together >= len(longs) / 2
        reason = f"{together} of {len(longs)} answers of different lengths were told at the moment of another"
    if is_continuous:
        kind = "continuous"
    elif not is_request_level:
        kind, reason = "inconclusive", f"too little happened at the same time ({reason}): try longer streams"
    elif lone_wait is None or lone_wait > LONG_WAIT:
        waiting = "for ever" if lone_wait is None else f"{lone_wait:.1f} s"
        kind, reason = "static", f"{reason}; a request alone waits {waiting} for a group"
    else:
        delay = f"after {1000 * lone_wait:.0f} ms" if lone_wait > 0.02 else "at once"
        kind, reason = "dynamic", f"{reason}; a request alone goes {delay}"
    return Verdict(
        kind=kind,
        reason=reason,
        lone_wait=lone_wait,
        streams=streams,
        joins=joins,
        waits=waits,
        longs=tuple(longs),
        shorts=tuple(shorts),
    )


def _joined(record: Record, other: Record) -> bool:
    """Its first token came in the middle of another's stream."""
    first = record.first_token
    assert first is not None, "it was answered"
    before = sum(time < first for time in other.piece_times)
    return before >= MIDDLE and other.piece_times[-1] > first


def _waited_for_all(record: Record, longs: Sequence[Record]) -> bool:
    """There were streams when it was sent, and all of them ended before its first token."""
    ran = [one for one in longs if one.piece_times[0] < record.arrival < _last(one)]
    return bool(ran) and record.piece_times[0] >= max(map(_last, ran))


def _told_together(longs: Sequence[Record]) -> int:
    """Answers that were told at the moment of another one, by the spread that lengths of 1 to 4 would give them."""
    ends = sorted(map(_last, longs))
    spread = 0.75 * (ends[-1] - min(record.arrival for record in longs)) / (len(longs) - 1)
    near = [after - before <= TOGETHER * spread for before, after in pairwise(ends)]
    return sum(left or right for left, right in zip([False, *near], [*near, False], strict=True))


def _last(record: Record) -> float:
    return record.piece_times[-1]


def _took(record: Record) -> float:
    return _last(record) - record.arrival


def _waited(record: Record) -> float:
    return record.piece_times[0] - record.arrival


def _check(record: Record, target: Target) -> None:
    if not record.completed:
        raise TargetError(f"{target.base}: {record.error}: {record.message}")
