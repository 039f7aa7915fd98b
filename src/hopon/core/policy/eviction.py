"""Eviction: who gives its blocks back when a running sequence cannot grow."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from hopon.core.sequence import Sequence


class Eviction(Protocol):
    """Chooses a victim among the running."""

    def victim(self, running: List[Sequence]) -> Sequence:
        """``running`` is not empty and in the policy's order, first come first."""


class Newest:
    """The last in order: the oldest always runs to its end."""

    def victim(self, running: List[Sequence]) -> Sequence:
        """The last one."""
        return running[-1]
