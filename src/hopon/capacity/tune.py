"""Which settings carry most: one knob at a time in the simulator, then the best few on the real engine.

The simulator finds for every candidate the highest rate at which it keeps the promise, always with the same seeds, so
that candidates are compared on the same requests. A knob keeps its best value while the next one is turned. The engine
then serves the best few and the settings that one started from, window by window in turn, at one rate and with the same
seeds: what changes with the hour changes for all of them. Nothing is recommended that is not further from the start
than windows of one candidate are from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from hopon.bench.target import TargetError
from hopon.capacity.cause import Cause, find_cause
from hopon.capacity.knobs import Candidate, Value
from hopon.capacity.search import Window
from hopon.capacity.trials import Measure, Trials

SIMULATED, MEASURED = "simulated", "measured"

BETTER = 1.02
"""A value of a knob must carry so many times as much as the one before, or that one stays."""

_STEP = 1.3
_PRECISION = 1.03
_LOWEST = 0.02
"""Of the rate that one starts from: below it nothing is tried."""

Say = Callable[[str], None]
Length = Callable[[float], float]
"""Seconds of a window at a rate."""


def goodput(window: Window) -> float:
    """Requests per second for which the promise was kept; with several parts, for which the worst was."""
    return window.rate * min(share.value or 0.0 for share in window.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Where a candidate breaks in the simulator.

    Args:
        candidate: which.
        rate: the highest that keeps the promise, requests per second; 0: none does.
        windows: what was simulated for it.
    """

    candidate: Candidate
    rate: float
    windows: tuple[Window, ...]

    @property
    def cause(self) -> Cause:
        """What breaks first beyond the rate."""
        return find_cause(self.windows, self.rate)


def limit_of(
    trials: Trials, measure: Measure, candidate: Candidate, start: float, length: Length, seeds: Sequence[int]
) -> Limit:
    """Bracket by steps of :data:`_STEP` from ``start``, then bisect: above the start to a few percent, below it, where
    nobody wants to go, once.
    """
    windows: list[Window] = []

    def keeps(rate: float) -> bool:
        found = [trials.window(SIMULATED, measure, candidate, rate, seed, length(rate)) for seed in seeds]
        windows.extend(found)
        return kept(found)

    low = high = _rounded(start)
    floor = start * _LOWEST
    if keeps(low):
        while keeps(high := _rounded(low * _STEP)):
            low = high
    else:
        while low > floor and not keeps(low := _rounded(high / _STEP)):
            high = low
    precision = _PRECISION if low >= start else sqrt(_STEP) * 1.01
    while low < high / precision:
        middle = _rounded(sqrt(low * high))
        if middle in (low, high):
            break
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return Limit(candidate=candidate, rate=low if low > floor else 0.0, windows=tuple(windows))


def kept(windows: Sequence[Window]) -> bool:
    """The promise is kept in windows of one rate taken together, and can be for ever."""
    return not any(window.unstable for window in windows) and promised(windows)


def promised(windows: Sequence[Window]) -> bool:
    """What was counted in windows of one rate, taken together, keeps the promise."""
    return all(
        sum(share.met for share in shares) >= shares[0].level * sum(share.total for share in shares)
        for shares in zip(*(window.shares for window in windows), strict=True)
    )


def explore(
    trials: Trials,
    measure: Measure,
    base: Candidate,
    now: Mapping[str, Value],
    ladders: Mapping[str, Sequence[Value]],
    start: float,
    length: Length,
    seeds: Sequence[int],
    say: Say,
) -> list[Limit]:
    """All candidates and where they break; the first is where one started from.

    Args:
        trials: what was simulated before.
        measure: asks the simulator.
        base: where one starts from.
        now: its values of the knobs.
        ladders: the values of each knob, in the order in which knobs are turned.
        start: first rate to try, requests per second.
        length: of a window.
        seeds: of the windows at each rate.
        say: hears of progress.
    """
    best = limit_of(trials, measure, base, start, length, seeds)
    say(f"{base}: {best.rate:.3g} requests/s in the simulator, then {best.cause.name}")
    found = [best]
    for name, values in ladders.items():
        around = best
        for value in values:
            candidate = around.candidate.turned(name, value)
            if value == now[name] or any(limit.candidate == candidate for limit in found):
                continue
            try:
                limit = limit_of(trials, measure, candidate, around.rate or start, length, seeds)
            except ValueError as error:
                say(f"{candidate}: not possible: {error}")
                continue
            say(f"{candidate}: {limit.rate:.3g} requests/s, then {limit.cause.name}")
            found.append(limit)
            if limit.rate > BETTER * best.rate:
                best = limit
    return found


def ranked(found: Sequence[Limit], count: int) -> list[Limit]:
    """The best few beside the first; among equals those that change less."""
    others = [limit for limit in found[1:] if limit.rate >= found[0].rate]
    return sorted(others, key=lambda limit: (-limit.rate, len(limit.candidate.values)))[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A candidate on the engine: windows at one rate."""

    candidate: Candidate
    windows: tuple[Window, ...]

    def values(self, name: str) -> list[float]:
        """A figure, or ``goodput``, of every window that has it."""
        if name == "goodput":
            return [goodput(window) for window in self.windows]
        return [value for window in self.windows if (value := window.figures.get(name)) is not None]

    def middle(self, name: str) -> float | None:
        """Median of a figure."""
        values = self.values(name)
        return median(values) if values else None


def compare(
    trials: Trials,
    measure: Measure,
    candidates: Sequence[Candidate],
    rate: float,
    seconds: float,
    seeds: Sequence[int],
    say: Say,
) -> list[Measured]:
    """Windows of all candidates in turn, every second round backwards; those that cannot be served are left out."""
    windows: dict[Candidate, list[Window]] = {candidate: [] for candidate in candidates}
    for place, seed in enumerate(seeds):
        order = list(windows)
        for candidate in order if place % 2 == 0 else reversed(order):
            try:
                window = trials.window(MEASURED, measure, candidate, rate, seed, seconds)
            except TargetError as error:
                if candidate == candidates[0]:
                    raise
                say(f"{candidate}: left out: {error}")
                del windows[candidate]
                continue
            windows[candidate].append(window)
            say(f"round {place + 1}: {candidate}: {line(window)}")
    return [Measured(candidate=candidate, windows=tuple(found)) for candidate, found in windows.items()]


def best_of(measured: Sequence[Measured]) -> Measured:
    """The one with the highest goodput whose worst window is better than the best of the first, or the first."""
    base = measured[0]
    ceiling = max(base.values("goodput"))
    better = [one for one in measured[1:] if min(one.values("goodput")) > ceiling]
    return max(better, key=lambda one: one.middle("goodput") or 0.0, default=base)


def line(window: Window) -> str:
    """A window in a line."""
    share = min((share.value or 0.0) for share in window.shares)
    figures = " ".join(
        f"{label} {1e3 * window.figures[name]:.0f} ms"
        for name, label in (("ttft_p95", "TTFT p95"), ("itl_p50", "ITL p50"), ("itl_p95", "ITL p95"))
        if window.figures.get(name) is not None
    )
    unstable = f"; {window.unstable}" if window.unstable else ""
    return f"{share:.1%} as promised, {figures}, {window.figures['output_tokens_per_second']:.0f} tokens/s{unstable}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One value of a knob that is raised, and what became of it."""

    value: int
    window: Window
    kept: bool


def raise_knob(
    trials: Trials,
    kind: str,
    measure: Measure,
    base: Candidate,
    name: str,
    values: Sequence[int],
    rate: float,
    seconds: float,
    seeds: Sequence[int],
    say: Say,
) -> tuple[list[Step], str]:
    """Raise a knob until the promise breaks; the steps, and why it ended there.

    A backlog that grows is none of its business: the load may be more than any value carries, so that seats fill.
    """
    steps: list[Step] = []
    for value in values:
        candidate = base.turned(name, value)
        try:
            windows = [trials.window(kind, measure, candidate, rate, seed, seconds) for seed in seeds]
        except (ValueError, TargetError) as error:
            if not steps:
                raise
            return steps, f"{name} {value} is not possible: {error}"
        for window in windows:
            say(f"{name} {value}: {line(window)}")
        steps.append(Step(value=value, window=_middle(windows), kept=promised(windows)))
        if not steps[-1].kept:
            return steps, f"{name} {value} breaks the promise"
        peak = max((window.figures.get("running_peak") or 0.0 for window in windows), default=0.0)
        if name == "max_num_seqs" and 0 < peak < value:
            return steps, f"no more than {peak:.0f} ran at once: more seats change nothing at this rate"
    return steps, f"every value keeps the promise, up to {values[-1]}"


def _middle(windows: Sequence[Window]) -> Window:
    """The window whose goodput is the median (of an even number, the lower of the two), for people."""
    return sorted(windows, key=goodput)[(len(windows) - 1) // 2]


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A candidate at a rate, as throughput and latency."""

    candidate: Candidate
    rate: float
    tokens_per_second: float
    latency: float


def spots(pairs: Sequence[tuple[Candidate, Window]], latency: str) -> list[Spot]:
    """Of windows whose rate can be kept up and that have a latency; where a rate has several windows, their medians."""
    groups: dict[tuple[Candidate, float], list[Window]] = {}
    for candidate, window in pairs:
        groups.setdefault((candidate, window.rate), []).append(window)
    found = []
    for (candidate, rate), windows in groups.items():
        values = [value for window in windows if (value := window.figures.get(latency)) is not None]
        if values and not any(window.unstable for window in windows):
            tokens = median(window.figures["output_tokens_per_second"] for window in windows)
            found.append(Spot(candidate=candidate, rate=rate, tokens_per_second=tokens, latency=median(values)))
    return found


def front(found: Sequence[Spot]) -> list[Spot]:
    """Spots for which no other has both more throughput and less latency, by rising throughput.

    Of spots that lie within :data:`BETTER` of each other in throughput, the one with more of it stands for the others.
    """
    best: list[Spot] = []
    for spot in sorted(found, key=lambda one: (-one.tokens_per_second, one.latency)):
        if not best or (
            spot.latency < best[-1].latency and spot.tokens_per_second * BETTER < best[-1].tokens_per_second
        ):
            best.append(spot)
    return best[::-1]
