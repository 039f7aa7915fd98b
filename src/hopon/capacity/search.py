"""Finds the highest offered rate at which a promise is kept, with as few runs as a stated confidence needs.

1. *Bracket*: from a first guess, raise or lower the rate by a factor until it kept the promise once and broke it once.
2. *Narrow*: measure on both sides of the current estimate, alternating, near enough to be informative and far enough to
   see the slope; each window has a seed of its own. Stop when the interval is as narrow as was asked for.
3. *Confirm*: one longer run at the lower end of the interval, with a seed that no other run had. If it breaks the
   promise, it joins the windows, and narrowing goes on.

A window that cannot last breaks the promise, whatever its first requests saw: those by whose number the backlog grew
count as not served in time; where too much is computed twice, nobody counts. The search knows nothing of servers or
simulators: a target measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from typing import Any, Literal, Protocol

from hopon.capacity.estimate import Estimate, Point, estimate, is_cliff, wilson
from hopon.capacity.promise import Share

Phase = Literal["bracket", "narrow", "confirm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One run at one offered rate.

    Args:
        rate: offered requests per second.
        seed: of its arrivals and lengths.
        seconds: length of the run, warm-up included.
        shares: what became of each part of the promise, warm-up left out.
        unstable: why the rate cannot be kept up; empty when it can.
        behind: requests by which the backlog grew; 0 where that is not why the rate cannot be kept up.
        phase: why it was run.
        took: seconds until the target was idle again, where that is longer than ``seconds``.
        figures: what else was measured, by name, for people and pictures.
    """

    rate: float
    seed: int
    seconds: float
    shares: tuple[Share, ...]
    unstable: str = ""
    behind: float = 0.0
    phase: Phase = "bracket"
    took: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """The promise was kept in this window."""
        return not self.unstable and all(share.met >= share.level * share.total for share in self.shares)

    def point(self, place: int) -> Point:
        """Its part number ``place``, for the estimate."""
        share = self.shares[place]
        met = float(share.met)
        if self.unstable:
            met = min(met, share.total - self.behind, share.level * share.total - 1) if self.behind else 0.0
        return Point(self.rate, max(met, 0.0), share.total)


class Target(Protocol):
    """Something that can be loaded: a server, an engine, a simulator."""

    def measure(self, rate: float, seed: int, seconds: float) -> Window:
        """Offer a rate for so long and say what became of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to search.

    Args:
        start: first rate, requests per second.
        seconds: length of a window.
        half_width: asked for, as a share of the rate.
        min_windows: fewest windows of the narrowing; fewer make the interval too sure of itself.
        max_windows: most of all windows.
        confirm: length of the confirming run in windows; 0 for none.
        lowest: rates below this are not tried.
        step: factor between rates of the bracket; small where the first rate is a good guess.
        budget: seconds that all windows may take together; none is begun that would not fit. None for no limit.
        seed: the first; every window takes the next one.
    """

    start: float
    seconds: float
    half_width: float = 0.1
    min_windows: int = 12
    max_windows: int = 80
    confirm: float = 2.0
    lowest: float = 1e-3
    step: float = 2.0
    budget: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "seconds", "half_width", "lowest"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 1 < self.step < inf:
            raise ValueError(f"step must be above 1, got {self.step}")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"budget must be above 0 seconds, got {self.budget}")
        if self.min_windows < 4:
            raise ValueError(f"an interval needs at least 4 windows, got {self.min_windows}")
        if self.max_windows < self.min_windows:
            raise ValueError(f"at most {self.max_windows} windows are fewer than at least {self.min_windows}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a search found.

    Args:
        estimate: rate and interval; None where no rate was found that keeps the promise, or none that breaks it.
        windows: all of them, in the order of the search.
        binding: the part of the promise that breaks first.
        confirmed: whether the confirming run kept the promise; None without one.
        note: why the search ended, in a sentence.
    """

    estimate: Estimate | None
    windows: tuple[Window, ...]
    binding: str
    confirmed: bool | None
    note: str


Report = Callable[[Window, Estimate | None], None]
"""Called after every window, with the estimate so far."""

_OFFSETS = (-0.7, 1.0, -0.25, 0.5, -1.0, 0.25)
_REACH = 0.25
_ODDS = 2.5
"""Windows of the narrowing lie up to a quarter from the estimate on either side, and no further than the log-odds of
the share move by this: where everybody is served or nobody is, little is learned.
"""


def search(target: Target, plan: Plan, report: Report | None = None, known: Sequence[Window] = ()) -> Answer:
    """Run a search, or go on with one.

    Args:
        target: what is loaded.
        plan: how.
        report: hears of every window.
        known: windows of an interrupted search with the same plan.
    """
    run = _Search(target, plan, report or (lambda window, found: None), list(known))
    return run.result()


def breaks_first(windows: Sequence[Window]) -> tuple[int, Estimate | None]:
    """Which part of the promise breaks at the lowest rate, and that rate; None while the windows do not say."""
    found: list[tuple[int, Estimate]] = []
    for place, share in enumerate(windows[0].shares if windows else ()):
        part = estimate([window.point(place) for window in windows], share.level)
        if part is not None:
            found.append((place, part))
    return min(found, key=lambda pair: pair[1].rate) if found else (0, None)


class _Search:
    def __init__(self, target: Target, plan: Plan, report: Report, windows: list[Window]) -> None:
        self._target, self._plan, self._report = target, plan, report
        self._windows = windows

    def result(self) -> Answer:
        plan = self._plan
        for rate in self._brackets():
            self._measure(rate, "bracket", plan.seconds)
            if self._exhausted():
                break
        if not any(window.kept for window in self._windows):
            return self._answer(None, f"no rate keeps the promise, down to {min(w.rate for w in self._windows):.3g}/s")
        if all(window.kept for window in self._windows):
            return self._answer(None, f"every rate keeps the promise, up to {max(w.rate for w in self._windows):.3g}/s")
        before = self._confirmations()
        confirmed = self._compatible(before[-1]) if before else None
        while True:
            note = self._narrow()
            _, found = self._estimate()
            if found is None or not plan.confirm or note:
                break
            last = self._confirmations()
            if last and last[-1].rate <= found.low * 1.001 and confirmed:
                break
            if len(last) >= 3:
                note = "" if confirmed else "the confirming runs broke the promise"
                break
            confirmed = self._compatible(self._measure(found.low, "confirm", plan.seconds * plan.confirm))
            _, found = self._estimate()
            if confirmed and found is not None and found.half_width <= plan.half_width:
                break
        return self._answer(confirmed, note or "the interval is as narrow as was asked for")

    def _brackets(self) -> Iterator[float]:
        """Rates to try until the promise was kept once and broken once."""
        plan, windows = self._plan, self._windows
        while True:
            kept = [window.rate for window in windows if window.kept]
            broken = [window.rate for window in windows if not window.kept]
            if kept and broken:
                return
            rate = plan.step * max(kept) if kept else min(broken) / plan.step if broken else plan.start
            if rate < plan.lowest:
                return
            yield rate

    def _narrow(self) -> str:
        """Until the interval is narrow enough; why it is not, if so."""
        plan = self._plan
        while True:
            _, found = self._estimate()
            near = 0 if found is None else sum(abs(w.rate / found.rate - 1) < 2 * _REACH for w in self._windows)
            if found is not None and near >= plan.min_windows and found.half_width <= plan.half_width:
                return ""
            if spent := self._exhausted():
                return f"{spent} were not enough for a half-width of {100 * plan.half_width:g} %"
            self._measure(self._next(found, near), "narrow", plan.seconds)

    def _exhausted(self) -> str:
        """Which limit of the plan leaves no room for another window; empty if none does."""
        plan = self._plan
        if len(self._windows) >= plan.max_windows:
            return f"{plan.max_windows} windows"
        taken = sum(max(window.seconds, window.took) for window in self._windows)
        if plan.budget is not None and taken + plan.seconds > plan.budget:
            return f"{plan.budget:g} s of windows"
        return ""

    def _next(self, found: Estimate | None, near: int) -> float:
        kept = [window.rate for window in self._windows if window.kept]
        broken = [window.rate for window in self._windows if not window.kept]
        low = max((rate for rate in kept if rate < min(broken)), default=min(kept))
        high = min(rate for rate in broken if rate > low) if low < max(broken) else max(kept)
        middle = sqrt(low * high)
        cliff = any(
            is_cliff([window.point(place) for window in self._windows], share.level)
            for place, share in enumerate(self._windows[0].shares)
        )
        if (cliff or found is None or near < 3) and high > low * (1 + _REACH / 2):
            return middle  # bisect first
        if cliff and high > low * (1 + self._plan.half_width / 2):
            return middle
        # One unlucky window must not hold the search at its rate: go on around the middle, and a little beyond it where
        # the estimate lies there.
        reach = _REACH if found is None else min(_REACH, max(_REACH / 8, _ODDS / abs(found.slope * found.rate)))
        centre = middle
        if found is not None:
            centre = min(max(found.rate, (1 - reach) * min(kept)), (1 + reach) * max(broken))
        return centre * (1 + reach * _OFFSETS[len(self._windows) % len(_OFFSETS)])

    def _measure(self, rate: float, phase: Phase, seconds: float) -> Window:
        window = replace(self._target.measure(rate, self._plan.seed + len(self._windows), seconds), phase=phase)
        self._windows.append(window)
        self._report(window, self._estimate()[1])
        return window

    def _estimate(self) -> tuple[int, Estimate | None]:
        return breaks_first(self._windows)

    def _confirmations(self) -> list[Window]:
        return [window for window in self._windows if window.phase == "confirm"]

    def _compatible(self, window: Window) -> bool:
        """A run confirms unless it says with confidence that the promise is broken."""
        return not window.unstable and all(wilson(s.met, s.total)[1] >= s.level for s in window.shares)

    def _answer(self, confirmed: bool | None, note: str) -> Answer:
        place, found = self._estimate()
        return Answer(
            estimate=found,
            windows=tuple(self._windows),
            binding=self._windows[0].shares[place].name,
            confirmed=confirmed,
            note=note,
        )
