"""A tuning as text and as one self-contained page: candidates, flags and gain, and throughput against latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hopon.capacity import chart
from hopon.capacity.knobs import Candidate
from hopon.capacity.search import Window
from hopon.capacity.tune import Limit, Measured, Spot, best_of, front, spots
from hopon.sim.report import number, table

LATENCIES = {"TTFT p95": "ttft_p95", "TPOT p95": "tpot_p95", "E2E p95": "e2e_p95"}
"""What throughput is traded against; the last one holds the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """All that a tuning found.

    Args:
        limits: of the simulator; the first is where one started from.
        simulated: its windows.
        measured: on the engine, the first is where one started from; empty where nothing was measured.
        rate: offered there, requests per second.
    """

    limits: Sequence[Limit]
    simulated: Sequence[tuple[Candidate, Window]]
    measured: Sequence[Measured] = ()
    rate: float = 0.0

    @property
    def windows(self) -> Sequence[tuple[Candidate, Window]]:
        """Measured ones where there are any."""
        return [(one.candidate, w) for one in self.measured for w in one.windows] or self.simulated


def text(tuning: Tuning, about: Mapping[str, Any]) -> str:
    """What was tried, the front, and the answer last."""
    lines = [f"{name}: {value}" for name, value in about.items() if value not in (None, "")]
    parts = ["\n".join(lines), "In the simulator:\n" + table(*_limits(tuning))]
    if tuning.measured:
        parts.append(f"On the engine, at {tuning.rate:.3g} requests/s:\n" + table(*_measured(tuning)))
    kind = "measured" if tuning.measured else "simulated"
    best = front(spots(tuning.windows, "e2e_p95"))
    rows = [[f"{s.tokens_per_second:.0f}", f"{1e3 * s.latency:.0f}", f"{s.rate:.3g}", str(s.candidate)] for s in best]
    head = ["tokens/s", "E2E p95 ms", "requests/s", "flags"]
    parts.append(f"Throughput against latency, {kind}; nothing that was tried has more of one without less of the "
                 "other:\n" + (table(head, rows) if rows else "(no candidate kept up with the load)"))  # fmt: skip
    return "\n\n".join([*parts, "\n".join(verdict(tuning))])


def verdict(tuning: Tuning) -> list[str]:
    """The recommended flags, what they gain, and why."""
    base = tuning.limits[0]
    if not tuning.measured:
        best = max(tuning.limits, key=lambda limit: limit.rate)
        if best is base or not best.rate:
            return [f"recommended: {base.candidate}; in the simulator nothing that was tried carries more"]
        gain = f"{best.rate / base.rate - 1:+.0%}" if base.rate else "from nothing"
        return [
            f"recommended: {best.candidate}",
            f"predicted, not measured: {base.rate:.3g} -> {best.rate:.3g} requests/s ({gain}) as promised",
            *_reason(base, best),
        ]
    start, found = tuning.measured[0], best_of(tuning.measured)
    rounds = len(start.windows)
    if found is start:
        return [
            f"recommended: {start.candidate}; at {tuning.rate:.3g} requests/s no candidate was better than it by more "
            f"than the spread of {rounds} windows"
        ]
    before, after = start.middle("goodput") or 0.0, found.middle("goodput") or 0.0
    gain = f"{after / before - 1:+.0%}" if before else "from nothing"
    best = next(limit for limit in tuning.limits if limit.candidate == found.candidate)
    return [
        f"recommended: {found.candidate}",
        f"measured: goodput {before:.3g} -> {after:.3g} requests/s ({gain}) at {tuning.rate:.3g} offered, medians of "
        f"{rounds} windows; {_spread(start)} and {_spread(found)}",
        *_reason(base, best),
    ]


def _reason(base: Limit, best: Limit) -> list[str]:
    before, after = base.cause, best.cause
    change = "breaks later" if before.name == after.name else "breaks otherwise"
    return [
        f"because {base.candidate} breaks by {before.name} at {base.rate:.3g}/s ({before.why})",
        f"and {best.candidate} {change}: by {after.name} at {best.rate:.3g}/s ({after.why})",
    ]


def _spread(one: Measured) -> str:
    values = one.values("goodput")
    return f"{min(values):.3g} to {max(values):.3g}"


def _limits(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    base = tuning.limits[0]
    rows = [
        [
            str(limit.candidate),
            f"{limit.rate:.3g}",
            f"{limit.rate / base.rate - 1:+.0%}" if base.rate else "-",
            limit.cause.name,
        ]
        for limit in tuning.limits
    ]
    return ["flags", "carries requests/s", "gain", "then breaks by"], rows


def _measured(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    base = tuning.measured[0].middle("goodput") or 0.0
    rows = []
    for one in tuning.measured:
        middle = one.middle("goodput") or 0.0
        rows.append([
            str(one.candidate),
            f"{middle:.3g}",
            f"{middle / base - 1:+.0%}" if base else "-",
            _spread(one),
            *(_ms(one.middle(name)) for name in ("ttft_p95", "itl_p50", "itl_p95", "e2e_p95")),
            number(one.middle("output_tokens_per_second"), 0),
            number(one.middle("preemptions"), 0),
        ])  # fmt: skip
    head = [
        "flags",
        "goodput/s",
        "gain",
        "windows",
        "TTFT p95",
        "ITL p50",
        "ITL p95",
        "E2E p95 ms",
        "tok/s",
        "preempted",
    ]
    return head, rows


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.0f}"


def page(tuning: Tuning, about: Mapping[str, Any]) -> str:
    """HTML without any other file."""
    first, *rest = verdict(tuning)
    head = f"<h1>{escape(first)}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in rest)
    panels = "".join(_panel(tuning.windows, name, figure) for name, figure in LATENCIES.items())
    tables = _table(*_limits(tuning)) + (_table(*_measured(tuning)) if tuning.measured else "")
    kind = "measured on the engine" if tuning.measured else "simulated"
    body = (
        f"{head}<p>Throughput against latency, {kind}: a dot is a candidate at a rate that it keeps up. Filled: on the "
        f'front, nothing has more of one without less of the other.</p><div class="grid">{panels}</div>'
        f"{chart.facts(about)}{tables}"
    )
    return chart.document("Tuning", body)


def _panel(windows: Sequence[tuple[Candidate, Window]], name: str, figure: str) -> str:
    found = spots(windows, figure)
    if not found:
        return ""
    best = front(found)
    frame = chart.Frame(
        1.05 * max(spot.tokens_per_second for spot in found), 1e3 * 1.08 * max(spot.latency for spot in found)
    )
    line = [(spot.tokens_per_second, 1e3 * spot.latency) for spot in best]
    dots = [frame.dot(s.tokens_per_second, 1e3 * s.latency, "var(--a)", s in best, _words(s)) for s in found]
    return chart.figure(name, "ms", "", [*frame.axes("output tokens/s"), frame.line(line, "var(--soft)"), *dots])


def _words(spot: Spot) -> str:
    return f"{spot.candidate}: {spot.tokens_per_second:.0f} tokens/s, {1e3 * spot.latency:.0f} ms at {spot.rate:.3g}/s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
