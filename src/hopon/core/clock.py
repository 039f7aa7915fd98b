"""Time, as drivers see it. Nothing below a driver looks at a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go backwards; the zero point means nothing."""

    def now(self) -> float:
        """Seconds."""


class WallClock:
    """The machine's monotonic clock, shared by all processes of one machine."""

    def now(self) -> float:
        """Seconds since some point in the past."""
        return time.monotonic()


class VirtualClock:
    """A clock that a simulator moves."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def advance_to(self, moment: float) -> None:
        """Move forward; raises ValueError when asked to go back."""
        if moment < self._now:
            raise ValueError(f"a clock cannot go back from {self._now} to {moment}")
        self._now = moment
