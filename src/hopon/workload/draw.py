"""Workloads drawn from a seed: arrivals, classes of requests, shared beginnings of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, sqrt
from random import Random
from typing import Literal

from hopon.workload.ask import Ask, Piece, Workload
from hopon.workload.lengths import Lengths

Arrivals = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """``groups`` beginnings of ``tokens`` tokens; each request takes one of them, at random, in front of its own."""

    groups: int
    tokens: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.tokens < 1:
            raise ValueError(
                f"sharing needs at least 1 group and 1 token, got {self.groups} groups of {self.tokens} tokens"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A class of a mix: its name, its share of the requests (a weight), lengths of its prompts and outputs."""

    name: str = ""
    weight: float = 1.0
    inputs: Lengths
    outputs: Lengths

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"the weight of class {self.name!r} must be above 0, got {self.weight}")


def arrival_times(
    *,
    rate: float,
    count: int,
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds at which requests are sent, the first at 0. Gaps are never clipped or rescaled.

    Args:
        rate: requests per second; 0 sends all of them at once.
        count: how many.
        arrivals: gaps that are constant, exponential or gamma distributed.
        variation: coefficient of variation of gamma gaps.
        end_rate: the rate rises (or falls) on a straight line to this one, over the time that ``count`` requests take
            at the mean of both.
        seed: same seed, same times.

    Raises:
        ValueError: names the value and the limit.
    """
    if count < 1:
        raise ValueError(f"a workload needs at least 1 request, got {count}")
    if not (isfinite(rate) and rate >= 0):
        raise ValueError(f"the rate must be at least 0 requests per second, got {rate}")
    if arrivals == "gamma" and not variation > 0:
        raise ValueError(f"the variation of gamma gaps must be above 0, got {variation}")
    unit: dict[str, Callable[[Random], float]] = {
        "constant": lambda random: 1.0,
        "poisson": lambda random: random.expovariate(1.0),
        "gamma": lambda random: random.gammavariate(1 / variation**2, variation**2),
    }
    if arrivals not in unit:
        raise ValueError(f"arrivals must be one of {', '.join(unit)}, got {arrivals!r}")
    random = Random(f"{seed} arrival")
    if rate == 0:
        return [0.0] * count
    gaps = [0.0] + [unit[arrivals](random) for _ in range(count - 1)]
    if end_rate is None:
        return list(accumulate(gap / rate for gap in gaps))
    if not (isfinite(end_rate) and end_rate > 0):
        raise ValueError(f"the last rate of a ramp must be above 0 requests per second, got {end_rate}")
    slope = (end_rate - rate) * (rate + end_rate) / (2 * count)
    return [_moment(passed, rate, slope, end_rate) for passed in accumulate(gaps)]


def _moment(passed: float, rate: float, slope: float, end_rate: float) -> float:
    """When ``passed`` requests are due at a rate that moves from ``rate`` to ``end_rate`` and stays there."""
    if slope == 0:
        return passed / rate
    span = (end_rate - rate) / slope
    if passed > span * (rate + end_rate) / 2:
        return span + (passed - span * (rate + end_rate) / 2) / end_rate
    return 2 * passed / (rate + sqrt(rate * rate + 2 * slope * passed))


def draw(
    *,
    count: int,
    rate: float,
    inputs: Lengths,
    outputs: Lengths,
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
) -> Workload:
    """A workload from a seed.

    Args:
        count: requests.
        rate: requests per second; 0 sends all of them at once.
        inputs: lengths of prompts, without a shared beginning.
        outputs: lengths of outputs; ``max_tokens`` is the same.
        arrivals: see :func:`arrival_times`; so are the next two.
        variation: of gamma gaps.
        end_rate: of a ramp.
        sharing: shared beginnings of prompts.
        seed: same seed, same workload.

    Raises:
        ValueError: names the value and the limit.
    """
    return draw_mix(
        count=count,
        rate=rate,
        kinds=(Kind(inputs=inputs, outputs=outputs),),
        arrivals=arrivals,
        variation=variation,
        end_rate=end_rate,
        sharing=sharing,
        seed=seed,
    )


def draw_mix(
    *,
    count: int,
    rate: float,
    kinds: Sequence[Kind],
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
) -> Workload:
    """Several classes of requests at random in one stream, each as often as its weight says; else as :func:`draw`."""
    times = arrival_times(rate=rate, count=count, arrivals=arrivals, variation=variation, end_rate=end_rate, seed=seed)
    # A stream of its own for each: a longer prompt moves no arrival.
    prompts, lengths, groups, classes = (Random(f"{seed} {what}") for what in ("input", "output", "group", "kind"))
    weights = [kind.weight for kind in kinds]
    asks = []
    for number, now in enumerate(times):
        [kind] = classes.choices(kinds, weights)
        own = kind.inputs.draw(prompts)
        shared = (Piece(2 * groups.randrange(sharing.groups) + 1, sharing.tokens),) if sharing else ()
        output = kind.outputs.draw(lengths)
        asks.append(
            Ask(
                number=number,
                arrival=now,
                input_tokens=own + sum(piece.count for piece in shared),
                output_tokens=output,
                max_tokens=output,
                kind=kind.name,
                shared=shared,
            )
        )
    ramp = "" if end_rate is None else f" to {end_rate:g}"
    return Workload(name=f"{arrivals} arrivals, {rate:g}{ramp} per second, seed {seed}", asks=tuple(asks))
