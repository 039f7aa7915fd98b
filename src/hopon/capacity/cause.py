"""What breaks first when the rate rises: a reading of windows, in words that name a knob.

The windows just above the limit are compared with the calmest one. Each quantity that the promise limits is looked at
by how much it grew; the largest growth names the symptom, and the server's own numbers (or, without them, where the
time went) name the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hopon.capacity.search import Window

FULL = 0.95
"""Share of seats or of KV memory in use from which they count as used up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """``name`` is one of queue, prefill interference, batch growth, KV memory, failures; ``why`` has the numbers."""

    name: str
    why: str
    knob: str


def find_cause(windows: Sequence[Window], limit: float) -> Cause:
    """What breaks the promise in windows at rates above ``limit``, requests per second."""
    beyond = sorted((w for w in windows if not w.kept and w.rate >= limit), key=lambda w: w.rate)
    beyond = beyond[: max(3, len(beyond) // 2)] or sorted(windows, key=lambda w: w.rate)[-1:]
    calm = min(windows, key=lambda w: w.rate)
    loaded = {name: _median(beyond, name) for name in set().union(*(w.figures for w in beyond))}
    before = dict(calm.figures)

    preempted, recomputed = loaded.get("preemptions") or 0.0, loaded.get("recomputed") or 0.0
    if preempted >= 1 and (recomputed > 0.01 or (loaded.get("kv_peak") or 0.0) >= FULL):
        return Cause(
            name="KV memory",
            why=f"{preempted:.0f} preemptions a window, {recomputed:.1%} of the tokens computed twice, KV cache "
            f"{_percent(loaded, 'kv_peak')} full at its peak",
            knob="more KV memory (--kv-cache-memory), a smaller --max-num-seqs, or shorter contexts",
        )
    if (loaded.get("failed") or 0) > 0.01 * (loaded.get("requests") or 1):
        return Cause(
            name="failures",
            why=f"{loaded['failed']:.0f} of {loaded['requests']:.0f} requests failed or were refused",
            knob="the server's limits on its queue, or what it said in its answers",
        )
    waiting = loaded.get("waiting")
    ttft_growth = _growth(before, loaded, "ttft_p95")
    gap_growth = _growth(before, loaded, "itl_p50")
    spikes = _ratio(loaded, "itl_p95", "itl_p50")
    if ttft_growth > 2 * gap_growth and (waiting is None or waiting > 0.1):
        full = f"; KV cache {_percent(loaded, 'kv_peak')} full at its peak" if "kv_peak" in loaded else ""
        text = f"{waiting:.1f} requests wait on average" if waiting is not None else "TTFT grows before the gaps do"
        return Cause(
            name="queue",
            why=f"{text}, TTFT p95 is {ttft_growth:.1f} times that of the calmest window{full}",
            knob="a larger --max-num-seqs if seats are full and gaps allow it, a larger token budget, or more replicas",
        )
    if spikes > 2.5:
        return Cause(
            name="prefill interference",
            why=f"ITL p95 is {spikes:.1f} times the median: prompts share steps with those who talk",
            knob="a smaller --max-num-batched-tokens or --long-prefill-token-threshold",
        )
    return Cause(
        name="batch growth",
        why=f"the median gap is {gap_growth:.1f} times that of the calmest window: larger batches take longer steps",
        knob="a smaller --max-num-seqs keeps gaps short, at the price of a queue",
    )


def _median(windows: Sequence[Window], name: str) -> float | None:
    values = [value for w in windows if isinstance(value := w.figures.get(name), (int, float))]
    return median(values) if values else None


def _growth(before: Mapping[str, Any], after: Mapping[str, float | None], name: str) -> float:
    first, last = before.get(name), after.get(name)
    return last / first if first and last else 1.0


def _ratio(figures: Mapping[str, float | None], above: str, below: str) -> float:
    first, last = figures.get(above), figures.get(below)
    return first / last if first and last else 1.0


def _percent(figures: Mapping[str, float | None], name: str) -> str:
    value = figures.get(name)
    return "-" if value is None else f"{value:.0%}"
