"""From what clients heard to numbers: a fold over deltas, the same for the engine and the simulator.

Definitions, wherever a number is printed:

- *TTFT*: from the intended send time to the first token. It is *waiting* (until the request is given a seat) plus
  *prefill* (from there to the first token), and exactly their sum.
- *ITL*: every gap between consecutive tokens of one request, pooled over requests. Tokens that arrive together have no
  gap, so a system that answers when its batch ends has none at all.
- *TPOT*: (E2E - TTFT) / (output tokens - 1), one value per request with two tokens or more.
- *E2E*: from the intended send time to the last token.
- *goodput*: requests per second that meet all their limits.

Times are seconds. What does not exist is None, never NaN. This module knows no clock and no file.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Protocol

from hopon.core.types import Delta, FinishReason, Request

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""Those that are printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """What became of one request.

    Args:
        request_id: whose.
        arrival: intended send time.
        input_tokens: tokens of the prompt.
        admitted: when it was first given a seat; None: never.
        token_times: when each output token was told.
        cached_tokens: prompt tokens that the prefix cache had.
        ended: when its end was told.
        finish: why it ended; None: it has not.
        message: the numbers of a refusal or an error.
        source: which replica served it.
        kind: its class in a mix.
    """

    request_id: str
    arrival: float
    input_tokens: int
    admitted: float | None = None
    token_times: Sequence[float] = ()
    cached_tokens: int = 0
    ended: float | None = None
    finish: FinishReason | None = None
    message: str = ""
    source: int = 0
    kind: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens told."""
        return len(self.token_times)

    @property
    def first_token(self) -> float | None:
        """When the first token was told."""
        return self.token_times[0] if self.token_times else None

    @property
    def last_token(self) -> float | None:
        """When the last token was told."""
        return self.token_times[-1] if self.token_times else None

    @property
    def completed(self) -> bool:
        """It got all that it asked for."""
        return self.finish in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def waiting(self) -> float | None:
        """Seconds until it was given a seat."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def prefill(self) -> float | None:
        """Seconds from its seat to its first token."""
        return None if self.admitted is None or not self.token_times else self.token_times[0] - self.admitted

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token: waiting plus prefill."""
        waiting, prefill = self.waiting, self.prefill
        return None if waiting is None or prefill is None else waiting + prefill

    @property
    def e2e(self) -> float | None:
        """Seconds to the last token."""
        return self.token_times[-1] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None below two tokens."""
        e2e, ttft = self.e2e, self.ttft
        if e2e is None or ttft is None or len(self.token_times) < 2:
            return None
        return (e2e - ttft) / (len(self.token_times) - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens that did not arrive together."""
        return [after - before for before, after in pairwise(self.token_times) if after > before]


class Heard(Protocol):
    """What a summary needs to know of one request; times are seconds, None is what does not exist."""

    @property
    def arrival(self) -> float:
        """Intended send time."""

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def output_tokens(self) -> int:
        """Tokens told."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache had."""

    @property
    def ended(self) -> float | None:
        """When its end was told."""

    @property
    def finish(self) -> str | None:
        """Why it ended."""

    @property
    def completed(self) -> bool:
        """It got all that it asked for."""

    @property
    def ttft(self) -> float | None:
        """To the first token."""

    @property
    def waiting(self) -> float | None:
        """To its seat."""

    @property
    def prefill(self) -> float | None:
        """From its seat to the first token."""

    @property
    def tpot(self) -> float | None:
        """Per token behind the first."""

    @property
    def e2e(self) -> float | None:
        """To the last token."""

    @property
    def gaps(self) -> Sequence[float]:
        """Between tokens that did not arrive together."""


class Promise(Protocol):
    """What users were promised."""

    def met(self, record: Heard) -> bool:
        """Whether a request was served as promised."""


class _Open:
    """A record in the making."""

    __slots__ = ("delta", "request", "source", "times")

    def __init__(self, request: Request, source: int) -> None:
        self.request = request
        self.source = source
        self.times = array("d")
        self.delta: Delta | None = None  # the last one


class Recorder:
    """Folds deltas into records. Requests must be known before their news."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._done: list[RequestRecord] = []

    def expect(self, request: Request, source: int = 0) -> None:
        """A request was sent; its ``arrival`` is the intended time."""
        assert request.request_id not in self._open, f"request id {request.request_id!r} is in use"
        self._open[request.request_id] = _Open(request, source)

    def hear(self, news: Iterable[Delta]) -> None:
        """News in the order in which they were told."""
        for delta in news:
            entry = self._open[delta.request_id]
            if len(delta.tokens) == 1:
                entry.times.append(delta.time)
            else:
                entry.times.extend([delta.time] * len(delta.tokens))
            entry.delta = delta
            if delta.finish is not None:
                del self._open[delta.request_id]
                self._done.append(_record(entry))

    def repeat(self, names: Iterable[str], times: Sequence[float]) -> None:
        """Each of these requests got one more token at each of the times."""
        for name in names:
            self._open[name].times.extend(times)

    def records(self) -> list[RequestRecord]:
        """All of them: those that ended in the order of their ends, then the others in the order they were sent."""
        return self._done + [_record(entry) for entry in self._open.values()]


def _record(entry: _Open) -> RequestRecord:
    delta, request = entry.delta, entry.request
    ended = delta is not None and delta.finish is not None
    return RequestRecord(
        request_id=request.request_id,
        arrival=request.arrival,
        input_tokens=len(request.prompt),
        admitted=delta.admitted if delta else None,
        token_times=entry.times,
        cached_tokens=delta.cached_tokens if delta else 0,
        ended=delta.time if delta and ended else None,
        finish=delta.finish if delta else None,
        message=delta.message if delta else "",
        source=entry.source,
    )


def percentiles(values: Iterable[float], wanted: Sequence[float] = PERCENTILES) -> list[float | None]:
    """Percentiles by linear interpolation between the two closest ranks, as numpy's default is; None without values.

    Raises:
        ValueError: a wanted percentile outside [0, 100].
    """
    for percent in wanted:
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile must be in [0, 100], got {percent}")
    counts = Counter(values)  # many gaps are equal: those of one step
    if not counts:
        return [None] * len(wanted)
    total = counts.total()
    ranks = sorted({rank for percent in wanted for rank in _ranks(percent, total)})
    found: dict[int, float] = {}
    passed = 0
    position = 0
    for value in sorted(counts):
        passed += counts[value]
        while position < len(ranks) and ranks[position] < passed:
            found[ranks[position]] = value
            position += 1
    results: list[float | None] = []
    for percent in wanted:
        low, high = _ranks(percent, total)
        share = percent / 100 * (total - 1) - low
        results.append(found[low] + share * (found[high] - found[low]))
    return results


def _ranks(percent: float, total: int) -> tuple[int, int]:
    low = floor(percent / 100 * (total - 1))
    return low, min(low + 1, total - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a request must keep to count as good; None is no limit. Seconds.

    Args:
        ttft: time to first token.
        tpot: time per output token.
        itl: the largest gap between its tokens.
        e2e: time to the last token.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "itl", "e2e"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"the limit of {name} must be above 0 seconds, got {value}")

    def met(self, record: Heard) -> bool:
        """It was served to its end within all limits. A limit on what does not exist (one token has no gap) is met."""
        if not record.completed:
            return False
        pairs = [(self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e)]
        if self.itl is not None:
            pairs.append((self.itl, max(record.gaps, default=None)))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Count, mean, percentiles and maximum of some values; None where there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    maximum: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """All of it from the values."""
        p50, p90, p95, p99, most = percentiles(values, (*PERCENTILES, 100.0))
        mean = sum(values) / len(values) if values else None
        return cls(count=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, maximum=most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run as its clients saw it.

    ``seconds`` runs from the first arrival to the last news. ``goodput`` is per second and None without limits.
    """

    requests: int
    finishes: Mapping[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    output_tokens_per_second: float | None
    requests_per_second: float | None
    goodput: float | None
    attainment: float | None
    ttft: Distribution
    waiting: Distribution
    prefill: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution


def summarise(records: Sequence[Heard], limits: Promise | None = None) -> Summary:
    """Fold records. Latencies are those of requests that were served to their end."""
    done = [record for record in records if record.completed]
    ends = [record.ended for record in records if record.ended is not None]
    seconds = max(ends) - min(record.arrival for record in records) if ends else 0.0
    good = sum(map(limits.met, records)) if limits else None
    finishes = Counter("unfinished" if record.finish is None else str(record.finish) for record in records)

    def per_second(number: int | None) -> float | None:
        return None if number is None or seconds <= 0 else number / seconds

    def of(name: str) -> Distribution:
        return Distribution.of([value for record in done if (value := getattr(record, name)) is not None])

    tokens = sum(record.output_tokens for record in records)
    return Summary(
        requests=len(records),
        finishes=dict(sorted(finishes.items())),
        seconds=seconds,
        input_tokens=sum(record.input_tokens for record in records),
        output_tokens=tokens,
        cached_tokens=sum(record.cached_tokens for record in records),
        output_tokens_per_second=per_second(tokens),
        requests_per_second=per_second(len(done)),
        goodput=per_second(good),
        attainment=None if good is None or not records else good / len(records),
        ttft=of("ttft"),
        waiting=of("waiting"),
        prefill=of("prefill"),
        itl=Distribution.of([gap for record in done for gap in record.gaps]),
        tpot=of("tpot"),
        e2e=of("e2e"),
    )
