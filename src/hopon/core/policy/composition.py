"""Composition: what a step is made of, in which order.

A composition is a generator of actions. The scheduler carries each one out before it asks for the next, so the code
between two yields sees what came of them: exclusivity, turns and ratios are plain conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hopon.core.policy.eviction import Victim
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class Which(Enum):
    """Some of the running sequences."""

    ALL = "all"
    DECODE = "decode"  # one token to compute
    PREFILL = "prefill"  # more


@dataclass(frozen=True, kw_only=True, slots=True)
class Continue:
    """Running sequences compute, in order, growing their memory.

    Args:
        which: whom it concerns.
        max_tokens: tokens of this action; None for what is left of the step's budget.
        max_chunk: tokens of one sequence.
        max_seqs: sequences of this action.
        whole: a sequence computes all it has left or nothing.
        accepts: whom it concerns among those; others are passed over. None: everybody.
    """

    which: Which = Which.ALL
    max_tokens: int | None = None
    max_chunk: int | None = None
    max_seqs: int | None = None
    whole: bool = False
    accepts: Callable[[Sequence], bool] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Waiting sequences start, in order, until one cannot.

    Args:
        max_seqs: most that start.
        min_seqs: when fewer can, none does.
        max_tokens: tokens of this action; None for what is left of the step's budget.
        max_chunk: tokens of one sequence.
        whole: a sequence computes its whole prompt at once or does not start.
        accepts: whom it concerns; others are passed over. None: everybody.
    """

    max_seqs: int | None = None
    min_seqs: int = 1
    max_tokens: int | None = None
    max_chunk: int | None = None
    whole: bool = False
    accepts: Callable[[Sequence], bool] | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Take memory from a running sequence that need not have asked for any."""

    victim: Victim


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a waiting sequence that will not be served, with the reason."""

    sequence: Sequence
    message: str


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


Action = Continue | Admit | Evict | Refuse | Pad | WaitUntil


class Composition(Protocol):
    """What a step is made of."""

    def compose(self, step: Step) -> Iterator[Action]:
        """Actions in order; ``step`` shows what came of those before."""


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
