"""What a simulation found: a watcher that counts, and its totals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from hopon.core.plan import StepPlan
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, Request
from hopon.metrics import Limits, Recorder, RequestRecord, Summary, summarise
from hopon.tracing import StepFeatures


@dataclass(slots=True, kw_only=True)
class Totals:
    """What all passes of all replicas did.

    A *slot-step* is one row of one pass. It is *useful* when it yields a token or computes prompt tokens for the first
    time, *resident* when its sequence holds a seat, whether it computes or not; padding rows of a pass without prefill
    are resident, too. KV memory is in tokens, averaged over the time in which passes run: *reserved* by blocks,
    *used* by computed tokens (shared ones count for each sequence, so prefix sharing may lift it above what is
    reserved), *wasted* the difference where positive.
    """

    passes: int = 0
    busy_seconds: float = 0.0
    computed_slot_steps: int = 0
    useful_slot_steps: int = 0
    resident_slot_steps: int = 0
    seat_steps: int = 0
    scheduled_tokens: int = 0
    prefill_tokens: int = 0
    padding_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    moved_blocks: int = 0
    moved_bytes: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    kv_reserved: float = 0.0
    kv_used: float = 0.0
    kv_wasted: float = 0.0
    kv_peak: int = 0

    @property
    def utilisation(self) -> float | None:
        """Useful slot-steps of all seats in all passes."""
        return self.useful_slot_steps / self.seat_steps if self.seat_steps else None

    @property
    def mean_batch(self) -> float | None:
        """Rows that compute, per pass."""
        return self.computed_slot_steps / self.passes if self.passes else None


class Metered(Protocol):
    """What a meter reads of an engine, simulated or real."""

    @property
    def scheduler(self) -> Scheduler:
        """Its counters and its pool, as they are when a step was planned and not yet committed."""

    @property
    def index(self) -> int:
        """Which of the replicas it is."""


class Meter:
    """Counts while a simulation, or a real engine, runs. A request's seed is its number.

    Args:
        block_bytes: of one block, for what is moved; 0 where that is not known.
        keep_plans: remember every plan (for comparisons; it takes memory).
    """

    def __init__(self, *, block_bytes: float = 0.0, keep_plans: bool = False) -> None:
        self.recorder = Recorder()
        self.totals = Totals()
        self.plans: list[tuple[int, float, StepPlan]] = []
        self._block_bytes = block_bytes
        self._keep_plans = keep_plans
        self._rows: dict[tuple[int, int], int] = {}  # (replica, row) -> request number, of rows with prompts to compute
        self._peaks: dict[int, int] = {}  # tokens that a request has computed before

    def sent(self, replica: Metered, request: Request) -> None:
        """A request is on its way."""
        self.recorder.expect(request, replica.index)

    def heard(self, replica: Metered, news: Sequence[Delta]) -> None:
        """News was told."""
        self.recorder.hear(news)

    def leapt(self, replica: Metered, names: Sequence[str], start: float, times: Sequence[float]) -> None:
        """Count merged decode steps."""
        totals, count, batch = self.totals, len(times), len(names)
        self.recorder.repeat(names, times)
        totals.passes += count
        totals.busy_seconds += times[-1] - start
        totals.computed_slot_steps += count * batch
        totals.resident_slot_steps += count * batch
        totals.useful_slot_steps += count * batch
        totals.seat_steps += count * replica.scheduler.config.max_num_seqs
        self._sample(replica, times[-1] - start)

    def stepped(self, replica: Metered, plan: StepPlan, step: StepFeatures, start: float, seconds: float) -> None:
        """Count a step."""
        totals = self.totals
        if self._keep_plans:
            self.plans.append((replica.index, start, plan))
        for opened in plan.opened:
            number = opened.seed
            self._rows[replica.index, opened.row] = number
            if opened.output:
                known = len(opened.prompt) + len(opened.output) - 1
                self._peaks[number] = max(known, self._peaks.get(number, 0))
        if not step.computes:
            return
        scheduler = replica.scheduler
        chunks = plan.chunks
        totals.passes += 1
        totals.busy_seconds += seconds
        totals.computed_slot_steps += step.num_seqs
        totals.resident_slot_steps += scheduler.num_running + (0 if step.num_prefills else step.padding)
        totals.seat_steps += scheduler.config.max_num_seqs
        totals.prefill_tokens += step.prefill_tokens
        totals.useful_slot_steps += step.num_logits
        if step.num_logits != len(chunks):
            for chunk in chunks:
                if not chunk.sample:
                    totals.useful_slot_steps += self._is_new(replica.index, chunk.row, chunk.start + chunk.count)
        self._sample(replica, seconds)

    def _sample(self, replica: Metered, seconds: float) -> None:
        """KV memory, as it is while a step runs."""
        totals, scheduler = self.totals, replica.scheduler
        pool = scheduler.pool
        reserved = pool.num_used * pool.block_size
        used = scheduler.num_stored_tokens
        totals.kv_reserved += reserved * seconds
        totals.kv_used += used * seconds
        totals.kv_wasted += max(0, reserved - used) * seconds
        totals.kv_peak = max(totals.kv_peak, reserved)

    def _is_new(self, replica: int, row: int, end: int) -> bool:
        number = self._rows[replica, row]
        if end <= self._peaks.get(number, 0):
            return False
        self._peaks[number] = end
        return True

    def close(self, replicas: Sequence[Metered]) -> None:
        """Take over the schedulers' own counters, and turn sums over time into means."""
        totals = self.totals
        for replica in replicas:
            counters = replica.scheduler.counters
            totals.scheduled_tokens += counters.num_scheduled_tokens
            totals.padding_tokens += counters.num_padding_tokens
            totals.output_tokens += counters.num_generated_tokens
            totals.preemptions += counters.num_preemptions
            totals.recomputed_tokens += counters.num_recomputed_tokens
            totals.moved_blocks += counters.num_moved_blocks
            totals.prefix_cache_queries += counters.prefix_cache_queries
            totals.prefix_cache_hits += counters.prefix_cache_hits
        totals.moved_bytes = totals.moved_blocks * self._block_bytes
        if totals.busy_seconds:
            totals.kv_reserved /= totals.busy_seconds
            totals.kv_used /= totals.busy_seconds
            totals.kv_wasted /= totals.busy_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished simulation.

    Args:
        about: what was simulated: policy, knobs, workload, cost, settings, seed.
        totals: what the passes did.
        records: what became of each request, in order of their numbers.
        summary: what clients saw.
    """

    about: Mapping[str, Any]
    totals: Totals
    records: tuple[RequestRecord, ...]
    summary: Summary

    @classmethod
    def of(cls, about: Mapping[str, Any], meter: Meter, limits: Limits | None) -> Result:
        """From a meter that was closed."""
        records = sorted(meter.recorder.records(), key=lambda record: (record.arrival, int(record.request_id)))
        return cls(about=about, totals=meter.totals, records=tuple(records), summary=summarise(records, limits))

    def content(self) -> dict[str, Any]:
        """All of it as plain values."""
        totals = asdict(self.totals) | {"utilisation": self.totals.utilisation, "mean_batch": self.totals.mean_batch}
        return {
            "about": dict(self.about),
            "totals": totals,
            "summary": asdict(self.summary),
            "requests": [_row(record) for record in self.records],
        }

    def to_json(self) -> str:
        """All of it; the same simulation gives the same bytes."""
        return json.dumps(self.content(), indent=1, allow_nan=False) + "\n"


_COLUMNS = ("waiting", "prefill", "ttft", "tpot", "e2e", "first_token", "last_token", "output_tokens", "completed")


def _row(record: RequestRecord) -> dict[str, Any]:
    row = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "token_times"}
    row |= {name: getattr(record, name) for name in _COLUMNS}
    return row | {"max_gap": max(record.gaps, default=None)}
