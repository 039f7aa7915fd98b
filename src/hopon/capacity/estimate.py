"""From measured windows to the rate at which a share falls to its level, with a confidence interval.

The share of requests that keep the promise falls as the offered rate rises. Near its level it is taken to be logistic
in the rate; far windows count little (tricube weights), so the shape far away does not matter. Requests of one window
are not independent (they shared a queue), so the binomial variance is widened by the dispersion that the windows
themselves show (quasi-likelihood; McCullagh and Nelder, Generalized Linear Models, 1989). The interval is that of the
inverse prediction (delta method) with Student's t, at 99 %: a search that stops when its interval is narrow stops too
early now and then, and so it covers the truth in at least 90 of 100 searches (on queues whose truth is known).

Where the share falls off a cliff there is no slope to fit: every window below some rate kept the promise, and in every
one above it most requests did not. There the interval ends at the second window on either side at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

SPAN = 0.5
"""Windows whose rate differs from the estimate by more than this share of it count nothing."""

_ROUNDS = 60
_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86)


@dataclass(frozen=True, slots=True)
class Point:
    """A window: at ``rate``, ``met`` of ``total`` kept the promise."""

    rate: float
    met: float
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A rate, the confidence interval around it, and the fitted curve: logistic(intercept + slope * rate)."""

    rate: float
    low: float
    high: float
    intercept: float
    slope: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a share of the rate."""
        return (self.high - self.low) / 2 / self.rate

    def share(self, rate: float) -> float:
        """The fitted share at a rate."""
        return _logistic(self.intercept + self.slope * rate)


def estimate(points: Sequence[Point], level: float) -> Estimate | None:
    """Where the share falls to ``level``; None while the windows do not say: none on either side, or no fall."""
    above = sorted(point.rate for point in points if point.met < level * point.total)
    below = sorted(point.rate for point in points if point.met >= level * point.total)
    if not above or not below:
        return None
    centre = sqrt(max(below) * min(above)) if max(below) < min(above) else sqrt(min(above) * max(below))
    found = None
    for _ in range(4):  # the weights depend on the estimate
        found = _fit(points, level, centre)
        if found is None:
            break
        if abs(found.rate / centre - 1) < 1e-3:
            break
        centre = min(max(found.rate, min(below)), max(above))
    return _narrowed(found, below, above) if is_cliff(points, level) and min(len(above), len(below)) > 1 else found


def is_cliff(points: Sequence[Point], level: float) -> bool:
    """Up to some rate all windows kept the promise, and beyond it most requests of each window missed it."""
    below = [point.rate for point in points if point.met >= level * point.total]
    above = [point for point in points if point.met < level * point.total]
    return max(below, default=inf) < min((point.rate for point in above), default=0.0) and all(
        point.met < level / 2 * point.total for point in above
    )


def _narrowed(found: Estimate | None, below: Sequence[float], above: Sequence[float]) -> Estimate:
    """An estimate that is no wider than windows which agree with one another allow."""
    if found is not None and below[-2] <= found.low and found.high <= above[1]:
        return found
    middle = sqrt(below[-1] * above[0])
    slope = -10 / middle if found is None else found.slope
    return Estimate(
        rate=middle if found is None else min(max(found.rate, below[-1]), above[0]),
        low=below[-2] if found is None else max(found.low, below[-2]),
        high=above[1] if found is None else min(found.high, above[1]),
        intercept=-slope * middle if found is None else found.intercept,
        slope=slope,
    )


def _fit(points: Sequence[Point], level: float, centre: float) -> Estimate | None:
    rows = []
    for point in points:
        distance = abs(point.rate / centre - 1) / SPAN
        if distance < 1 and point.total:
            share = (point.met + 0.5) / (point.total + 1)  # no share of exactly 0 or 1, whose logit is infinite
            rows.append((point.rate / centre - 1, share, point.total, (1 - distance**3) ** 3))
    if len(rows) < 3:
        return None
    b0, b1 = log(level / (1 - level)), -5.0
    for _ in range(_ROUNDS):
        s0 = s1 = h00 = h01 = h11 = 0.0
        for x, share, total, weight in rows:
            mu = _logistic(b0 + b1 * x)
            w = weight * total
            s0 += w * (share - mu)
            s1 += w * (share - mu) * x
            v = max(w * mu * (1 - mu), 1e-12)
            h00, h01, h11 = h00 + v, h01 + v * x, h11 + v * x * x
        det = h00 * h11 - h01 * h01
        if det <= 1e-12 * max(h00 * h11, 1e-300):
            return None
        d0, d1 = (h11 * s0 - h01 * s1) / det, (h00 * s1 - h01 * s0) / det
        shrink = min(1.0, 3.0 / max(abs(d0), abs(d1), 1e-9))
        b0, b1 = b0 + shrink * d0, b1 + shrink * d1
        if max(abs(d0), abs(d1)) < 1e-9:
            break
    if b1 >= 0 or (log(level / (1 - level)) - b0) / b1 <= -1:
        return None
    freedom = sum(weight for *_, weight in rows) - 2
    if freedom < 1:
        return None
    chi = 0.0
    for x, share, total, weight in rows:
        mu = min(max(_logistic(b0 + b1 * x), 1e-9), 1 - 1e-9)
        chi += weight * total * (share - mu) ** 2 / (mu * (1 - mu))
    dispersion = max(1.0, chi / freedom)
    x = (log(level / (1 - level)) - b0) / b1
    variance = dispersion * (h11 - 2 * x * h01 + x * x * h00) / det / b1**2
    reach = student(freedom) * sqrt(variance)
    return Estimate(
        rate=centre * (1 + x),
        low=centre * max(0.0, 1 + x - reach),
        high=centre * (1 + x + reach),
        intercept=b0 - b1,
        slope=b1 / centre,
    )


def student(freedom: float) -> float:
    """99.5 % quantile of Student's t."""
    if freedom < 1:
        return inf
    place = min(int(freedom), len(_T))
    if place == len(_T):
        return 2.58 + 5.3 / freedom
    low, high = _T[place - 1], _T[place]
    return low + (freedom - place) * (high - low)


def wilson(met: float, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927)."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, met / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    reach = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _logistic(x: float) -> float:
    if x >= 0:
        return 1 / (1 + exp(-min(x, 700.0)))
    e = exp(max(x, -700.0))
    return e / (1 + e)
