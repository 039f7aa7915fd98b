"""From records to numbers: percentiles, the share of the machine that others used, whether a run counts.

Definitions: TTFT is from sending a request to its first piece of text. ITL is every gap between consecutive pieces of
one request, pooled over the requests. Output tok/s is output tokens divided by the whole time of the run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import psutil

from benchmarks.client import ARRIVAL, Played
from benchmarks.workloads import Crowd, Workload


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between the closest ranks; None for no values. ``share`` in [0, 1]."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run's numbers; times in seconds. ``void`` says why it does not count, or is empty.

    ``fraction`` is the share of the machine's ceiling (see ``benchmarks.bound``), None where there is none to compare
    with. In W5, TTFT is that of the long prompts, ITL and output tokens are those of the streams.
    """

    workload: str
    server: str
    seconds: float
    num_requests: int
    num_errors: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    pieces: int
    output_per_second: float
    prompt_per_second: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    itl_max: float | None
    foreign_share: float | None
    void: str
    fraction: float | None = None


def summarise(workload: Workload, server: str, played: Played, foreign_share: float | None) -> Run:
    """The numbers of one run, and whether it counts."""
    good = [record for record in played.records if not record.error]
    shown = good if isinstance(workload, Crowd) else [record for record in good if record.kind != ARRIVAL]
    waited = good if isinstance(workload, Crowd) else [record for record in good if record.kind == ARRIVAL]
    ttft = [record.ttft for record in waited if record.ttft is not None]
    gaps = [gap for record in shown for gap in record.gaps]
    output = sum(record.output_tokens for record in shown)
    prompt = sum(record.input_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    return Run(
        workload=workload.name,
        server=server,
        seconds=played.seconds,
        num_requests=len(played.records),
        num_errors=len(played.records) - len(good),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        pieces=sum(len(record.piece_times) for record in shown),
        output_per_second=output / played.seconds,
        prompt_per_second=prompt / played.seconds,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p95=percentile(ttft, 0.95),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        itl_p99=percentile(gaps, 0.99),
        itl_max=max(gaps, default=None),
        foreign_share=foreign_share,
        void=_why_void(workload, played, cached),
    )


def _why_void(workload: Workload, played: Played, cached: int) -> str:
    errors = [f"{record.error} {record.message}".strip() for record in played.records if record.error]
    if errors:
        return f"{len(errors)} of {len(played.records)} requests failed, the first with: {errors[0]}"
    if not workload.reuses_prefixes:
        return f"{cached} prompt tokens came from a prefix cache: switch it off for this workload" if cached else ""
    assert isinstance(workload, Crowd), "only a crowd reuses prefixes"
    columns = zip(*(ask.ids for ask in workload.asks), strict=False)
    shared = len(workload.asks) * sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    if cached == 0:
        return "no prompt token came from a prefix cache: switch it on for this workload"
    if cached > shared:
        return f"{cached} prompt tokens came from a prefix cache but only {shared} are shared: it knew an earlier run"
    return ""


class ForeignCpu:
    """How much of the machine was used by others than the given process trees and this process, since it was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = (*pids, os.getpid())
        self._before = self._read()

    def share(self) -> float:
        """Processor seconds of others, as a share of all processor seconds that went by."""
        total, busy, own = (now - then for now, then in zip(self._read(), self._before, strict=True))
        return max(0.0, busy - own) / total if total > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # are part of user, nice
        busy = total - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0)
        return total, busy, _cpu_seconds(self._pids)


def wait_until_idle(share: float = 0.15, patience: float = 12.0) -> None:
    """Wait until the machine was nearly idle for a second, but not longer than ``patience`` seconds."""
    end = time.monotonic() + patience
    while psutil.cpu_percent(1.0) > share * 100 and time.monotonic() < end:
        pass


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Of the processes and their descendants, each once: a server may be a child of this process."""
    processes = set(map(psutil.Process, pids))
    processes |= {child for process in processes for child in process.children(recursive=True)}
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def median(runs: Sequence[Run]) -> Run:
    """Field by field over the runs that count, or over all when none does; it is void if all are."""
    counted = [run for run in runs if not run.void] or list(runs)

    def middle(name: str) -> float | None:
        values = [value for run in counted if (value := getattr(run, name)) is not None]
        return statistics.median(values) if values else None

    first = counted[0]
    numbers = {name: middle(name) for name, value in _fields(first) if not isinstance(value, str)}
    return Run(workload=first.workload, server=first.server, void=first.void, **numbers)  # type: ignore[arg-type]


def _fields(run: Run) -> list[tuple[str, object]]:
    return [(name, getattr(run, name)) for name in Run.__dataclass_fields__]
