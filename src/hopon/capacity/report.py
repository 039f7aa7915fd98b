"""A search's answer as text, and as one self-contained page with the curves and the limit drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from hopon.capacity import chart
from hopon.capacity.cause import Cause
from hopon.capacity.estimate import Estimate
from hopon.capacity.search import Answer, Window
from hopon.sim.report import number, table


def text(answer: Answer, about: Mapping[str, Any], cause: Cause | None) -> str:
    """The answer first, then what it rests on."""
    found = answer.estimate
    lines = [f"{name}: {value}" for name, value in about.items() if value not in (None, "")]
    rows = [
        [
            f"{window.rate:.3g}",
            window.phase,
            "yes" if window.kept else "no",
            *(number(share.value, 3) for share in window.shares),
            *(_cell(window, name) for name in ("ttft_p95", "itl_p95", "tpot_p95", "e2e_p95")),
            number(window.figures.get("output_tokens_per_second"), 0),
            window.unstable,
        ]
        for window in sorted(answer.windows, key=lambda window: window.rate)
    ]
    shares = [
        f"share {place + 1}" if len(answer.windows[0].shares) > 1 else "share" for place in range(len(rows[0]) - 9)
    ]
    head = ["requests/s", "phase", "kept", *shares, "TTFT p95", "ITL p95", "TPOT p95", "E2E p95 ms", "tok/s", "why not"]
    return "\n\n".join(["\n".join(lines), table(head, rows), _verdict(answer, found, cause)])


def _verdict(answer: Answer, found: Estimate | None, cause: Cause | None) -> str:
    if found is None:
        return f"no capacity found: {answer.note}"
    confirmed = {True: "confirmed by a longer run at the lower end", False: "NOT confirmed by a longer run", None: ""}
    lines = [
        f"capacity: {found.rate:.3g} requests/s, interval {found.low:.3g} to {found.high:.3g} "
        f"(+-{100 * found.half_width:.0f} %), {len(answer.windows)} windows"
        + (f", {confirmed[answer.confirmed]}" if confirmed[answer.confirmed] else ""),
        f"plan with {found.low:.3g} requests/s; {answer.note}",
        f"breaks first: {answer.binding}",
    ]
    if cause is not None:
        lines += [f"because of: {cause.name} ({cause.why})", f"try: {cause.knob}"]
    return "\n".join(lines)


def _cell(window: Window, name: str) -> str:
    value = window.figures.get(name)
    return "-" if value is None else f"{1e3 * value:.0f}"


# ---- the page ----


def page(answer: Answer, about: Mapping[str, Any], cause: Cause | None, title: str) -> str:
    """HTML without any other file."""
    found = answer.estimate
    if found is None:
        head = f"<h1>No capacity found</h1><p>{escape(answer.note)}</p>"
    else:
        head = (
            f"<h1>{found.rate:.3g} requests/s <small>{found.low:.3g} to {found.high:.3g}, "
            f"{len(answer.windows)} windows</small></h1><p>Highest offered load of {escape(title)} at which the "
            f"promise is kept. First to break: {escape(answer.binding)}.</p>"
        )
        if answer.confirmed is not None:
            word = "kept" if answer.confirmed else "did not keep"
            head += f"<p>A longer run with an unseen seed at the lower end {word} the promise.</p>"
        if cause is not None:
            head += f"<p><b>What breaks: {escape(cause.name)}.</b> {escape(cause.why)}. Try: {escape(cause.knob)}.</p>"
    figures = "".join(_panels(answer))
    body = (
        f"{head}<p>Filled dots: the promise was kept. Hollow: it was broken. Band: the interval.</p>"
        f'<div class="grid">{figures}</div>{chart.facts(about)}<div class="wide">{_rows(answer)}</div>'
    )
    return chart.document(f"Capacity of {title}", body)


def _rows(answer: Answer) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("requests/s", "phase", "requests", "share", "TTFT p95 ms", "ITL p95 ms", "tok/s", "")
    )
    lines = []
    for window in sorted(answer.windows, key=lambda window: window.rate):
        share = min((share.value or 0.0) for share in window.shares)
        cells = (
            f"{window.rate:.3g}", window.phase, str(window.figures.get("requests", "-")), f"{share:.1%}",
            _cell(window, "ttft_p95"), _cell(window, "itl_p95"),
            number(window.figures.get("output_tokens_per_second"), 0), escape(window.unstable),
        )  # fmt: skip
        kind = "kept" if window.kept else "broken"
        lines.append(
            "<tr>" + "".join(f'<td class="{kind if i == 3 else ""}">{c}</td>' for i, c in enumerate(cells)) + "</tr>"
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


_PANELS: tuple[tuple[str, str, float, Mapping[str, str]], ...] = (
    ("Time to first token", "ms", 1e3, {"p50": "ttft_p50", "p95": "ttft_p95"}),
    ("Between tokens", "ms", 1e3, {"ITL p50": "itl_p50", "ITL p95": "itl_p95", "TPOT p95": "tpot_p95"}),
    ("Output", "tokens/s", 1.0, {"output": "output_tokens_per_second"}),
    ("Queue and batch", "requests", 1.0, {"running": "running", "waiting": "waiting"}),
    ("KV memory", "share in use", 1.0, {"mean": "kv_usage", "peak": "kv_peak"}),
)
"""Title, unit, factor, and what is drawn: words -> figure of a window."""

_Line = tuple[str, Callable[[Window], float | None]]


def _panels(answer: Answer) -> list[str]:
    place = next((i for i, share in enumerate(answer.windows[0].shares) if share.name == answer.binding), 0)
    level = answer.windows[0].shares[place].level

    def figure(name: str, factor: float) -> Callable[[Window], float | None]:
        return lambda w: None if (value := w.figures.get(name)) is None else factor * value

    panels = [_chart(answer, "Kept the promise", "share", [("share", lambda w: w.shares[place].value)], level)]
    for title, unit, factor, lines in _PANELS:
        panels.append(_chart(answer, title, unit, [(words, figure(name, factor)) for words, name in lines.items()]))
    return [panel for panel in panels if panel]


def _chart(answer: Answer, title: str, unit: str, lines: Sequence[_Line], level: float | None = None) -> str:
    """Windows as dots over the offered rate, hollow where the promise broke; the answer's interval as a band."""
    points = [
        (name, colour, [(w.rate, value, w.kept) for w in answer.windows if (value := of(w)) is not None])
        for (name, of), colour in zip(lines, "abc", strict=False)
    ]
    points = [entry for entry in points if entry[2]]
    if not points:
        return ""
    right = max(rate for _, _, values in points for rate, _, _ in values) * 1.05
    found = answer.estimate
    if found is not None:
        right = min(right, 1.6 * found.rate)  # far beyond the limit everything is large
    shown = [v for _, _, values in points for rate, v, _ in values if rate <= right]
    frame = chart.Frame(right, 1.05 if level is not None else (max(shown, default=1.0) * 1.08 or 1.0))
    parts = frame.axes("offered requests/s")
    if found is not None:
        parts += [frame.band(min(found.low, right), min(found.high, right)), frame.upright(found.rate, "var(--a)")]
        if level is not None:
            parts.append(
                frame.line([(r, found.share(r)) for r in (right * i / 120 for i in range(1, 121))], "var(--soft)")
            )
    if level is not None:
        parts.append(frame.across(level, "var(--bad)"))
    for name, colour, values in points:
        for rate, value, kept in values:
            if rate <= right:
                parts.append(frame.dot(rate, value, f"var(--{colour})", kept, f"{name} {value:.4g} at {rate:.3g}/s"))
    legend = " ".join(f'<span style="color:var(--{c})">&#9679; {escape(name)}</span>' for name, c, _ in points)
    return chart.figure(title, unit, legend if len(points) > 1 else "", parts)
