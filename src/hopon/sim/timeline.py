"""Every step of one engine as compact plain values, for pictures: who sat where, who waited, and for what.

An observer of the policy sees each step as it is planned, a meter sees what it cost. Neither is known to the scheduler,
so a run with a timeline makes the same plans as one without. Works for the simulator and for the real engine alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from hopon.core.plan import StepPlan
from hopon.core.policy.composition import RequestLevel
from hopon.core.policy.preset import Observer, Policy
from hopon.core.step import Obstacle, Step
from hopon.sim.result import Meter, Metered, Result
from hopon.tracing import StepFeatures

MAX_STEPS = 100_000
"""A picture of more would be too large to look at."""

LISTED = 60
"""The first so many of those that wait are listed; the others are counted."""


class Kind(IntEnum):
    """What a seat does in a step."""

    PREFILL = 0
    DECODE = 1
    AGAIN = 2  # computes what it had before it lost its memory
    HELD = 3  # somebody has it and computes nothing
    PADDING = 4  # computed for nobody


_REASONS = {Obstacle.SEATS: 1, Obstacle.TOKENS: 2, Obstacle.BLOCKS: 3}
_RULE = 4
"""What the first of the waiting lacks: 0 nobody waits, 1 a seat, 2 tokens, 3 memory, 4 the policy lets nobody in."""


@dataclass(slots=True)
class _Run:
    """A seat does the same for the same request in consecutive steps."""

    first: int
    length: int
    number: int
    kind: Kind
    tokens: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """A step as it was planned."""

    seats: dict[int, tuple[int, Kind, int]]
    padding: int
    evicted: list[int]
    waiting: int
    queue: tuple[int, ...]
    reason: int
    blocks: int
    tokens: int


class Timeline(Observer):
    """Takes notes while a run is simulated or measured. Requests are told apart by their seeds, as a meter does."""

    def __init__(self) -> None:
        self._planned: deque[_Frame] = deque()
        self._peaks: dict[int, int] = {}
        self._rows: list[list[_Run]] = []
        self._seat_of: dict[int, int] = {}
        self._queue: list[tuple[int, tuple[int, ...]]] = []
        self._evictions: list[tuple[int, int, int]] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._num_steps = 0
        self._rule = "turn"

    def watch(self, policy: Policy) -> Policy:
        """The same policy, watched."""
        if policy.delivery == "batch" or isinstance(policy.composition, RequestLevel):
            self._rule = "batch"
        return replace(policy, observers=(*policy.observers, self))

    def meter(self, *, block_bytes: float = 0.0) -> Meter:
        """A meter that tells this timeline what each step took."""
        return _Meter(self, block_bytes=block_bytes)

    def stepped(self, step: Step) -> None:
        """See base."""
        if not (step.chunks or step.padding):
            return
        seats = {}
        for sequence in step.running:
            assert sequence.row is not None, "who runs has a row"
            number = sequence.request.seed
            _, chunk = step.chunks.get(sequence.number, (None, None))
            if chunk is None:
                seats[sequence.row] = (number, Kind.HELD, 0)
                continue
            peak = self._peaks.get(number, 0)
            if chunk.start < peak:
                kind = Kind.AGAIN
            else:
                kind = Kind.PREFILL if chunk.start < sequence.num_prompt else Kind.DECODE
            self._peaks[number] = max(peak, chunk.start + chunk.count)
            seats[sequence.row] = (number, kind, chunk.count)
        queue: list[int] = []
        for sequence in step.waiting:
            if len(queue) == LISTED:
                break
            queue.append(sequence.request.seed)
        self._planned.append(
            _Frame(
                seats=seats,
                padding=step.padding,
                evicted=[sequence.request.seed for sequence in step.evicted],
                waiting=step.num_waiting,
                queue=tuple(queue),
                reason=_reason(step),
                blocks=step.num_blocks - step.num_free,
                tokens=sum(chunk.count for _, chunk in step.chunks.values()),
            )
        )

    def measured(self, start: float, seconds: float, useful: int) -> None:
        """The oldest planned step took this long and had so many useful rows."""
        if self._num_steps == MAX_STEPS:
            raise ValueError(f"a timeline has at most {MAX_STEPS:,} passes: take fewer requests or shorter answers")
        frame = self._planned.popleft()
        at = self._num_steps
        self._num_steps += 1
        for number in frame.evicted:
            self._evictions.append((at, number, self._seat_of.get(number, -1)))
        for row, (number, kind, tokens) in frame.seats.items():
            self._mark(at, row, number, kind, tokens)
            self._seat_of[number] = row
        if not any(kind in (Kind.PREFILL, Kind.AGAIN) for _, kind, _ in frame.seats.values()):
            free = (row for row in range(frame.padding + len(frame.seats)) if row not in frame.seats)
            for row, _ in zip(free, range(frame.padding), strict=False):
                self._mark(at, row, -1, Kind.PADDING, 1)
        if not self._queue or self._queue[-1][1] != frame.queue:
            self._queue.append((at, frame.queue))
        values = (
            round(1e3 * start, 3),
            round(1e3 * seconds, 3),
            frame.tokens,
            frame.blocks,
            frame.padding,
            frame.waiting,
            frame.reason,
            useful,
        )
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name].append(value)

    def _mark(self, at: int, row: int, number: int, kind: Kind, tokens: int) -> None:
        while len(self._rows) <= row:
            self._rows.append([])
        runs = self._rows[row]
        last = runs[-1] if runs else None
        steady = kind in (Kind.DECODE, Kind.HELD, Kind.PADDING)
        if (
            steady
            and last is not None
            and (last.number, last.kind, last.first + last.length) == (number, kind, at)
            and last.tokens == tokens
        ):
            last.length += 1
        else:
            runs.append(_Run(at, 1, number, kind, tokens))

    def content(self, result: Result, origin: float = 0.0) -> dict[str, Any]:
        """All of it, with the totals and the requests of the finished run.

        Times are in milliseconds from ``origin``, in seconds on the run's clock. ``rows``: per seat, flat, (first step,
        number of steps, request, kind, tokens per step) of every run. ``queue``: (step, requests in order) where it
        changes. ``evictions``: (step, request, seat). ``requests``: see the names beside them.
        """
        seats = int(result.about["settings"]["max_num_seqs"])
        evicted: dict[int, int] = {}
        for _, number, _ in self._evictions:
            evicted[number] = evicted.get(number, 0) + 1
        return {
            "rule": self._rule,
            "seats": seats,
            "settings": dict(result.about["settings"]),
            "steps": self._columns | {"start": [round(at - 1e3 * origin, 3) for at in self._columns["start"]]},
            "rows": [
                [v for run in runs for v in (run.first, run.length, run.number, int(run.kind), run.tokens)]
                for runs in [*self._rows, *([[]] * (seats - len(self._rows)))]
            ],
            "queue": [[at, list(queue)] for at, queue in self._queue],
            "evictions": [list(entry) for entry in self._evictions],
            "totals": result.content()["totals"],
            "ttft": asdict(result.summary.ttft),
            "itl": asdict(result.summary.itl),
            "tokens_per_second": result.summary.output_tokens_per_second,
            "columns": list(_REQUEST),
            "requests": [
                [
                    int(record.request_id),
                    _ms(record.arrival, origin),
                    record.input_tokens,
                    record.output_tokens,
                    _ms(record.admitted, origin),
                    _ms(record.first_token, origin),
                    _ms(record.ended, origin),
                    evicted.get(int(record.request_id), 0),
                    record.message,
                ]
                for record in result.records
            ],
        }


_COLUMNS = ("start", "length", "tokens", "blocks", "padding", "waiting", "reason", "useful")
_REQUEST = ("id", "arrival", "prompt", "output", "admitted", "first", "ended", "preemptions", "message")


def _ms(seconds: float | None, origin: float) -> float | None:
    return None if seconds is None else round(1e3 * (seconds - origin), 3)


def _reason(step: Step) -> int:
    if not step.num_waiting:
        return 0
    if step.obstacle is None:
        return _REASONS[Obstacle.BLOCKS] if step.evicted else _RULE
    return _REASONS[step.obstacle]


class _Meter(Meter):
    def __init__(self, timeline: Timeline, *, block_bytes: float) -> None:
        super().__init__(block_bytes=block_bytes)
        self._timeline = timeline

    def stepped(self, replica: Metered, plan: StepPlan, step: StepFeatures, start: float, seconds: float) -> None:
        useful = self.totals.useful_slot_steps
        super().stepped(replica, plan, step, start, seconds)
        if step.computes:
            self._timeline.measured(start, seconds, self.totals.useful_slot_steps - useful)
