"""What an engine process tells of a step beside the news of requests: seats given and lost, why others wait, the times.

An observer of the policy sees the step, a wrapper around the executor and the inbox sees the clock; neither is known to
the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from hopon.core.engine import Command, Inbox
from hopon.core.plan import Executor, StepHandle, StepPlan, StepResult
from hopon.core.policy.preset import Observer
from hopon.core.step import Obstacle, Step


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """How many wait for what: a seat, tokens of a step's budget, KV blocks, or only their turn."""

    seats: int = 0
    tokens: int = 0
    blocks: int = 0
    order: int = 0


class Seconds(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of a step went. ``tell`` is that of the step before."""

    plan: float = 0.0
    compute: float = 0.0
    commit: float = 0.0
    tell: float = 0.0


class Notes(msgspec.Struct, frozen=True, array_like=True):
    """Notes of what was planned since the last ones.

    Args:
        admitted: requests that got a seat.
        preempted: requests that lost theirs.
        num_rows: rows that computed, padding included; 0 when nothing did.
        num_tokens: tokens that went through the model.
        num_useful_rows: those that gave a token or computed something for the first time.
        waiting: see there.
        seconds: see there.
        chunks: (request, first position, number of tokens) of every row, where details are wanted.
    """

    admitted: list[str] = []
    preempted: list[str] = []
    num_rows: int = 0
    num_tokens: int = 0
    num_useful_rows: int = 0
    waiting: Waiting = Waiting()
    seconds: Seconds = Seconds()
    chunks: list[tuple[str, int, int]] = []


class Notebook(Observer):
    """Takes notes of every step.

    Args:
        with_chunks: note what each request computes.
        clock: seconds.
    """

    def __init__(self, *, with_chunks: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._with_chunks = with_chunks
        self._clock = clock
        self._tell = 0.0
        self._woken = clock()
        self._clear()

    def _clear(self) -> None:
        self._admitted: list[str] = []
        self._preempted: list[str] = []
        self._chunks: list[tuple[str, int, int]] = []
        self._num_rows = self._num_tokens = self._num_useful_rows = 0
        self._waiting = Waiting()
        self._submitted = self._computed = 0.0

    # ---- what it hears ----

    def stepped(self, step: Step) -> None:
        """See base."""
        self._admitted += [sequence.request.request_id for sequence in step.admitted]
        self._preempted += [sequence.request.request_id for sequence in step.evicted]
        num_again = 0
        for sequence, chunk in step.chunks.values():
            if sequence.num_computed < sequence.peak_computed and not chunk.sample:
                num_again += 1
        self._num_rows += len(step.chunks) + step.padding
        self._num_tokens += step.config.max_num_batched_tokens - step.budget
        self._num_useful_rows += len(step.chunks) - num_again
        self._waiting = _waiting(step)
        if self._with_chunks:
            self._chunks += [
                (sequence.request.request_id, chunk.start, chunk.count) for sequence, chunk in step.chunks.values()
            ]

    def woken(self) -> None:
        """The driver begins an iteration."""
        self._woken = self._clock()

    def submitted(self) -> None:
        """The plan is made."""
        self._submitted = self._clock()

    def computed(self) -> None:
        """The result is there."""
        self._computed = self._clock()

    def take(self) -> Notes:
        """The notes since the last time; the news is about to be told."""
        telling = self._clock()
        seconds = Seconds()
        if self._submitted and self._computed:
            seconds = Seconds(
                self._submitted - self._woken,
                self._computed - self._submitted,
                telling - self._computed,
                self._tell,
            )
        notes = Notes(
            self._admitted,
            self._preempted,
            self._num_rows,
            self._num_tokens,
            self._num_useful_rows,
            self._waiting,
            seconds,
            self._chunks,
        )
        self._clear()
        self._telling = telling
        return notes

    def told(self) -> None:
        """The news has been told."""
        self._tell = self._clock() - self._telling


def _waiting(step: Step) -> Waiting:
    count = step.num_waiting
    if not count:
        return Waiting()
    obstacle = Obstacle.BLOCKS if step.obstacle is None and step.evicted else step.obstacle
    match obstacle:
        case Obstacle.SEATS:
            return Waiting(seats=count)
        case Obstacle.TOKENS:
            return Waiting(tokens=count)
        case Obstacle.BLOCKS:
            return Waiting(blocks=1, order=count - 1)
        case None:
            return Waiting(order=count)


class NotedExecutor:
    """An executor whose steps are timed."""

    def __init__(self, inner: Executor, notebook: Notebook) -> None:
        self._inner = inner
        self._notebook = notebook

    def submit(self, plan: StepPlan) -> StepHandle:
        """See :class:`hopon.core.plan.Executor`."""
        self._notebook.submitted()
        return _NotedHandle(self._inner.submit(plan), self._notebook)

    def close(self) -> None:
        """See there."""
        self._inner.close()


class _NotedHandle:
    def __init__(self, inner: StepHandle, notebook: Notebook) -> None:
        self._inner = inner
        self._notebook = notebook

    def result(self) -> StepResult:
        result = self._inner.result()
        self._notebook.computed()
        return result


class NotedInbox:
    """An inbox that tells when an iteration begins."""

    def __init__(self, inner: Inbox, notebook: Notebook) -> None:
        self._inner = inner
        self._notebook = notebook

    def drain(self, timeout: float | None) -> Sequence[Command]:
        """See :class:`hopon.core.engine.Inbox`."""
        commands = self._inner.drain(timeout)
        self._notebook.woken()
        return commands
