"""Order: one total order of candidates, smallest first."""

from __future__ import annotations

from typing import Protocol

from hopon.core.sequence import Sequence

Key = tuple[float, ...]


class Order(Protocol):
    """Who goes first, among the waiting and among the running.

    A key is taken when a sequence joins either. An order whose keys change while a sequence waits (aging, prefix
    matches) says ``dynamic = True``: then the waiting are sorted anew for every plan.
    """

    dynamic: bool

    def key(self, sequence: Sequence, now: float) -> Key:
        """Sort key; no two sequences may have the same."""


class Arrival:
    """First come, first served; who has run before resumes ahead of who has not. Priorities mean nothing."""

    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """(not resuming, order of arrival)."""
        return (not sequence.resumes, sequence.rank)


class Age:
    """Who came first is first, whatever has become of it since."""

    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """Order of arrival."""
        return (sequence.rank,)


class Fcfs:
    """First come, first served within a priority; who has run before resumes ahead of who has not."""

    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """(priority, not resuming, order of arrival)."""
        return (sequence.request.priority, not sequence.resumes, sequence.rank)
