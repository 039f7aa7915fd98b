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


class Aging:
    """By priority and waiting time: to wait for ``seconds_per_level`` is worth one level of priority.

    All who wait grow older at the same pace, so who stands ahead of whom never changes, and the keys stay as they are:
    the arrival, set back or forward by the priority. A request is overtaken only by those that arrive within its
    distance in levels times ``seconds_per_level``, so nobody starves. Who has run before counts as one level better.

    Args:
        seconds_per_level: more than 0.
    """

    dynamic = False

    def __init__(self, seconds_per_level: float) -> None:
        if not seconds_per_level > 0:
            raise ValueError(f"seconds_per_level must be more than 0, got {seconds_per_level}")
        self._seconds = seconds_per_level

    def key(self, sequence: Sequence, now: float) -> Key:
        """(arrival as if of priority 0, not resuming, order of arrival)."""
        request = sequence.request
        level = request.priority - sequence.resumes
        return (request.arrival + level * self._seconds, not sequence.resumes, sequence.rank)


class Fcfs:
    """First come, first served within a priority; who has run before resumes ahead of who has not."""

    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """(priority, not resuming, order of arrival)."""
        return (sequence.request.priority, not sequence.resumes, sequence.rank)
