"""From the requests of one run to a window of the search: shares, stability, and what people look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

from hopon.capacity.promise import Promise
from hopon.capacity.search import Window
from hopon.metrics import Heard, percentiles

WARM_UP = 0.25
"""Share of a run that fills the server and is not counted."""

RECOMPUTED_LIMIT = 0.1
"""Recomputed tokens as a share of the useful ones, from which a rate counts as one that cannot be kept up."""

_BACKLOG_SHARE = 0.1
_BACKLOG_LEAST = 6


def fold(
    records: Sequence[Heard],
    promise: Promise,
    *,
    rate: float,
    seed: int,
    seconds: float,
    recomputed: float = 0.0,
    figures: Mapping[str, Any] | None = None,
) -> Window:
    """A window from its requests.

    Args:
        records: all of them; those of the warm-up are left out here.
        promise: what was promised.
        rate: offered.
        seed: of the run.
        seconds: of the run, without the time in which the last ones were answered.
        recomputed: recomputed tokens as a share of the useful ones.
        figures: what the target measured besides.
    """
    counted = [record for record in records if record.arrival >= WARM_UP * seconds] or list(records)
    unstable, behind = "", 0.0
    growth = backlog_growth(records, seconds)
    if growth > max(_BACKLOG_LEAST, _BACKLOG_SHARE * len(counted)):
        behind = growth
        unstable = f"the backlog grew by {growth:.0f} requests while {len(counted)} arrived"
    elif recomputed > RECOMPUTED_LIMIT:
        unstable = f"{recomputed:.0%} of the tokens were computed twice"
    return Window(
        rate=rate,
        seed=seed,
        seconds=seconds,
        shares=promise.shares(counted),
        unstable=unstable,
        behind=behind,
        figures=_figures(counted, records, seconds) | {"recomputed": recomputed} | dict(figures or {}),
    )


def backlog_growth(records: Sequence[Heard], seconds: float) -> float:
    """Requests by which the number of open ones grew after the warm-up: the least-squares slope times the time, less
    twice its standard error, so that the ups and downs of a steady queue are no growth. Neighbouring counts resemble
    each other, most requests being in both: the error is that of residuals with an autoregression of first order.
    """
    start = WARM_UP * seconds
    times = [start + (seconds - start) * step / 40 for step in range(41)]
    arrivals = sorted(record.arrival for record in records)
    ends = sorted(record.ended for record in records if record.ended is not None)
    a = e = 0
    counts = []
    for time in times:
        while a < len(arrivals) and arrivals[a] <= time:
            a += 1
        while e < len(ends) and ends[e] <= time:
            e += 1
        counts.append(a - e)
    n = len(times)
    middle, mean = sum(times) / n, sum(counts) / n
    spread = sum((t - middle) ** 2 for t in times)
    slope = sum((t - middle) * (c - mean) for t, c in zip(times, counts, strict=True)) / spread
    rest = [c - mean - slope * (t - middle) for t, c in zip(times, counts, strict=True)]
    squares = sum(r * r for r in rest)
    likeness = sum(r * after for r, after in pairwise(rest)) / squares if squares else 0.0
    likeness = min(max(likeness, 0.0), 0.95)
    error = sqrt(squares / (n - 2) / spread * (1 + likeness) / (1 - likeness))
    return (slope - 2 * error) * (seconds - start)


def _figures(records: Sequence[Heard], everybody: Sequence[Heard], seconds: float) -> dict[str, Any]:
    done = [record for record in records if record.completed]
    found: dict[str, Any] = {"requests": len(records), "completed": len(done)}
    for name in ("ttft", "waiting", "tpot", "e2e"):
        values = [value for record in done if (value := getattr(record, name)) is not None]
        for percent, value in zip((50, 95), percentiles(values, (50.0, 95.0)), strict=True):
            found[f"{name}_p{percent}"] = value
    gaps = [gap for record in done for gap in record.gaps]
    for percent, value in zip((50, 95, 99), percentiles(gaps, (50.0, 95.0, 99.0)), strict=True):
        found[f"itl_p{percent}"] = value
    start = WARM_UP * seconds
    answered = [one for one in everybody if one.completed and one.ended is not None and start <= one.ended <= seconds]
    found["output_tokens_per_second"] = sum(record.output_tokens for record in answered) / (seconds - start)
    found["answered_per_second"] = len(answered) / (seconds - start)
    found["backlog_growth"] = backlog_growth(everybody, seconds)
    return found
