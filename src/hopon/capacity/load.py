"""The load that a capacity belongs to: classes of requests in a mix, and how they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from hopon.bench.schedule import MIXED, SHAREGPT
from hopon.workload.ask import Workload
from hopon.workload.draw import Arrivals, Kind, Sharing, draw_mix
from hopon.workload.lengths import parse_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is offered, at any rate.

    Args:
        kinds: classes and their weights.
        arrivals: constant, poisson or gamma gaps.
        variation: coefficient of variation of gamma gaps.
        sharing: shared beginnings of prompts.
    """

    kinds: tuple[Kind, ...]
    arrivals: Arrivals = "poisson"
    variation: float = 1.0
    sharing: Sharing | None = None

    def draw(self, rate: float, seconds: float, seed: int) -> Workload:
        """Requests that arrive within so many seconds; always at least one."""
        count = ceil(rate * seconds) + 1
        drawn: dict[str, Any] = {"rate": rate, "kinds": self.kinds, "arrivals": self.arrivals}
        drawn |= {"variation": self.variation, "sharing": self.sharing, "seed": seed}
        while (workload := draw_mix(count=count, **drawn)).asks[-1].arrival < seconds:
            count *= 2
        return workload.first(max(1, sum(ask.arrival < seconds for ask in workload)))

    def crowd(self, count: int, seed: int) -> Workload:
        """So many requests at once."""
        return draw_mix(count=count, rate=0.0, kinds=self.kinds, sharing=self.sharing, seed=seed)


def parse_kinds(workload: str, classes: Sequence[str], input_len: str, output_len: str) -> tuple[Kind, ...]:
    """Classes by a name (``random``, ``sharegpt``, ``mixed``) or one by one (``NAME WEIGHT INPUT OUTPUT``).

    Raises:
        ValueError: names what cannot be read.
    """
    if classes:
        return tuple(map(_parse_kind, classes))
    match workload:
        case "mixed":
            return MIXED
        case "sharegpt":
            return (Kind(inputs=SHAREGPT[0], outputs=SHAREGPT[1]),)
        case "random":
            return (Kind(inputs=parse_lengths(input_len), outputs=parse_lengths(output_len)),)
        case _:
            raise ValueError(f"unknown workload {workload!r}; known: random, sharegpt, mixed")


def _parse_kind(text: str) -> Kind:
    words = text.split()
    if len(words) != 4:
        raise ValueError(
            f"a class is given as 'NAME WEIGHT INPUT OUTPUT', such as 'chat 3 32-256 exp:60:200', got {text!r}"
        )
    name, weight, inputs, outputs = words
    try:
        number = float(weight)
    except ValueError:
        raise ValueError(f"the weight of class {name!r} must be a number, got {weight!r}") from None
    return Kind(name=name, weight=number, inputs=parse_lengths(inputs), outputs=parse_lengths(outputs))
