"""Who runs again after the engine died, and with whom: the rule that finds a request that kills engines.

It knows request ids only; engines, sockets and tokens are :mod:`hopon.serve.client`'s.

An engine says which requests a step contains before it runs it. When it dies, the requests of that step are *suspects*;
all others are not. The next engine gets the suspects first, in two halves, one after the other; nobody else is in it
meanwhile. A half has proved itself when each of its members has had a new token or has ended; then its members leave
the engine again, and the next group is tried. When all have been tried, everybody enters in order of arrival and goes
on, and only then those who were no suspects. (They wait no longer than the suspects need for one token each, which
they would do anyway: suspects were running, so they come first.) When the engine dies again, the half that was in the
step is halved and queues at the end, so that every group gets its turn before the same one is blamed again.

A request is failed only if it was alone in the step at two deaths and had no token in between. With one such request
among n it takes about log2(n) + 2 deaths until it is found, and between two of them others get tokens; the bound on
deaths without a token from anyone is the client's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class Trials:
    """The groups that still have to prove themselves."""

    def __init__(self) -> None:
        self._groups: deque[list[str]] = deque()
        self._group: list[str] = []  # in the engine now
        self._unproven: set[str] = set()  # of those: no token yet
        self._died_alone: set[str] = set()  # alone in the step of a death, and no token since

    @property
    def group(self) -> Sequence[str]:
        """Who is tried now; empty between two trials."""
        return self._group

    @property
    def undecided(self) -> bool:
        """Somebody of the group has not proved himself."""
        return bool(self._unproven)

    def proved(self, request_id: str) -> None:
        """A request had a new token, or has ended in whatever way."""
        self._unproven.discard(request_id)
        self._died_alone.discard(request_id)

    def died(self, step: Sequence[str]) -> str | None:
        """The engine died in a step with these requests.

        Returns:
            The request that must not run again, if it has come to that.
        """
        untried = [i for i in self._group if i in self._unproven and i not in step]
        self._group = []
        self._unproven.clear()
        if untried:  # it died before their step
            self._groups.appendleft(untried)
        if len(step) == 1:
            [only] = step
            if only in self._died_alone:
                self._died_alone.discard(only)
                return only
            self._died_alone.add(only)
            self._groups.append([only])
        elif step:
            middle = (len(step) + 1) // 2
            self._groups += [list(step[:middle]), list(step[middle:])]
        return None

    def next_group(self, unfinished: Collection[str]) -> Sequence[str]:
        """Begin the next trial; empty when all trials are over.

        Args:
            unfinished: requests that have not ended; others need no trial.
        """
        assert not self._unproven, "one trial at a time"
        self._group = []
        while self._groups and not self._group:
            self._group = [i for i in self._groups.popleft() if i in unfinished]
        self._unproven.update(self._group)
        return self._group
