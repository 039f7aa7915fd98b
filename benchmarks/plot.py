"""Small line charts as SVG files, for the documentation: no library, readable in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from pathlib import Path

from hopon.capacity.chart import ticks

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 120, 34, 46
COLOURS = ("#0b6bcb", "#c2570c", "#6b46c1", "#1a7f4b", "#b3261e", "#5d6878")

Points = Sequence[tuple[float, float]]


def chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points], *, log_x: bool = True) -> str:
    """One chart. The y axis begins at 0; the x axis is logarithmic to base 2 unless told otherwise."""
    xs = [x for points in lines.values() for x, _ in points]
    top = 1.05 * max(y for points in lines.values() for _, y in points)

    def place_x(x: float) -> float:
        low, high, at = min(xs), max(xs), x
        if log_x:
            low, high, at = log2(low), log2(high), log2(x)
        return LEFT + (at - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, "start", "title")]
    for y in ticks(top):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place_y(y):.1f}" y2="{place_y(y):.1f}"/>'
        )
        parts.append(_text(LEFT - 7, place_y(y) + 4, f"{y:g}", "end"))
    for x in sorted(set(xs)) if log_x else ticks(max(xs)):
        parts.append(_text(place_x(x), HEIGHT - BOTTOM + 17, _number(x), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>')
    last: list[float] = []
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        at = place_y(points[-1][1]) + 4
        while any(abs(at - other) < 13 for other in last):
            at -= 13
        last.append(at)
        parts.append(
            f'<text x="{place_x(points[-1][0]) + 8:.1f}" y="{at:.1f}" style="fill:{colour}">{escape(name)}</text>'
        )
    style = (
        "text{font:12px system-ui,sans-serif;fill:#5d6878}.title{font-weight:600;font-size:14px;fill:#1c2430}"
        ".grid{stroke:#d5dbe3}rect{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#9aa5b4}.title{fill:#e8ebf0}"
        ".grid{stroke:#333c49}rect{fill:#14181e}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<style>{style}</style><rect width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


def write(folder: Path, name: str, svg: str) -> None:
    """One file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _number(x: float) -> str:
    """Thousands, of either kind, with a k."""
    for thousand in (1024, 1000):
        if x >= 2 * thousand and x % thousand == 0:
            return f"{x / thousand:g}k"
    return f"{x:g}"
