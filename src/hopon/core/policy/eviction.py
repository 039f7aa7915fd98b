"""Eviction: what happens when a running sequence cannot grow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Protocol

from hopon.core.sequence import Sequence
from hopon.core.step import Step


class Freed(Enum):
    """What a victim gives back."""

    ALL = "all"  # everything; it recomputes
    TAIL = "tail"  # its last blocks; it recomputes what was in them
    HOST = "host"  # everything, after a copy to the host tier; where that is full, ALL


class Requeue(Enum):
    """Where a victim goes on waiting."""

    FRONT = "front"  # ahead of those that never ran
    BACK = "back"  # as if it had just arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """Who gives back what. ``num_blocks`` counts for TAIL only."""

    sequence: Sequence
    freed: Freed = Freed.ALL
    num_blocks: int = 0
    requeue: Requeue = Requeue.FRONT


def keepers(step: Step) -> list[Sequence]:
    """Waiting sequences that still hold memory, first in order first.

    For orders in which those that have run stand ahead of those that have not: it looks no further.
    """
    return [one for one in takewhile(lambda one: one.resumes, step.waiting) if one.blocks]


@dataclass(frozen=True, slots=True)
class Failure:
    """The sequence that cannot grow ends with an error."""

    message: str


class Eviction(Protocol):
    """Finds memory for a sequence that needs ``missing`` more blocks than are free."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim | Failure | None:
        """A victim (asked again until it suffices), a failure, or None: the sequence waits for another step."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The last in order gives everything back (or moves it to the host): the oldest always runs to its end."""

    freed: Freed = Freed.ALL

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim:
        """The last of the running."""
        return Victim(sequence=step.running[-1], freed=self.freed)


class Never:
    """The sequence waits until others finish. For admissions that reserve, so that nobody ever has to."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> None:
        """Wait."""
