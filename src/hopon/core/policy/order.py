"""Order: one total order of candidates, smallest first."""

from __future__ import annotations

from typing import Protocol

from hopon.core.sequence import Sequence

Key = tuple[int, int, int]


class Order(Protocol):
    """Who goes first. A key may only depend on what does not change while a sequence waits, or while it runs."""

    def key(self, sequence: Sequence) -> Key:
        """Sort key among the waiting, and among the running."""


class Fcfs:
    """First come, first served within a priority; who has run before resumes ahead of who has not."""

    def key(self, sequence: Sequence) -> Key:
        """(priority, not yet started, order of arrival)."""
        return (sequence.request.priority, sequence.admitted is None, sequence.number)
