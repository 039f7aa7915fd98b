"""Limits that a request brings along for its own times, and whether they were met. It knows times only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Seconds; None is no limit.

    Args:
        ttft: from arrival to the first token.
        tpot: (end - first token) / (tokens - 1); an output of one token meets any limit.
        e2e: from arrival to the last token.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Of one output, seconds on one clock. ``first`` and ``last`` are None when it has no token."""

    arrival: float
    first: float | None
    last: float | None
    num_tokens: int
    completed: bool


class Measured(msgspec.Struct, kw_only=True):
    """One limit as it is reported; milliseconds. ``value`` is the worst of the outputs, null where there is none."""

    limit_ms: float
    value_ms: float | None
    met: bool


class Judgement(msgspec.Struct, kw_only=True):
    """What is reported of a request's limits; ``met`` when all are. Limits that it has not are null."""

    met: bool
    ttft: Measured | None = None
    tpot: Measured | None = None
    e2e: Measured | None = None

    @property
    def each(self) -> Mapping[str, bool]:
        """Limit to whether it was met."""
        found = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: measured.met for name, measured in found.items() if measured is not None}


def judge(slo: Slo, outputs: Sequence[Times]) -> Judgement:
    """Whether all outputs kept within the limits; what did not complete has met none."""
    completed = all(output.completed for output in outputs)

    def measured(limit: float | None, values: Sequence[float | None]) -> Measured | None:
        if limit is None:
            return None
        known = [value for value in values if value is not None]
        worst = max(known, default=None)
        met = completed and (worst is None or worst <= limit)
        return Measured(limit_ms=limit * 1e3, value_ms=None if worst is None else round(worst * 1e3, 3), met=met)

    judgement = Judgement(
        met=True,
        ttft=measured(slo.ttft, [None if o.first is None else o.first - o.arrival for o in outputs]),
        tpot=measured(slo.tpot, [_per_token(output) for output in outputs]),
        e2e=measured(slo.e2e, [None if o.last is None else o.last - o.arrival for o in outputs]),
    )
    judgement.met = all(judgement.each.values())
    return judgement


def _per_token(output: Times) -> float | None:
    if output.first is None or output.last is None or output.num_tokens < 2:
        return None
    return (output.last - output.first) / (output.num_tokens - 1)
