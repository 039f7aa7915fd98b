"""A comparison as tables for people, in at most 120 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hopon.compare.run import Outcome
from hopon.core.types import FinishReason
from hopon.metrics import Distribution

if TYPE_CHECKING:
    from hopon.compare.comparison import Comparison


_LABEL_WIDTH = 22

_LEGEND = """\
useful: slot-steps (rows of a pass that hold a sequence) that yield a token or compute prompt tokens for the first time;
  of held: share of those that held a sequence or were padding; of seats: share of max_num_seqs in all passes.
rows: tokens through the model, padding included. KV: shares of the pool, averaged over the time in which passes run.
TTFT = waiting (until a seat) + prefill (from there to the first token), from the intended send time; so is E2E.
ITL: gaps between tokens of a request, pooled; tokens told together have none. TPOT: (E2E - TTFT) / (tokens - 1)."""


def text(comparison: Comparison) -> str:
    """What was asked, who did how much in which time, and whether all gave the same outputs."""
    manifest, outcomes = comparison.manifest, comparison.outcomes
    model = manifest.get("model", {})
    parts = [
        f"workload: {manifest['workload']} ({manifest['input_tokens']:,} tokens in, {manifest['output_tokens']:,} out)"
    ]
    if model:
        parts[0] = (
            f"model:    {Path(str(model.get('model', '?'))).name}, {model.get('dtype', '?')}, kernels "
            f"{model.get('level', '?')}, {model.get('threads', '?')} threads\n{parts[0]}"
        )
    if outcomes:
        labels, notes = _labels([outcome.label for outcome in outcomes])
        rows = list(zip(labels, outcomes, strict=True))
        parts += [
            *(["\n".join(notes)] if notes else []),
            _work(rows),
            _memory(rows),
            _latencies(rows, ("TTFT", "waiting", "prefill")),
            _latencies(rows, ("ITL", "TPOT", "E2E")),
            _LEGEND,
        ]
    for outcome in outcomes:
        failed = [r for r in outcome.result.records if r.finish in (FinishReason.REFUSED, FinishReason.ERROR)]
        if failed:
            first = failed[0]
            parts.append(f"{outcome.label}: {len(failed)} not served; the first is {first.request_id}: {first.message}")
    if len(outcomes) > 1:
        differing = comparison.differing
        parts.append(
            f"DIFFERENT OUTPUTS: {len(differing)} requests, the first is request {differing[0]}"
            if differing
            else "outputs: the same tokens from every policy, request by request"
        )
    if comparison.missing:
        parts.append(f"interrupted; not run to the end: {', '.join(comparison.missing)}")
    return "\n\n".join(parts)


def _labels(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels short enough for a table, and lines that say what the shortened ones stand for."""
    short, notes = [], []
    for number, label in enumerate(labels, 1):
        if len(label) > _LABEL_WIDTH:
            mark = f" [{number}]"
            short.append(label.split()[0][: _LABEL_WIDTH - len(mark)] + mark)
            notes.append(f"{short[-1]} is {label}")
        else:
            short.append(label)
    return short, notes


_Rows = Sequence[tuple[str, Outcome]]


def _work(rows: _Rows) -> str:
    groups = [("", ("served", "seconds", "tokens/s", "passes")), ("slot-steps", ("useful", "of held", "of seats"))]
    groups.append(("rows computed", ("all", "padding")))
    lines = []
    for label, outcome in rows:
        totals, summary = outcome.result.totals, outcome.result.summary
        served = sum(record.completed for record in outcome.result.records)
        cells = [
            f"{served}/{summary.requests}",
            f"{summary.seconds:.{2 if summary.seconds < 1000 else 0}f}",
            "-" if summary.output_tokens_per_second is None else f"{summary.output_tokens_per_second:.1f}",
            f"{totals.passes:,}",
            f"{totals.useful_slot_steps:,}",
            _share(totals.useful_slot_steps, totals.resident_slot_steps),
            _share(totals.useful_slot_steps, totals.seat_steps),
            f"{totals.scheduled_tokens + totals.padding_tokens:,}",
            f"{totals.padding_tokens:,}",
        ]
        lines.append((label, cells))
    return _table("work", groups, lines)


def _memory(rows: _Rows) -> str:
    groups = [
        ("KV memory", ("reserved", "used", "wasted", "peak")),
        ("preempted", ("times",)),
        ("tokens", ("recomputed", "moved", "found cached")),
    ]
    lines = []
    for label, outcome in rows:
        totals, settings = outcome.result.totals, outcome.result.about["settings"]
        capacity = settings["num_blocks"] * settings["block_size"]
        cells = [
            *(_share(value, capacity) for value in (totals.kv_reserved, totals.kv_used, totals.kv_wasted)),
            _share(totals.kv_peak, capacity),
            f"{totals.preemptions:,}",
            f"{totals.recomputed_tokens:,}",
            f"{totals.moved_blocks * settings['block_size']:,}",
            f"{totals.prefix_cache_hits:,}",
        ]
        lines.append((label, cells))
    return _table("memory", groups, lines)


def _latencies(rows: _Rows, names: Sequence[str]) -> str:
    groups = [(name, ("p50", "p90", "p95", "p99")) for name in names]
    lines = []
    for label, outcome in rows:
        cells: list[str] = []
        for name in names:
            values: Distribution = getattr(outcome.result.summary, name.lower())
            cells += map(_milliseconds, (values.p50, values.p90, values.p95, values.p99))
        lines.append((label, cells))
    return _table("milliseconds", groups, lines)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _milliseconds(seconds: float | None) -> str:
    """At most six characters."""
    if seconds is None:
        return "-"
    if seconds >= 1000:
        return f"{seconds:.0f}s"
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f}"


def _table(title: str, groups: Sequence[tuple[str, Sequence[str]]], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Columns under the names of their groups; the first one holds labels."""
    heads = [head for _, columns in groups for head in columns]
    widths = [max(len(heads[i]), *(len(cells[i]) for _, cells in lines)) for i in range(len(heads))]
    above, at = [], 0
    for name, columns in groups:
        span = sum(widths[at : at + len(columns)]) + 2 * (len(columns) - 1)
        widths[at] += max(0, len(name) - span)
        above.append(name.center(max(span, len(name)), "-" if name else " "))
        at += len(columns)
    first = max(len(title), *(len(label) for label, _ in lines))

    def line(label: str, cells: Sequence[str]) -> str:
        return "  ".join([label.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]).rstrip()

    return "\n".join(["  ".join([" " * first, *above]).rstrip(), line(title, heads), *(line(*row) for row in lines)])
