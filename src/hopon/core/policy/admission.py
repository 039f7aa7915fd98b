"""Admission: for each candidate in order, how much memory does it take at once, and may it start now?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hopon.core.record import record
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class Verdict(Enum):
    """What becomes of a candidate in this step."""

    START = "start"
    SKIP = "skip"  # not now, but somebody behind it may
    STOP = "stop"  # not now, and nobody behind it either


@record(kw_only=True)
class Offer:
    """What a candidate would need and what there is, those chosen before it in this step counted in.

    Args:
        num_needed: blocks to take for its claim, beyond what it keeps or finds cached.
        num_free: blocks that can be given to it.
        num_running: sequences beside it.
        num_tokens: tokens it would compute in this step.
        num_cached: tokens it finds in the prefix cache.
    """

    num_needed: int
    num_free: int
    num_running: int
    num_tokens: int
    num_cached: int


class Admission(Protocol):
    """Decides on memory; seats and the token budget are the scheduler's."""

    def claim(self, sequence: Sequence) -> int:
        """Tokens of memory that it takes when it starts.

        More than it knows is a reservation; less, and it grows with its chunks. It never takes less than its first
        chunk needs, and what it knows must fit into the pool.
        """

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """May it start? An offer with ``num_needed > num_free`` can never be a START."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePrompt:
    """All known tokens must fit, and beside others a watermark must stay free for their growth.

    The watermark is a share of the pool, and with ``spare_per_running`` at least that many blocks for every running
    sequence, so that a newcomer does not push out a running one right after it came in. Alone in the pool, fitting is
    enough.
    """

    watermark: float = 0.01
    spare_per_running: int = 1

    def claim(self, sequence: Sequence) -> int:
        """What it knows."""
        return sequence.num_tokens

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP: strictly first come, first served."""
        spare = 0
        if offer.num_running:
            spare = max(int(self.watermark * step.num_blocks), self.spare_per_running * offer.num_running)
        return Verdict.START if offer.num_needed + spare <= offer.num_free else Verdict.STOP


@dataclass(frozen=True, slots=True)
class ReserveMaxTokens:
    """A sequence takes memory for its prompt and its whole possible output, so that it never has to grow."""

    def claim(self, sequence: Sequence) -> int:
        """Prompt and ``max_tokens`` (without one: up to the model's length)."""
        return max(sequence.num_tokens, sequence.num_prompt + sequence.max_output)

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP: strictly in order."""
        return Verdict.START if offer.num_needed <= offer.num_free else Verdict.STOP


@dataclass(frozen=True, kw_only=True, slots=True)
class ByChunk:
    """Memory is taken chunk by chunk.

    Args:
        whole_fits: a sequence starts only where all that it knows would fit now; nothing of it is set aside.
        watermark: share of the pool that an admission leaves free while others run.
    """

    whole_fits: bool = True
    watermark: float = 0.0

    def claim(self, sequence: Sequence) -> int:
        """Nothing beyond its first chunk."""
        return 0

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP: strictly in order."""
        needed = offer.num_needed
        if self.whole_fits:
            size = step.config.block_size
            needed = -(-sequence.num_tokens // size) - max(offer.num_cached // size, len(sequence.blocks))
        if offer.num_running:
            needed += int(self.watermark * step.num_blocks)
        return Verdict.START if needed <= offer.num_free else Verdict.STOP
