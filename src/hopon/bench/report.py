"""Runs as tables for people and as JSON for programs; two runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from typing import Any

from hopon.bench.manifest import Manifest, differences
from hopon.bench.records import Record, Records
from hopon.bench.summary import Summary
from hopon.metrics import Distribution
from hopon.sim.report import number, table

FORMAT = 1
"""Of the JSON file."""


def text(manifest: Manifest, summary: Summary) -> str:
    """One run."""
    return "\n\n".join([_head(manifest), _counts(summary), _latencies(summary), *_kinds(summary), *_notes(summary)])


def _head(manifest: Manifest) -> str:
    served_by = f" by {manifest.server}" if manifest.server else ""
    capacity = f", {manifest.capacity} capacity" if manifest.capacity else ""
    return "\n".join(
        [
            f"{manifest.model} at {manifest.url}{served_by}, {manifest.endpoint}{capacity}",
            f"workload: {manifest.workload}",
            f"load: {manifest.load}; cache {manifest.cache}",
        ]
    )


def _counts(summary: Summary) -> str:
    served = summary.served
    failed = sum(summary.errors.values())
    completed = served.requests - failed
    cut = f", {summary.cut} cut by the end of the run" if summary.cut else ""
    cached = served.cached_tokens / served.input_tokens if served.input_tokens else 0.0
    rows = [
        ("requests", f"{completed:,} answered, {failed:,} failed{cut}; at most {summary.peak_open:,} open at once"),
        ("time", f"{number(served.seconds)} s"),
        ("output", f"{number(served.output_tokens_per_second, 1)} tok/s ({served.output_tokens:,} tokens)"),
        (
            "total",
            f"{number(summary.total_tokens_per_second, 1)} tok/s ({served.input_tokens:,} prompt tokens, "
            f"{cached:.1%} from the prefix cache)",
        ),
        ("rate", _rates(summary)),
    ]
    if served.goodput is not None and served.attainment is not None:
        rows.append(("goodput", f"{number(served.goodput)} requests/s ({served.attainment:.1%} as promised)"))
    if summary.preemptions:
        rows.append(("preemptions", number(summary.preemptions, 0)))
    rows += [
        (f"  {kind}", f"{count:,}: {summary.messages[kind]}".rstrip(": ")) for kind, count in summary.errors.items()
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _rates(summary: Summary) -> str:
    answered = f"{number(summary.answered_rate)} requests/s answered"
    if summary.offered_rate is None:
        return answered
    verdict = "as planned" if summary.rate_was_achieved else "NOT as planned"
    return (
        f"{number(summary.offered_rate)} requests/s offered, {number(summary.sent_rate)} sent ({verdict}), {answered}"
    )


def _latencies(summary: Summary) -> str:
    served = summary.served
    gaps = "ITL" if summary.pieces >= served.output_tokens else "ITL (between pieces)"
    return table(
        ("milliseconds", "mean", "p50", "p90", "p95", "p99", "max"),
        [
            _row("TTFT", served.ttft),
            _row("TPOT", served.tpot),
            _row(gaps, served.itl),
            _row("E2E", served.e2e),
            _row("sent late by", summary.send_delay),
        ],
    )


def _row(name: str, values: Distribution) -> tuple[str, ...]:
    columns = (values.mean, values.p50, values.p90, values.p95, values.p99, values.maximum)
    return (name, *(number(None if value is None else 1000 * value, 1) for value in columns))


def _kinds(summary: Summary) -> list[str]:
    if not summary.kinds:
        return []
    head = ("class", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "E2E p50", "p95", "as promised")
    rows = []
    for name, kind in summary.kinds.items():
        pairs = [(values.p50, values.p95) for values in (kind.ttft, kind.tpot, kind.e2e)]
        cells = [number(None if value is None else 1000 * value, 1) for pair in pairs for value in pair]
        attained = "-" if kind.attainment is None else f"{kind.attainment:.1%}"
        rows.append((name, str(kind.requests), *cells, attained))
    return [table(head, rows)]


def _notes(summary: Summary) -> list[str]:
    notes = [f"warning: {warning}" for warning in summary.warnings]
    tokens = summary.served.output_tokens
    if summary.pieces and tokens > 1.05 * summary.pieces:
        notes.append(
            f"note: a piece of a stream brought {tokens / summary.pieces:.1f} tokens on average: ITL is the gap "
            "between pieces, TPOT counts tokens"
        )
    return ["\n".join(notes)] if notes else []


# ---- files ----


def to_json(manifest: Manifest, summary: Summary, records: Records) -> dict[str, Any]:
    """All of a run, without NaN: what does not exist is null."""
    return {
        "format": FORMAT,
        "manifest": asdict(manifest),
        "summary": asdict(summary),
        "samples": [asdict(sample) for sample in records.samples],
        "requests": [_call(call) for call in records.calls],
    }


def _call(call: Record) -> dict[str, Any]:
    values = {name: getattr(call, name) for name in Record.__slots__}
    return values | {"piece_times": [round(time, 6) for time in call.piece_times]}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """As a file."""
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A file that :func:`write` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["format"] == FORMAT and content["manifest"] and content["summary"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: not a run of hopon bench: {error}") from error
    if not known:
        raise ValueError(f"{path}: format {content['format']!r}, expected {FORMAT}")
    return dict(content)


# ---- two runs ----

COMPARED = (
    ("output tok/s", ("served", "output_tokens_per_second")),
    ("total tok/s", ("total_tokens_per_second",)),
    ("requests/s", ("answered_rate",)),
    ("goodput", ("served", "goodput")),
    *(
        (f"{name.upper()} {percent}", ("served", name, percent))
        for name in ("ttft", "tpot", "itl", "e2e")
        for percent in ("p50", "p95", "p99")
    ),
)
"""Figures of a comparison and where they are in a summary; names of latencies end in a percentile."""


def figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The compared figures of a summary as a dictionary; seconds and rates."""
    found = {}
    for name, path in COMPARED:
        value: Any = summary
        for key in path:
            value = value[key]
        found[name] = value
    return found


def compare(one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Two files side by side. Where their manifests differ, that comes first."""
    differing = differences(one["manifest"], other["manifest"])
    left, right = figures(one["summary"]), figures(other["summary"])
    rows = []
    for name in left:
        a, b = left[name], right[name]
        scale = 1000 if name[-3:] in ("p50", "p95", "p99") else 1
        cells = [number(None if value is None else scale * value, 2) for value in (a, b)]
        rows.append((name + (" ms" if scale == 1000 else ""), *cells, number(b / a, 3) if a and b is not None else "-"))
    parts = [table(("", *names, "ratio"), rows)]
    if differing:
        parts.insert(
            0, "\n".join(["THESE RUNS DIFFER in more than what was measured:", *(f"  {x}" for x in differing)])
        )
    return "\n\n".join(parts)


def spread(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], names: tuple[str, str]
) -> tuple[str, list[dict[str, Any]]]:
    """Windows of two servers in alternation: figures, ratio other/one (geometric mean), its least and greatest value.

    Args:
        pairs: summaries of both servers, window by window.
        names: of the two.
    """
    rows = []
    content: list[dict[str, Any]] = []
    for name, _ in COMPARED:
        found = [(a, b) for one, other in pairs if (a := figures(one)[name]) and (b := figures(other)[name])]
        if not found:
            continue
        ratios = [b / a for a, b in found]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        scale = 1000 if name[-3:] in ("p50", "p95", "p99") else 1
        middles = [scale * sum(side) / len(side) for side in zip(*found, strict=True)]
        sides = ("above" if min(ratios) > 1 else "below" if max(ratios) < 1 else "unclear") if len(ratios) > 1 else "-"
        label = name + (" ms" if scale == 1000 else "")
        cells = [*(number(middle, 2) for middle in middles), *(number(r, 3) for r in (mean, min(ratios), max(ratios)))]
        rows.append((label, *cells, sides))
        content.append({"figure": name, "ratios": ratios, "mean": mean})
    head = ("", *names, "ratio", "least", "greatest", "every window")
    return table(head, rows), content
