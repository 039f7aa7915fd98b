"""The seam between control and data: what one step shall compute, and what came of it.

A plan is plain data and says everything an executor needs. An executor keeps, per row, the block table and the token
history; a plan only adds to them, so nothing here grows with the context. Plans run in submission order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.record import record
from hopon.core.types import FinishReason, Logprob, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRow:
    """A sequence takes a row: its whole history so far, and how to sample it.

    ``output`` is what is known of the output when the plan is made; after a preemption it is not empty. Random
    numbers depend on (seed, choice, output index) alone.
    """

    row: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice: int
    stop_token_ids: tuple[int, ...]


@record(kw_only=True)
class Chunk:
    """``count`` tokens of a row, from absolute position ``start``, go through the model in this step.

    The last ``num_logits`` of them want logits: 0 for an interior prefill chunk, 1 to sample behind the last token,
    more to score prompt tokens. With ``sample`` the last position yields a new token, appended to the row's history
    by the executor itself. Positions before the last one that want logits are scored against the tokens that follow
    them (prompt log-probabilities). ``new_blocks`` are appended to the row's block table first.
    """

    row: int
    start: int
    count: int
    num_logits: int
    sample: bool
    new_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one block before the step computes: within the pool, to the host tier or from it."""

    kind: Literal["copy", "to_host", "from_host"]
    source: int
    target: int


@record(kw_only=True)
class StepPlan:
    """One pass over the model.

    Order of effects: ``closed`` rows are dropped, ``moves`` run, ``opened`` rows appear, then all ``chunks`` compute.
    ``padding`` rows of computation are paid for and thrown away (padded presets). An empty plan (no chunks) with work
    pending names ``wake_at``, the time at which planning again makes sense, unless something arrives before.
    """

    step: int
    closed: tuple[int, ...] = ()
    opened: tuple[OpenRow, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    moves: tuple[Move, ...] = ()
    padding: int = 0
    wake_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, without padding."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Nothing for an executor to do."""
        return not (self.chunks or self.closed or self.opened or self.moves or self.padding)


@record()
class RowResult:
    """What one chunk yielded: 0..n new tokens with log-probabilities where asked, and scores of prompt tokens.

    ``finish``: the executor's own reason to end the row behind these tokens. STOP: its guide is complete; REFUSED: it
    cannot be followed, with the reason in ``message``.
    """

    row: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None
    message: str = ""


@record()
class StepResult:
    """One RowResult per chunk of the plan, in the plan's order."""

    rows: tuple[RowResult, ...] = ()


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step. Raises whatever the step raised."""


class Executor(Protocol):
    """Computes plans, in submission order."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step; may return before it is done."""

    def close(self) -> None:
        """Release threads and memory; no step may follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What an executor factory returns: the executor and the settings that fit it.

    ``summary`` is for people and for ``/metrics``: dtype, level, threads, bytes, tokens, ...
    """

    executor: Executor
    config: SchedulerConfig
    summary: dict[str, str | int | float]


Report = Callable[[str, float], None]
"""Progress of a factory: (what is being done, share done in [0, 1])."""

ExecutorFactory = Callable[[EngineOptions, Report], Deployment]
"""Loads a model. Raises ValueError or OSError with the file or the value at fault."""
