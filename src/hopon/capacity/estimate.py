"""From measured windows to the rate at which a share falls to its level, with a confidence interval.

The share of requests that keep the promise falls as the offered rate rises. Requests of one window are not independent:
they shared a queue, more arrived than at other times, or longer ones, or the machine was slower than usual. Each of
these moves the whole window along the curve. So the log-odds of the share in window i are taken to be

    intercept + slope * rate_i + spread * e_i,   e_i standard normal

(logistic regression with extra variation; Williams 1982, model III). A window in which some kept the promise and some
did not says where its log-odds are, up to chance; one in which all did, or nobody, says that they are beyond what so
many requests can tell. That makes a likelihood in closed form, of three numbers. It is penalised by log(spread), which
keeps the spread from vanishing when few windows happen to agree (Chung et al. 2013), and by slopes that nobody could
tell from a cliff. Far windows count little (tricube weights), so the shape far away does not matter. The answer is the
rate at which the *mean* share, over the spread, is at its level. The interval is by the delta method with Student's t,
at 99 %: a search that stops when its interval is narrow stops too early now and then, and so it covers the truth in at
least 90 of 100 searches (on queues whose truth is known).

Where the share falls off a cliff there is no slope to fit: every window below some rate kept the promise, and in every
one above it most requests did not. There the interval ends at the second window on either side at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, exp, inf, log, sqrt
from typing import Literal

SPAN = 0.4
"""Windows whose rate differs from the estimate by more than this share of it count nothing."""

_STEEPEST = 100.0
"""Log-odds by which the share may fall while the rate doubles; several times as many are penalised."""

_SPREADS = tuple(0.05 * 1.25**i for i in range(24))
_ROUNDS = 30

_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86)
_NORMAL = tuple((i / 4, exp(-((i / 4) ** 2) / 2) * 0.25 / 2.5066283) for i in range(-16, 17))
"""Places and weights of the standard normal distribution, for means over it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A window: at ``rate``, ``met`` of ``total`` kept the promise."""

    rate: float
    met: float
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A rate, the confidence interval around it, and the fitted curve.

    The log-odds of a window's share are normal: their mean is intercept + slope * rate, their deviation ``spread``.
    """

    rate: float
    low: float
    high: float
    intercept: float
    slope: float
    spread: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a share of the rate."""
        return (self.high - self.low) / 2 / self.rate

    def share(self, rate: float) -> float:
        """The fitted mean share at a rate."""
        return _mean_share(self.intercept + self.slope * rate, self.spread)


def estimate(points: Sequence[Point], level: float) -> Estimate | None:
    """Where the share falls to ``level``; None while the windows do not say: none on either side, or no fall."""
    above = sorted(point.rate for point in points if point.met < level * point.total)
    below = sorted(point.rate for point in points if point.met >= level * point.total)
    if not above or not below:
        return None
    centre = sqrt(max(below) * min(above))
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
    slope = -_STEEPEST / middle if found is None else found.slope
    return Estimate(
        rate=middle if found is None else min(max(found.rate, below[-1]), above[0]),
        low=below[-2] if found is None else max(found.low, below[-2]),
        high=above[1] if found is None else min(found.high, above[1]),
        intercept=-slope * middle if found is None else found.intercept,
        slope=slope,
        spread=1.0 if found is None else found.spread,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """What a window says about its log-odds: ``odds`` with a variance, or that they are beyond (1) or below (-1)."""

    x: float
    side: Literal[-1, 0, 1]
    odds: float
    variance: float
    weight: float


def _row(point: Point, x: float) -> _Row:
    weight = (1 - (abs(x) / SPAN) ** 3) ** 3
    met, missed = point.met, point.total - point.met
    if min(met, missed) < 0.5:
        # All of n keep it with probability (1 + exp(-odds)) ** -n, nearly a Gumbel distribution around log n.
        side: Literal[-1, 1] = 1 if missed < 0.5 else -1
        return _Row(x, side, side * (log(point.total) + 0.577), 1.645, weight)
    return _Row(x, 0, log((met + 0.5) / (missed + 0.5)), 1 / (met + 0.5) + 1 / (missed + 0.5), weight)


@dataclass(frozen=True, slots=True)
class _Fit:
    """The best line for a given spread: its penalised log-likelihood, the line, and the information on it."""

    value: float
    b0: float
    b1: float
    h00: float
    h01: float
    h11: float

    def crossing(self, odds: float) -> float:
        """Where the line is at these log-odds."""
        return (odds - self.b0) / self.b1

    def variance(self, x: float) -> float:
        """Of the crossing at x, the spread given (delta method)."""
        det = self.h00 * self.h11 - self.h01**2
        return (self.h11 - 2 * x * self.h01 + x * x * self.h00) / det / self.b1**2


def _fit(points: Sequence[Point], level: float, centre: float) -> Estimate | None:
    rows = [
        _row(point, point.rate / centre - 1) for point in points if point.total and abs(point.rate / centre - 1) < SPAN
    ]
    freedom = sum(row.weight for row in rows) - 2
    if len(rows) < 3 or freedom < 1:
        return None
    fits: list[_Fit] = []
    for spread in _SPREADS:
        fits.append(_line(rows, spread, (fits[-1].b0, fits[-1].b1) if fits else (log(level / (1 - level)), -20.0)))
    best = max(range(1, len(fits) - 1), key=lambda place: fits[place].value)
    around = range(best - 1, best + 2)
    if any(fits[place].b1 >= 0 for place in around):
        return None
    before, x, after = (fits[place].crossing(_odds_at(level, _SPREADS[place])) for place in around)
    if x <= -1:
        return None
    variance = fits[best].variance(x)
    curvature = fits[best - 1].value - 2 * fits[best].value + fits[best + 1].value
    if curvature < 0:  # what is not known of the spread, in steps of the grid, and what it does to the crossing
        variance += ((after - before) / 2) ** 2 / -curvature
    reach = student(freedom) * sqrt(variance)
    return Estimate(
        rate=centre * (1 + x),
        low=centre * max(0.0, 1 + x - reach),
        high=centre * (1 + x + reach),
        intercept=fits[best].b0 - fits[best].b1,
        slope=fits[best].b1 / centre,
        spread=_SPREADS[best],
    )


def _line(rows: Sequence[_Row], spread: float, start: tuple[float, float]) -> _Fit:
    """By Newton's method: the likelihood is concave in the line."""
    b0, b1 = start
    for _ in range(_ROUNDS):
        value, g0, g1 = log(spread) - (b1 / _STEEPEST) ** 2 / 2, 0.0, -b1 / _STEEPEST**2
        h00, h01, h11 = 1e-9, 0.0, 1 / _STEEPEST**2
        for row in rows:
            deviation = sqrt(spread**2 + row.variance)
            z = (b0 + b1 * row.x - row.odds) / deviation
            if row.side:
                z *= row.side
                logarithm, mills = _normal(z)
                slope, bend = row.side * mills, mills * (mills + z)
            else:
                logarithm, slope, bend = -z * z / 2 - log(deviation), -z, 1.0
            value += row.weight * logarithm
            g, h = row.weight * slope / deviation, row.weight * bend / deviation**2
            g0, g1 = g0 + g, g1 + g * row.x
            h00, h01, h11 = h00 + h, h01 + h * row.x, h11 + h * row.x**2
        det = h00 * h11 - h01 * h01
        d0, d1 = (h11 * g0 - h01 * g1) / det, (h00 * g1 - h01 * g0) / det
        if max(abs(d0), abs(d1)) < 1e-6:
            break
        shrink = min(1.0, 30.0 / max(abs(d0), abs(d1)))
        b0, b1 = b0 + shrink * d0, b1 + shrink * d1
    return _Fit(value, b0, b1, h00, h01, h11)


def _normal(z: float) -> tuple[float, float]:
    """Logarithm of the normal distribution function, and its derivative."""
    if z < -30:
        return -z * z / 2 - log(-z) - 0.919, -z
    whole = erfc(-z / sqrt(2)) / 2
    return log(whole), exp(-z * z / 2) / 2.5066283 / whole


def _mean_share(odds: float, spread: float) -> float:
    return sum(weight * _logistic(odds + spread * e) for e, weight in _NORMAL)


@cache
def _odds_at(level: float, spread: float) -> float:
    """Log-odds of the middle at which the mean share is ``level``."""
    low, high = -40.0 - 5 * spread, 40.0 + 5 * spread
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _mean_share(middle, spread) > level else (middle, high)
    return (low + high) / 2


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
