"""What was promised to users, and which requests got it.

The usual form promises per request: at least so many of a hundred requests keep *all* limits of their class. The
pooled form, ``ttft_p95<500ms``, names a percentile of one quantity over all requests (for ``itl``: over all gaps); it
may hold while few requests keep everything. Both are shares of something that keep a limit, with a level that the
share must reach; classes count as often as they occur in the mix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hopon.metrics import Limits, RequestRecord

QUANTITIES = ("ttft", "tpot", "itl", "e2e")
"""What a promise can be about; :mod:`hopon.metrics` defines them."""

_TERM = re.compile(r"(?P<name>[a-z0-9]+)(?:_p(?P<percent>\d+(?:\.\d+)?))?\s*<=?\s*(?P<value>[\d.]+)\s*(?P<unit>ms|s)")
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
    """A percentile of a quantity over everything must stay below a limit."""

    quantity: str
    percent: float
    limit: float

    def __str__(self) -> str:
        return f"{self.quantity}_p{self.percent:g}<{1e3 * self.limit:g}ms"

    def share(self, records: Iterable[RequestRecord]) -> Share:
        """How many values keep the limit. A request that was not served to its end counts as one that does not."""
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
        classes: limits by class; "" is for classes that are not named.
        attain: share of all requests that must keep the limits of their class, in (0, 1).
        pooled: promises about percentiles.
    """

    classes: Mapping[str, Limits] = field(default_factory=dict)
    attain: float = 0.95
    pooled: tuple[Pooled, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.attain < 1:
            raise ValueError(f"the share of requests that must keep their limits must be in (0, 1), got {self.attain}")
        if not self.classes and not self.pooled:
            raise ValueError("a promise needs at least one limit")

    def limits(self, kind: str) -> Limits:
        """Limits of a class; none where nothing was promised to it."""
        return self.classes.get(kind, self.classes.get("", Limits()))

    def shares(self, records: Sequence[RequestRecord], kinds: Mapping[str, str]) -> tuple[Share, ...]:
        """What became of every part of the promise.

        Args:
            records: requests.
            kinds: class by request id; those left out are of class "".
        """
        found = []
        if self.classes:
            met = sum(self.limits(kinds.get(record.request_id, "")).met(record) for record in records)
            found.append(Share("all limits of a request", met, len(records), self.attain))
        return (*found, *(pooled.share(records) for pooled in self.pooled))

    def __str__(self) -> str:
        parts = []
        for kind, limits in self.classes.items():
            terms = [f"{name}<{1e3 * value:g}ms" for name in QUANTITIES if (value := getattr(limits, name)) is not None]
            parts.append((f"{kind}: " if kind else "") + " ".join(terms))
        text = "; ".join(parts) + (f" for {100 * self.attain:g} % of the requests" if parts else "")
        return "; ".join(filter(None, (text, " ".join(map(str, self.pooled)))))


def parse_promise(text: str, attain: float = 0.95) -> Promise:
    """``chat: ttft<500ms tpot<60ms; background: e2e<30s``, or without classes, or with percentiles (``itl_p99<100ms``).

    Args:
        text: the limits.
        attain: share of requests that must keep them.

    Raises:
        ValueError: names the part that cannot be read and the known forms.
    """
    classes: dict[str, Limits] = {}
    pooled: list[Pooled] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        kind, colon, terms = part.partition(":")
        kind, terms = (kind.strip(), terms) if colon else ("", part)
        if kind in classes:
            raise ValueError(f"class {kind!r} has limits twice")
        limits = Limits()
        for word in re.sub(r"\s*<\s*", "<", terms).split():
            match = _TERM.fullmatch(word)
            if match is None or match["name"] not in QUANTITIES:
                raise ValueError(
                    f"cannot read the limit {word!r}; known forms: NAME<NUMBERms, NAME<NUMBERs and NAME_p95<NUMBERms "
                    f"with a NAME of {', '.join(QUANTITIES)}"
                )
            value = float(match["value"]) * _UNITS[match["unit"]]
            if match["percent"] is None:
                if getattr(limits, match["name"]) is not None:
                    raise ValueError(f"{match['name']} has two limits in {part!r}")
                limits = replace(limits, **{match["name"]: value})
                continue
            percent = float(match["percent"])
            if kind:
                raise ValueError(f"{word!r}: percentiles are pooled over all classes; leave {kind!r} out")
            if not 0 < percent < 100:
                raise ValueError(f"a percentile must be in (0, 100), got {percent:g}")
            pooled.append(Pooled(match["name"], percent, value))
        if limits != Limits():
            classes[kind] = limits
    return Promise(classes=classes, attain=attain, pooled=tuple(pooled))
