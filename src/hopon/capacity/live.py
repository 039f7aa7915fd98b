"""A server as a target: the load generator plays a window to it, and its own metrics are read beside."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from hopon.bench.play import Watch, play
from hopon.bench.records import Sample
from hopon.bench.sampling import read_sample
from hopon.bench.schedule import Writer, from_workload
from hopon.bench.target import Client, Target, TargetError
from hopon.capacity.load import Load
from hopon.capacity.promise import Promise
from hopon.capacity.search import Window
from hopon.capacity.window import WARM_UP, fold

SETTLE = 30.0
"""Seconds within which a server must be idle again after a window."""

DRAIN = 10.0
"""Seconds beyond the longest limit that open requests are waited for when no more are sent."""


@dataclass(kw_only=True)
class Live:
    """A server.

    Args:
        target: how to ask it.
        load: what is offered.
        promise: what was promised.
        writer: how prompts are made; every window gets a salt of its own, so that a prefix cache helps only within it.
        runner: of the event loop that plays windows.
        watch: hears of progress.
    """

    target: Target
    load: Load
    promise: Promise
    writer: Writer
    runner: asyncio.Runner
    watch: Watch | None = None

    def measure(self, rate: float, seed: int, seconds: float) -> Window:
        """One window, from an idle server to an idle server.

        Raises:
            TargetError: the server does not become idle.
        """
        return self.runner.run(self._measure(rate, seed, seconds))

    def saturated_rate(self, concurrency: int, seconds: float, seed: int) -> float:
        """Requests per second that are answered while so many are open all the time: about the most it can do.

        Raises:
            TargetError: it answers none.
        """
        return self.runner.run(self._saturated_rate(concurrency, seconds, seed))

    async def _measure(self, rate: float, seed: int, seconds: float) -> Window:
        schedule = from_workload(
            self.load.draw(rate, seconds, seed),
            replace(self.writer, salt=f"{seed} {secrets.token_hex(8)}"),
            limit=seconds + self.promise.patience + DRAIN,
        )
        began = asyncio.get_running_loop().time()
        records = await play(self.target, schedule, watch=self.watch)
        await self._settle()
        took = asyncio.get_running_loop().time() - began
        refused = sum(bool(call.error) for call in records.uncut)
        figures = server_figures(records.samples, seconds) | {"failed": refused, "late": max(records.lags, default=0.0)}
        window = fold(
            records.calls,
            self.promise,
            rate=rate,
            seed=seed,
            seconds=seconds,
            recomputed=figures.pop("recomputed", 0.0),
            figures=figures,
        )
        return replace(window, took=took)

    async def _saturated_rate(self, concurrency: int, seconds: float, seed: int) -> float:
        workload = self.load.crowd(max(200, 40 * concurrency), seed)
        writer = replace(self.writer, salt=f"{seed} {secrets.token_hex(8)}")
        schedule = from_workload(workload, writer, concurrency=concurrency, limit=seconds)
        records = await play(self.target, schedule, watch=self.watch)
        await self._settle()
        done = [call for call in records.calls if call.completed]
        if not done:
            first = next((call.message or call.error for call in records.uncut), f"no end within {seconds:g} s")
            raise TargetError(f"{self.target.base} answered no request: {first}")
        return len(done) / max(seconds, 1e-9)

    async def _settle(self) -> None:
        """Wait until nothing runs and nothing waits, where the server tells."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE
        client = Client(self.target, 0.0)
        try:
            while (page := await client.get("/metrics")) is not None:
                sample = read_sample(page, 0.0)
                if sample.running is None or not (sample.running or sample.waiting):
                    return
                if loop.time() > end:
                    raise TargetError(f"{self.target.base} is still busy {SETTLE:g} s after the last request was sent")
                await asyncio.sleep(0.2)
        finally:
            client.close()


def server_figures(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """The server's own numbers while requests were sent, the warm-up left out."""
    counted = [sample for sample in samples if WARM_UP * seconds <= sample.time <= seconds]
    found: dict[str, Any] = {}
    for name in ("running", "waiting", "kv_usage"):
        values = [value for sample in counted if (value := getattr(sample, name)) is not None]
        if values:
            found[name] = fmean(values)
            found[f"{name}_peak"] = max(values)
    if "kv_usage_peak" in found:
        found["kv_peak"] = found.pop("kv_usage_peak")
    for name in ("preemptions", "recomputed_tokens", "computed_tokens"):
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if values:
            found[name] = values[-1] - values[0]
    if found.get("computed_tokens"):
        useful = found["computed_tokens"] - found.get("recomputed_tokens", 0.0)
        found["recomputed"] = found.get("recomputed_tokens", 0.0) / useful if useful > 0 else 0.0
    return found
