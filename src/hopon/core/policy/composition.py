"""Composition: what a step is made of, in which order.

A composition is a generator of actions. The scheduler carries each one out before it asks for the next, so the code
between two yields sees what came of them: exclusivity, turns and ratios are plain conditions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hopon.core.policy.eviction import Victim
from hopon.core.policy.order import Key
from hopon.core.record import record
from hopon.core.sequence import Sequence
from hopon.core.step import Step
from hopon.core.types import FinishReason

Size = Callable[[Sequence, int, int], int]


class Which(Enum):
    """Some of the running sequences."""

    ALL = "all"
    DECODE = "decode"  # one token to compute
    PREFILL = "prefill"  # more


@record(kw_only=True)
class Continue:
    """Running sequences compute, in order, growing their memory.

    Args:
        which: whom it concerns.
        max_tokens: tokens of this action; None for what is left of the step's budget.
        max_chunk: tokens of one sequence.
        max_seqs: sequences of this action.
        whole: a sequence computes all it has left or nothing.
        accepts: whom it concerns among those; others are passed over. None: everybody.
        size: tokens of one sequence, from (sequence, tokens it has left, tokens the action has left); with 0 it is
            passed over. None: as many as fit.
        strict: nobody continues behind a sequence that finds no memory.
        extend: those who compute in this step already get more; without it they are passed over.
    """

    which: Which = Which.ALL
    max_tokens: int | None = None
    max_chunk: int | None = None
    max_seqs: int | None = None
    whole: bool = False
    accepts: Callable[[Sequence], bool] | None = None
    size: Size | None = None
    strict: bool = False
    extend: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a sequence finds and leaves cached prefixes: only under the same name, and not more than ``max_tokens``."""

    name: str
    max_tokens: int


@record(kw_only=True)
class Admit:
    """Waiting sequences start, in order, until one cannot.

    Args:
        max_seqs: most that start.
        min_seqs: when fewer can, none does.
        max_tokens: tokens of this action; None for what is left of the step's budget.
        max_chunk: tokens of one sequence.
        whole: a sequence computes its whole prompt at once or does not start.
        accepts: whom it concerns; others are passed over. None: everybody.
        size: as for :class:`Continue`; 0 ends the admissions.
        scope: the part of the prefix cache that a sequence lives in from now on. None: the one it has, which is all
            of the cache at first.
    """

    max_seqs: int | None = None
    min_seqs: int = 1
    max_tokens: int | None = None
    max_chunk: int | None = None
    whole: bool = False
    accepts: Callable[[Sequence], bool] | None = None
    size: Size | None = None
    scope: Callable[[Sequence], Scope] | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Take memory from a running sequence that need not have asked for any."""

    victim: Victim


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a waiting sequence that will not be served, with the reason."""

    sequence: Sequence
    message: str
    reason: FinishReason = FinishReason.REFUSED


@dataclass(frozen=True, slots=True)
class Pad:
    """Compute this many rows that nobody needs.

    With ``more`` the batch is not over after this step, even when nobody in it runs any more: planning goes on, and
    news that is delivered by the batch is held.
    """

    num_rows: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """If nothing computes in this step, planning makes sense again at this time (or when something arrives)."""

    moment: float


@dataclass(frozen=True, slots=True)
class Sort:
    """Put the waiting in another order, until one of them moves or is sorted anew.

    ``key`` ends in the rank and is as long as the keys of the policy's order, so that no two are the same.
    """

    key: Callable[[Sequence], Key]


Action = Continue | Admit | Evict | Refuse | Pad | WaitUntil | Sort


class Composition(Protocol):
    """What a step is made of."""

    def compose(self, step: Step) -> Iterator[Action]:
        """Actions in order; ``step`` shows what came of those before."""


def one_by_one(step: Step, action: Admit) -> Iterator[Action]:
    """The action again and again, as long as it starts somebody: an admission then sees who started before."""
    count = -1
    while count < len(step.admitted):
        count = len(step.admitted)
        yield action


def is_stuck(step: Step) -> bool:
    """Nobody computes and no submitted step will give memory back: without an eviction nothing will ever happen."""
    if step.chunks:
        return False
    holders = [sequence for sequence in (*step.running, *step.waiting) if sequence.blocks]
    if not holders or any(sequence.num_in_flight for sequence in holders):
        return False
    return sum(len(sequence.blocks) for sequence in holders) >= step.num_blocks - step.num_free


class DecodeFirst:
    """Running decodes claim the budget first, then running prefill chunks, then the waiting.

    Nobody starts in a step that had to take memory from somebody.
    """

    def compose(self, step: Step) -> Iterator[Action]:
        """Decode, prefill, admit."""
        yield Continue(which=Which.DECODE)
        yield Continue(which=Which.PREFILL)
        if not step.evicted:
            yield Admit()


class RequestLevel(ABC):
    """A batch starts when the one before is finished, and nobody joins it.

    All prompts are computed before anybody decodes: in one pass where the budget allows, else in several. Made for
    admissions that reserve: whoever is chosen starts and never loses its memory.
    """

    def __init__(self) -> None:
        self._chosen: list[Sequence] = []

    @abstractmethod
    def choose(self, step: Step) -> Generator[Action, None, list[Sequence]]:
        """The next batch, out of the waiting, or nobody yet. The whole pool is its memory (``step.num_blocks``)."""

    def starting(self) -> list[Sequence]:
        """Those chosen that have not started yet."""
        self._chosen = [sequence for sequence in self._chosen if sequence.row is None and not sequence.finished]
        return self._chosen

    def compose(self, step: Step) -> Iterator[Action]:
        """Choose if nobody runs; prompts; decodes when all prompts are done."""
        if not step.num_running and not self.starting():
            self._chosen = yield from self.choose(step)
        yield from self.prompts(step)
        if not step.chunks and not self.starting():
            yield Continue()

    def prompts(self, step: Step) -> Iterator[Action]:
        """Prompts of the batch, as far as the budget goes."""
        yield Continue(accepts=_in_prompt)
        numbers = {sequence.number for sequence in self.starting()}
        if numbers:
            yield Admit(max_seqs=len(numbers), accepts=lambda sequence: sequence.number in numbers)


def _in_prompt(sequence: Sequence) -> bool:
    """Whether it has still to compute tokens that it came with."""
    return sequence.num_computed < len(sequence.request.prompt) + len(sequence.request.output)
