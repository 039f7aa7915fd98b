"""What was promised to users, and how many of them got it.

The usual form promises per request: at least so many of a hundred requests keep *all* limits of their class. The
pooled form, ``ttft_p95<500ms``, names a percentile of one quantity over all requests (for ``itl``: over all gaps); it
may hold while few requests keep everything. Both are shares of something that keep a limit, with a level that the
share must reach; classes count as often as they occur in the mix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hopon.bench.summary import Slo, parse_slo
from hopon.metrics import Heard

_POOLED = re.compile(r"(ttft|tpot|itl|e2e)_p(\d+(?:\.\d+)?)<=?([\d.]+)(ms|s)")
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Share:
    """``met`` of ``total`` keep what was promised; ``level`` of them must.

    Args:
        name: which promise, for people.
        met: how many do.
        total: how many there are.
        level: share that must, in (0, 1).
    """

    name: str
    met: int
    total: int
    level: float

    @property
    def value(self) -> float | None:
        """Share that does; None of nothing."""
        return self.met / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Pooled:
    """A percentile of a quantity over everything must stay below a limit in seconds."""

    quantity: str
    percent: float
    limit: float

    def __str__(self) -> str:
        return f"{self.quantity}_p{self.percent:g}<{1e3 * self.limit:g}ms"

    def share(self, records: Iterable[Heard]) -> Share:
        """How many values keep the limit. A request that was not answered to its end counts as one that does not."""
        met = total = 0
        for record in records:
            if not record.completed:
                total += 1
            elif self.quantity == "itl":
                gaps = record.gaps
                total += len(gaps)
                met += sum(gap <= self.limit for gap in gaps)
            elif (value := getattr(record, self.quantity)) is not None:
                total += 1
                met += value <= self.limit
        return Share(str(self), met, total, self.percent / 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """All that was promised.

    Args:
        text: as it was given.
        attain: share of all requests that must keep the limits of their class, in (0, 1).
        slo: limits by class; None where only percentiles were promised.
        pooled: promises about percentiles.
    """

    text: str
    attain: float
    slo: Slo | None
    pooled: tuple[Pooled, ...] = ()

    def shares(self, records: Sequence[Heard]) -> tuple[Share, ...]:
        """What became of every part of the promise."""
        found = []
        if self.slo is not None:
            name = f"all limits of a request, {100 * self.attain:g} %"
            found.append(Share(name, sum(map(self.slo.met, records)), len(records), self.attain))
        return (*found, *(pooled.share(records) for pooled in self.pooled))

    @property
    def longest(self) -> float:
        """The longest TTFT or E2E that was promised, in seconds; 0 without either."""
        limits = [pooled.limit for pooled in self.pooled if pooled.quantity in ("ttft", "e2e")]
        if self.slo is not None:
            for one in (self.slo.default, *self.slo.kinds.values()):
                limits += [value for value in (one.ttft, one.e2e) if value is not None]
        return max(limits, default=0.0)

    @property
    def patience(self) -> float:
        """Seconds after which the fate of a request is known, however it goes on."""
        return self.longest or 10.0


def parse_promise(text: str, attain: float = 0.95) -> Promise:
    """``chat: ttft<500ms tpot<60ms; background: e2e<30s``, or without classes, or with percentiles (``itl_p99<100ms``).

    Args:
        text: the limits.
        attain: share of requests that must keep them.

    Raises:
        ValueError: names the part that cannot be read and the known forms.
    """
    if not 0 < attain < 1:
        raise ValueError(f"the share of requests that must keep their limits must be in (0, 1), got {attain:g}")
    pooled: list[Pooled] = []

    def take(match: re.Match[str]) -> str:
        percent = float(match[2])
        if not 0 < percent < 100:
            raise ValueError(f"a percentile must be in (0, 100), got {match[0]!r}")
        pooled.append(Pooled(match[1], percent, float(match[3]) * _UNITS[match[4]]))
        return ""

    parts = [rest for part in text.split(";") if (rest := _POOLED.sub(take, part).strip())]
    if not parts and not pooled:
        raise ValueError(f"nothing is promised in {text!r}; for example: 'ttft<500ms tpot<60ms' or 'itl_p99<100ms'")
    slo = parse_slo("; ".join(parts)) if parts else None
    return Promise(text=text, attain=attain, slo=slo, pooled=tuple(pooled))
