"""Admission: for each candidate in order, may it start now?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hopon.core.sequence import Sequence


class Verdict(Enum):
    """What becomes of a candidate in this step."""

    START = "start"
    STOP = "stop"  # not now, and nobody behind it either


class Admission(Protocol):
    """Decides on memory; seats and the token budget are the scheduler's."""

    def decide(
        self, sequence: Sequence, *, num_needed: int, num_free: int, num_blocks: int, num_running: int
    ) -> Verdict:
        """Blocks needed for all known tokens, blocks free for it, pool size, sequences running beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePrompt:
    """All known tokens must fit, and beside others a watermark must stay free for their growth.

    The watermark is a share of the pool, and at least one block for every running sequence, so that a newcomer does not
    push out a running one right after it came in. Alone in the pool, fitting is enough.
    """

    watermark: float

    def decide(
        self, sequence: Sequence, *, num_needed: int, num_free: int, num_blocks: int, num_running: int
    ) -> Verdict:
        """START or STOP: strictly first come, first served."""
        spare = max(int(self.watermark * num_blocks), num_running) if num_running else 0
        return Verdict.START if num_needed + spare <= num_free else Verdict.STOP
