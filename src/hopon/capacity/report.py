"""A search's answer as text, and as one self-contained page with the curves and the limit drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

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

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 40

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5d6878;--line:#d5dbe3;--paper:#fbfbf9;--card:#fff;--a:#0b6bcb;
--b:#c2570c;--c:#6b46c1;--good:#1a7f4b;--bad:#b3261e;--band:rgba(11,107,203,.14)}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa5b4;--line:#333c49;--paper:#14181e;--card:#1c222a;
--a:#62b0ff;--b:#ff9a56;--c:#b79cff;--good:#5fd39a;--bad:#ff8a80;--band:rgba(98,176,255,.16)}}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1020px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:30px;margin:0 0 2px}h1 small{font-size:17px;color:var(--soft);font-weight:400}
p{margin:6px 0;max-width:75ch}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(310px,1fr));gap:16px;margin:22px 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px}
figcaption{font-weight:600;margin-bottom:4px;font-size:14px}figcaption span{white-space:nowrap;margin-right:4px}
figcaption span{font-weight:400;color:var(--soft)}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;color:var(--soft)}
dd{margin:0;color:var(--ink);overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:13px;width:100%}
td,th{padding:3px 8px;text-align:right;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}.wide{overflow-x:auto}.kept{color:var(--good)}.broken{color:var(--bad)}
"""


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
    facts = "".join(
        f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in about.items() if v not in (None, "")
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Capacity of {escape(title)}</title><style>{_STYLE}</style><main>{head}"
        f"<p>Filled dots: the promise was kept. Hollow: it was broken. Band: the interval.</p>"
        f'<div class="grid">{figures}</div><dl>{facts}</dl><div class="wide">{_rows(answer)}</div></main></html>\n'
    )


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
    rates = [rate for _, _, values in points for rate, _, _ in values]
    low, high = 0.0, max(rates) * 1.05
    found = answer.estimate
    if found is not None:
        high = min(high, 1.6 * found.rate)  # far beyond the limit everything is large
    shown = [v for _, _, values in points for rate, v, _ in values if rate <= high]
    top = 1.05 if level is not None else (max(shown, default=1.0) * 1.08 or 1.0)

    def x(rate: float) -> float:
        return _LEFT + (rate - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - min(value, top) / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in _ticks(high):
        parts.append(_text(x(tick), _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle"))
    for tick in _ticks(top):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="var(--line)"/>'
        )
        parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, "offered requests/s", "middle"))
    if found is not None:
        a, b = x(min(found.low, high)), x(min(found.high, high))
        height = _HEIGHT - _TOP - _BOTTOM
        parts.append(f'<rect x="{a:.1f}" y="{_TOP}" width="{max(b - a, 1):.1f}" height="{height}" fill="var(--band)"/>')
        parts.append(_rule(x(found.rate), "var(--a)"))
        if level is not None:
            steps = [low + (high - low) * i / 120 for i in range(1, 121)]
            path = " ".join(f"{x(rate):.1f},{y(found.share(rate)):.1f}" for rate in steps)
            parts.append(f'<polyline points="{path}" fill="none" stroke="var(--soft)" stroke-dasharray="4 3"/>')
    if level is not None:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="var(--bad)"/>'
        )
    for name, colour, values in points:
        for rate, value, kept in values:
            if rate <= high:
                fill = f"var(--{colour})" if kept else "var(--card)"
                parts.append(
                    f'<circle cx="{x(rate):.1f}" cy="{y(value):.1f}" r="3.6" fill="{fill}" stroke="var(--{colour})">'
                    f"<title>{escape(name)} {value:.4g} at {rate:.3g}/s</title></circle>"
                )
    legend = " ".join(f'<span style="color:var(--{c})">&#9679; {escape(name)}</span>' for name, c, _ in points)
    caption = f"{escape(title)} <span>({escape(unit)})</span> {legend if len(points) > 1 else ''}"
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rule(x: float, colour: str) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="{colour}" stroke-width="1.5"/>'
    )


def _ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0."""
    raw = top / 5
    unit = 10 ** floor(log10(raw))
    step = unit * min((1, 2, 5, 10), key=lambda factor: abs(factor - raw / unit))
    return [round(step * i, 10) for i in range(ceil(top / step)) if step * i <= top]
