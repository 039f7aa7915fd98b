"""What the pages of this package share: colours, the size of a panel, and pieces of SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 40

STYLE = """
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


@dataclass(frozen=True, slots=True)
class Frame:
    """A panel whose axes run from 0 to ``right`` and to ``top``."""

    right: float
    top: float

    def x(self, value: float) -> float:
        """Of a value on the lower axis."""
        return LEFT + value / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Of a value on the axis at the left; what is beyond it lies on its end."""
        return HEIGHT - BOTTOM - min(value, self.top) / self.top * (HEIGHT - TOP - BOTTOM)

    def axes(self, label: str) -> list[str]:
        """Numbers, lines across, and what the lower axis is."""
        parts = [text(self.x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle") for tick in ticks(self.right)]
        for tick in ticks(self.top):
            parts += [self.across(tick, "var(--line)"), text(LEFT - 6, self.y(tick) + 4, f"{tick:g}", "end")]
        return [*parts, text((LEFT + WIDTH) / 2, HEIGHT - 6, label, "middle")]

    def across(self, value: float, colour: str) -> str:
        """A line from left to right."""
        y = f"{self.y(value):.1f}"
        return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{colour}"/>'

    def upright(self, value: float, colour: str) -> str:
        """A line from top to bottom."""
        x = f"{self.x(value):.1f}"
        return f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" stroke-width="1.5"/>'

    def band(self, low: float, high: float) -> str:
        """Everything between two values of the lower axis."""
        left, width = self.x(low), max(self.x(high) - self.x(low), 1)
        height = HEIGHT - TOP - BOTTOM
        return f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{height}" fill="var(--band)"/>'

    def dot(self, x: float, y: float, colour: str, filled: bool, words: str) -> str:
        """A point that tells what it is when the mouse is on it."""
        fill = colour if filled else "var(--card)"
        return (
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.6" fill="{fill}" stroke="{colour}">'
            f"<title>{escape(words)}</title></circle>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        """A dashed one."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>'


def figure(title: str, unit: str, legend: str, parts: Sequence[str]) -> str:
    """A panel with its caption."""
    return (
        f"<figure><figcaption>{escape(title)} <span>({escape(unit)})</span> {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def document(title: str, body: str) -> str:
    """HTML without any other file."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><main>{body}</main></html>\n"
    )


def facts(about: Mapping[str, Any]) -> str:
    """What was measured, as a list."""
    rows = (f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in about.items() if v not in (None, ""))
    return f"<dl>{''.join(rows)}</dl>"


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Words at a point; ``anchor`` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0."""
    raw = top / 5
    unit = 10 ** floor(log10(raw))
    step = unit * min((1, 2, 5, 10), key=lambda factor: abs(factor - raw / unit))
    return [round(step * i, 10) for i in range(ceil(top / step)) if step * i <= top]
