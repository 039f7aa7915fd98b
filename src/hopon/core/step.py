"""A step in the making: what a policy sees while it decides, and what the scheduler collects.

Policies read it; only the scheduler writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from hopon.core.blocks import BlockPool
from hopon.core.config import SchedulerConfig
from hopon.core.plan import Chunk, Move, OpenRow
from hopon.core.queue import Queue
from hopon.core.sequence import Sequence


class Obstacle(Enum):
    """What kept the first of those that still wait from starting."""

    SEATS = "seats"  # no row is free
    TOKENS = "tokens"  # the step's token budget is used up
    BLOCKS = "blocks"  # there is no memory for it


class Step:
    """One plan in the making.

    Args:
        now: seconds on the driver's clock.
        config: limits.
        pool: the blocks.
        waiting: who could start.
        running: who holds a row.
        input_closed: no more requests will come.
        match: blocks of the prefix cache that a waiting sequence could start from.
    """

    def __init__(
        self,
        *,
        now: float,
        config: SchedulerConfig,
        pool: BlockPool,
        waiting: Queue,
        running: Queue,
        input_closed: bool,
        match: Callable[[Sequence], list[int]],
    ) -> None:
        self.now = now
        self.config = config
        self.input_closed = input_closed
        self.budget = config.max_num_batched_tokens
        self.chunks: dict[int, tuple[Sequence, Chunk]] = {}
        self.admitted: list[Sequence] = []
        self.evicted: list[Sequence] = []
        self.opened: list[OpenRow] = []
        self.closed: list[int] = []
        self.moves: list[Move] = []
        self.padding = 0
        self.wake_at: float | None = None
        self.obstacle: Obstacle | None = None  # None where nobody waits, or the policy let nobody in
        self._pool = pool
        self._waiting = waiting
        self._running = running
        self._match = match

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row, first in order first; a copy."""
        return self._running.sequences()

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that hold no row, first in order first."""
        return self._waiting

    @property
    def num_running(self) -> int:
        """How many hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many hold none."""
        return len(self._waiting)

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given away now."""
        return self._pool.num_free

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that it need not compute: kept ones, or what the prefix cache has of it now."""
        return sequence.num_computed or len(self._match(sequence)) * self.config.block_size

    def remove(self, sequence: Sequence) -> None:
        """A victim that has been served in this step gives its tokens back to the budget."""
        entry = self.chunks.pop(sequence.number, None)
        if entry is not None:
            self.budget += entry[1].count
