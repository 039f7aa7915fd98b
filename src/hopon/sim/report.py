"""A simulation's result as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from hopon.core.types import FinishReason
from hopon.metrics import Distribution
from hopon.sim.result import Result


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first one to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def text(result: Result) -> str:
    """All that people want to know, with what the words mean."""
    about, totals, summary = result.about, result.totals, result.summary
    ended = ", ".join(f"{count} {name}" for name, count in summary.finishes.items())
    share = None if totals.utilisation is None else 100 * totals.utilisation
    rows = [
        ("requests", f"{number(summary.requests)} ({ended})"),
        ("simulated time", f"{number(summary.seconds)} s, passes run {number(totals.busy_seconds)} s"),
        (
            "throughput",
            f"{number(summary.output_tokens_per_second, 1)} output tokens/s, "
            f"{number(summary.requests_per_second)} requests/s",
        ),
        ("passes", f"{number(totals.passes)}, {number(totals.mean_batch, 2)} sequences each"),
        (
            "slot-steps",
            f"{number(totals.useful_slot_steps)} useful, {number(totals.resident_slot_steps)} resident, "
            f"{number(totals.seat_steps)} seats ({number(share, 1)} % useful)",
        ),
        (
            "tokens",
            f"{number(totals.output_tokens)} output, {number(summary.input_tokens)} input "
            f"({number(totals.prefix_cache_hits)} found cached), {number(totals.padding_tokens)} padding",
        ),
        (
            "preemptions",
            f"{number(totals.preemptions)}; {number(totals.recomputed_tokens)} tokens recomputed, "
            f"{number(totals.moved_blocks)} blocks moved ({number(totals.moved_bytes / 1e9)} GB)",
        ),
        (
            "KV tokens",
            f"{number(totals.kv_reserved, 0)} reserved, {number(totals.kv_used, 0)} used, "
            f"{number(totals.kv_wasted, 0)} wasted (means over time), {number(totals.kv_peak)} at most",
        ),
    ]
    if summary.attainment is not None:
        rows.append(
            ("goodput", f"{number(summary.goodput)} requests/s within all limits ({100 * summary.attainment:.1f} %)")
        )
    width = max(len(name) for name, _ in rows)
    parts = [
        "\n".join(f"{key}: {value}" for key, value in about.items() if not isinstance(value, dict)),
        "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows),
        table(
            ("milliseconds", "mean", "p50", "p90", "p95", "p99", "max"),
            [
                _latency("TTFT = waiting + prefill", summary.ttft),
                _latency("  waiting", summary.waiting),
                _latency("  prefill", summary.prefill),
                _latency("ITL (gaps, pooled)", summary.itl),
                _latency("TPOT", summary.tpot),
                _latency("E2E", summary.e2e),
            ],
        ),
    ]
    failed = [r for r in result.records if r.finish in (FinishReason.REFUSED, FinishReason.ERROR)]
    if failed:
        parts.append(
            f"{len(failed)} requests were not served; the first is request {failed[0].request_id}: {failed[0].message}"
        )
    return "\n\n".join(parts)


def _latency(name: str, values: Distribution) -> tuple[str, ...]:
    columns = (values.mean, values.p50, values.p90, values.p95, values.p99, values.maximum)
    return (name, *(number(None if value is None else 1000 * value, 1) for value in columns))
