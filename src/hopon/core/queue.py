"""Sequences in a policy's order: the waiting and the running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from hopon.core.sequence import Sequence

Key = tuple[float, ...]


class Queue:
    """A sorted list; a sequence keeps the key under which it stands here."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence, key: Key) -> None:
        """Put it in its place."""
        sequence.key = key
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it stands."""
        found = self._sequences.pop(bisect_left(self._sequences, sequence.key, key=_key))
        assert found is sequence, f"two sequences of a queue have the key {sequence.key}"

    def sort(self, key: Callable[[Sequence], Key]) -> None:
        """Take new keys of all."""
        for sequence in self._sequences:
            sequence.key = key(sequence)
        self._sequences.sort(key=_key)

    def sequences(self) -> list[Sequence]:
        """All of them, first in order first; a copy."""
        return list(self._sequences)


def _key(sequence: Sequence) -> Key:
    return sequence.key
