"""Routers: which of several replicas serves a request. They see what a router in front of servers can know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hopon.core.types import Request
from hopon.sim.loop import Replica, Router


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """The next one."""
        index = self._next % len(replicas)
        self._next += 1
        return index


class LeastLoad:
    """The one with the fewest unfinished requests; ties go to the first."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """See the class."""
        return min(range(len(replicas)), key=lambda index: replicas[index].load)


class PrefixAware:
    """The one that was sent the longest equal beginning before, unless it is much busier than the idlest one.

    Beginnings are remembered by whole pages, as sent: what a replica has evicted since is not known here.

    Args:
        page: tokens of a page.
        slack: unfinished requests by which it may exceed the idlest replica.
    """

    def __init__(self, page: int = 256, slack: int = 16) -> None:
        if page < 1 or slack < 0:
            raise ValueError(f"page must be at least 1 and slack at least 0, got {page} and {slack}")
        self._page = page
        self._slack = slack
        self._pages: dict[int, set[int]] = {}  # hash of a beginning -> replicas that were sent it

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """See the class; ties go to the less loaded, then to the first."""
        beginnings = self._beginnings(request)
        known = [0] * len(replicas)
        for length, beginning in enumerate(beginnings, 1):
            holders = self._pages.get(beginning)
            if not holders:
                break
            for index in holders:
                if known[index] == length - 1:
                    known[index] = length
        loads = [replica.load for replica in replicas]
        limit = min(loads) + self._slack
        able = [index for index in range(len(replicas)) if loads[index] <= limit]
        chosen = min(able, key=lambda index: (-known[index], loads[index], index))
        for beginning in beginnings:
            self._pages.setdefault(beginning, set()).add(chosen)
        return chosen

    def _beginnings(self, request: Request) -> list[int]:
        page, prompt = self._page, request.prompt
        beginning = 0
        found = []
        for start in range(0, len(prompt) - page + 1, page):  # tuples of numbers hash alike in every process
            beginning = hash((beginning, prompt[start : start + page]))
            found.append(beginning)
        return found


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix-aware": PrefixAware,
}
"""By name."""


def router(name: str) -> Router:
    """A fresh router. Raises ValueError for an unknown name; lists the names."""
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}; known: {', '.join(ROUTERS)}")
    return ROUTERS[name]()
