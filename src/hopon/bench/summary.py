"""From a run's records to numbers, and whether the client itself can be believed.

Latencies are those of requests that were answered to their end. A failed request is a broken promise; one that the end
of the run cut is neither kept nor broken. The words are defined in :mod:`hopon.metrics`. A client sees pieces: ITL is
the gap between pieces, which is the gap between tokens where a piece brings one token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hopon import metrics
from hopon.bench.records import Record, Records
from hopon.metrics import Distribution, Heard, Limits

LATE = 0.01
"""Seconds behind its intended time from which a request counts as sent late."""
LATE_SHARE = 0.01
LAG_LIMIT = 0.02
CPU_LIMIT = 0.9
RATE_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What was promised: limits for each class of a mix, and those of every class without limits of its own.

    A request is good when it was answered within all limits that hold for it.
    """

    default: Limits = field(default_factory=Limits)
    kinds: Mapping[str, Limits] = field(default_factory=dict)

    def met(self, record: Heard) -> bool:
        """See the class."""
        return self.kinds.get(getattr(record, "kind", ""), self.default).met(record)


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_LIMIT = re.compile(r"(ttft|tpot|itl|e2e)\s*<=?\s*([0-9.]+)\s*(us|ms|s)")


def parse_slo(text: str) -> Slo:
    """``ttft<500ms tpot<60ms``, or classes: ``chat: ttft<500ms tpot<60ms; background: e2e<30s``.

    Raises:
        ValueError: names the part that is not understood.
    """
    default = Limits()
    kinds: dict[str, Limits] = {}
    for part in text.split(";"):
        name, colon, rest = part.rpartition(":")
        name = name.strip()
        found: dict[str, float] = {}
        for word in rest.split():
            match = _LIMIT.fullmatch(word)
            if match is None:
                raise ValueError(f"a limit looks like ttft<500ms (ttft, tpot, itl, e2e; us, ms, s), got {word!r}")
            if match[1] in found:
                raise ValueError(f"{match[1]} is limited twice in {part.strip()!r}")
            found[match[1]] = float(match[2]) * _UNITS[match[3]]
        if not found or (colon and not name) or name in kinds:
            raise ValueError(f"a promise looks like 'ttft<500ms' or 'chat: ttft<500ms; other: e2e<30s', got {text!r}")
        if name:
            kinds[name] = Limits(**found)
        else:
            default = Limits(**found)
    return Slo(default=default, kinds=kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run in numbers. Times are seconds, rates per second; None is what does not exist.

    Args:
        served: all requests but those that the end of the run cut; goodput and attainment need an SLO.
        kinds: the same for each class of a mix.
        cut: requests that were open at the end.
        errors: failed requests by kind.
        messages: the first words on each kind of error.
        total_tokens_per_second: of prompts and answers.
        offered_rate: of intended times; None in a closed loop.
        sent_rate: of real sending times.
        answered_rate: completed requests over the whole run.
        peak_open: most requests that were open at once.
        pieces: of completed requests.
        counted_by: where counts of tokens are from, by requests.
        unlike_asked: completed requests that got another number of tokens than they insisted on.
        send_delay: between intended and real sending time.
        lag: of the client's event loop.
        cpu_share: of one core, used by the client.
        preemptions: on the server during the run.
        warnings: reasons to doubt these numbers.
    """

    served: metrics.Summary
    kinds: Mapping[str, metrics.Summary]
    cut: int
    errors: Mapping[str, int]
    messages: Mapping[str, str]
    total_tokens_per_second: float | None
    offered_rate: float | None
    sent_rate: float | None
    answered_rate: float | None
    peak_open: int
    pieces: int
    counted_by: Mapping[str, int]
    unlike_asked: int
    send_delay: Distribution
    lag: Distribution
    cpu_share: float | None
    preemptions: float | None
    warnings: tuple[str, ...]

    @property
    def rate_was_achieved(self) -> bool | None:
        """The client sent as fast as it meant to; None in a closed loop."""
        if self.offered_rate is None or self.sent_rate is None:
            return None
        return abs(self.sent_rate / self.offered_rate - 1) <= RATE_TOLERANCE


def summarise(records: Records, slo: Slo | None = None, *, shared_tokens: int | None = None) -> Summary:
    """Fold a run.

    Args:
        records: of the run.
        slo: what was promised; without it there is no goodput.
        shared_tokens: most prompt tokens that a cache which knew nothing before the run can have had; None: not known.
    """
    calls = records.uncut
    done = [call for call in calls if call.completed]
    failed = [call for call in calls if call.error]
    served = metrics.summarise(calls, slo)
    names = sorted({call.kind for call in calls})
    tokens = served.input_tokens + served.output_tokens
    # Turns behind the first follow an answer: only first turns have a timetable.
    first = [call for call in records.calls if call.turn == 0]
    delays = [call.sent - call.arrival for call in records.calls if call.sent is not None]
    preempted = [sample.preemptions for sample in records.samples if sample.preemptions is not None]
    messages: dict[str, str] = {}
    for call in failed:
        messages.setdefault(call.error, call.message)
    lag = Distribution.of(records.lags)
    cpu = records.cpu_seconds / records.seconds if records.seconds > 0 else None
    return Summary(
        served=served,
        kinds={name: metrics.summarise([call for call in calls if call.kind == name], slo) for name in names if name},
        cut=len(records.calls) - len(calls),
        errors=dict(Counter(call.error for call in failed).most_common()),
        messages=messages,
        total_tokens_per_second=tokens / served.seconds if served.seconds > 0 else None,
        offered_rate=_rate([call.arrival for call in first]) if records.open_loop else None,
        sent_rate=_rate([call.sent for call in first if call.sent is not None]),
        answered_rate=served.requests_per_second,
        peak_open=peak_open(records.calls),
        pieces=sum(len(call.piece_times) for call in done),
        counted_by=dict(Counter(call.counted_by for call in done)),
        unlike_asked=sum(call.exact and call.output_tokens != call.asked for call in done),
        send_delay=Distribution.of(delays),
        lag=lag,
        cpu_share=cpu,
        preemptions=preempted[-1] - preempted[0] if preempted else None,
        warnings=tuple(_warnings(records, delays, lag, cpu, shared_tokens)),
    )


def _rate(times: Sequence[float]) -> float | None:
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def peak_open(calls: Sequence[Record]) -> int:
    """Most requests that were sent and not yet ended at one moment."""
    moves = [(call.sent, 1) for call in calls if call.sent is not None]
    moves += [(call.ended, -1) for call in calls if call.sent is not None and call.ended is not None]
    now = most = 0
    for _, move in sorted(moves):  # at the same moment ends come first
        now += move
        most = max(most, now)
    return most


def _warnings(
    records: Records, delays: Sequence[float], lag: Distribution, cpu: float | None, shared_tokens: int | None
) -> list[str]:
    found = []
    late = [delay for delay in delays if delay > LATE]
    if len(late) > LATE_SHARE * len(delays):
        found.append(
            f"{len(late)} of {len(delays)} requests were sent more than {1000 * LATE:g} ms late, up to "
            f"{1000 * max(late):.0f} ms: the client could not keep up (latencies count from the intended time)"
        )
    if lag.p99 is not None and lag.p99 > LAG_LIMIT:
        found.append(f"the client's event loop was {1000 * lag.p99:.0f} ms late at p99: times are that uncertain")
    if cpu is not None and cpu > CPU_LIMIT and records.seconds > 1:
        found.append(f"the client used {cpu:.0%} of a core: it may be what is measured here")
    done = [call for call in records.calls if call.completed]
    by_pieces = sum(call.counted_by == "pieces" for call in done)
    if by_pieces:
        found.append(f"the server told no usage for {by_pieces} answers: their tokens are counted by pieces")
    unlike = [call for call in done if call.exact and call.output_tokens != call.asked]
    if unlike:
        found.append(
            f"{len(unlike)} answers have another number of tokens than asked for; the first: "
            f"{unlike[0].output_tokens} instead of {unlike[0].asked}"
        )
    cached = sum(call.cached_tokens for call in done)
    if shared_tokens is not None and cached > shared_tokens:
        found.append(
            f"{cached} of {sum(call.input_tokens for call in done)} prompt tokens came from the server's prefix cache, "
            f"but the run's own prompts share {shared_tokens} at most: the cache was not cold"
        )
    if records.interrupted:
        found.append("the run was ended early: these are the numbers until then")
    return found
