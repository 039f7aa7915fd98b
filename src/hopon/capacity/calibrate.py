"""A cost model from a run of a real server, and how well the simulator then predicts runs that it was not fitted to.

1. The server records its steps (``--step-records``) while it is loaded in many ways: one user, crowds of several sizes,
   open loops at low and at medium load. The cost model is fitted to those steps, and what it says of each run tells how
   much faster the machine is at some times than at others.
2. The simulator says where this deployment's capacity is, for a mix that was not part of the fit.
3. At shares of that capacity the same requests go to the server and through the simulator; every quantity is compared.

A machine is not as fast at all times: on a shared host the same step takes 47 ms in one minute and 55 in the next. So
runs to fit to lie between those that are compared, and the model that is judged is fitted to all of the former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hopon.bench.play import check, play
from hopon.bench.schedule import Writer, from_workload
from hopon.bench.target import Target
from hopon.capacity.load import Load
from hopon.capacity.promise import Promise, parse_promise
from hopon.capacity.search import Plan, search
from hopon.capacity.simulated import Simulated
from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset
from hopon.metrics import Heard, percentiles
from hopon.sim import calibrate as calibration
from hopon.sim.command import saved_model
from hopon.sim.report import number, table
from hopon.sim.run import simulate
from hopon.tracing import StepRecord, read_steps
from hopon.workload.ask import Workload
from hopon.workload.draw import Kind
from hopon.workload.lengths import Uniform

SHARES = (0.5, 0.8, 0.95, 1.2)
"""Of the capacity, at which predictions are compared."""

_CROWDS: tuple[tuple[int, Kind], ...] = (
    (1, Kind(inputs=Uniform(16, 256), outputs=Uniform(16, 48))),
    (2, Kind(inputs=Uniform(256, 1024), outputs=Uniform(64, 128))),
    (4, Kind(inputs=Uniform(16, 128), outputs=Uniform(16, 64))),
    (16, Kind(inputs=Uniform(16, 256), outputs=Uniform(8, 64))),
    (48, Kind(inputs=Uniform(16, 256), outputs=Uniform(32, 128))),
    (8, Kind(inputs=Uniform(256, 1024), outputs=Uniform(4, 32))),
    (12, Kind(inputs=Uniform(16, 64), outputs=Uniform(32, 160))),
    (32, Kind(inputs=Uniform(16, 48), outputs=Uniform(48, 160))),
)
"""Closed loops to fit to: requests at once, and their lengths. Short prompts leave steps that only decode."""

_OPEN = Kind(inputs=Uniform(16, 256), outputs=Uniform(16, 64))
_OPEN_SHARES = (0.25, 0.6)
"""Open loops to fit to, as shares of what a crowd is answered at: steps behind a pause, small batches that change."""

WAYS = len(_CROWDS) + 1 + len(_OPEN_SHARES)
"""Of loading a server, the crowd of the open loops' kind included."""

Say = Callable[[str], None]

_Run = tuple[dict[str, float | None], Sequence[StepRecord], float | None]
"""What a client saw, the steps, and preemptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One quantity at one load: measured (by each repeat) and predicted."""

    name: str
    measured: tuple[float | None, ...]
    predicted: float | None

    @property
    def error(self) -> float | None:
        """Of the prediction against the median of the repeats, as a signed share."""
        known = [value for value in self.measured if value is not None]
        middle = median(known) if known else None
        return self.predicted / middle - 1 if middle and self.predicted is not None else None

    @property
    def spread(self) -> float:
        """Of the repeats around their median, as a share: what the engine disagrees with itself by."""
        known = [value for value in self.measured if value is not None]
        middle = median(known) if known else 0.0
        return max((abs(value / middle - 1) for value in known), default=0.0) if middle else 0.0

    def cells(self) -> list[str]:
        """Name, measured, spread, predicted, error, and whether that is within a tenth or the spread; - for none."""
        known = [value for value in self.measured if value is not None]
        error = self.error
        within = "-" if error is None else "yes" if abs(error) <= max(0.1, self.spread) else "NO"
        return [
            self.name,
            number(median(known), 2) if known else "-",
            f"{self.spread:.1%}" if len(known) > 1 else "-",
            number(self.predicted, 2),
            "-" if error is None else f"{error:+.1%}",
            within,
        ]


class Fitting:
    """Loads a server in ways that cover what steps can be, one after the other, and fits a cost model to all of them.

    Args:
        writer: makes the prompts.
        runner: runs what is asynchronous.
        seconds: of each run.
        say: hears of progress.
    """

    def __init__(self, writer: Writer, runner: asyncio.Runner, seconds: float, say: Say) -> None:
        self._writer, self._runner, self._seconds, self._say = writer, runner, seconds, say
        self._runs: list[tuple[int, list[StepRecord]]] = []
        self._seed = self._next = 0
        self._full = 0.0

    def some(self, server: Target, path: Path, count: int = WAYS) -> None:
        """The next ``count`` ways; the server's steps go to ``path``."""
        for _ in range(count):
            before = len(read_steps(path))
            way, self._next = self._next, (self._next + 1) % WAYS
            if way < len(_CROWDS):
                self._crowd(server, *_CROWDS[way])
            elif way == len(_CROWDS):
                self._full = self._crowd(server, 16, _OPEN)
            else:
                rate = _OPEN_SHARES[way - len(_CROWDS) - 1] * max(self._full, 1 / self._seconds)
                self._say(f"to fit to: {rate:.3g} requests/s, {self._seconds:g} s")
                self._load(server, Load(kinds=(_OPEN,)).draw(rate, self._seconds, self._seed), None)
            self._runs.append((way, calibration.with_gaps(read_steps(path)[before:])))

    def fit(self, path: Path) -> tuple[calibration.Calibration, calibration.Saved]:
        """To all that was run so far; ``path`` says which machine it was."""
        found = calibration.calibrate([record for _, records in self._runs for record in records])
        return found, replace(saved_model(found.cost, path), paces=calibration.paces(self._runs, found.cost))

    def _crowd(self, server: Target, concurrency: int, kind: Kind) -> float:
        self._say(f"to fit to: {concurrency} at once, {self._seconds:g} s")
        work = Load(kinds=(kind,)).crowd(max(100, 40 * concurrency), self._seed)
        return self._load(server, work, concurrency)

    def _load(self, server: Target, workload: Workload, concurrency: int | None) -> float:
        """Requests that were answered per second."""
        self._seed += 1
        fresh = replace(self._writer, salt=f"fit {self._seed}")
        schedule = from_workload(workload, fresh, concurrency=concurrency, limit=self._seconds)
        return sum(call.completed for call in self._runner.run(play(server, schedule)).calls) / self._seconds


def warm_up(server: Target, writer: Writer, runner: asyncio.Runner) -> None:
    """A few requests that nobody measures."""
    runner.run(check(server, writer.prompt(tuple(Load(kinds=(_OPEN,)).crowd(1, 7).asks[0].pieces())), count=3))


def simulated(
    saved: calibration.Saved, load: Load, promise: Promise, policy: str, knobs: Mapping[str, str]
) -> Simulated:
    """The deployment that was measured, in the simulator."""
    return Simulated(
        load=load,
        promise=promise,
        config=SchedulerConfig(**saved.settings),
        policy=make_preset(policy, knobs).policy,
        cost=saved.cost,
        overhead=saved.overhead,
        paces=saved.paces,
    )


class Comparison:
    """Predictions for one load beside what a server does with it.

    Args:
        writer: makes the prompts; of several comparisons on one server each needs a salt of its own, or the prefix
            cache knows prompts of one from another.
        runner: runs what is asynchronous.
        load: what is asked.
        policy: of the server.
        knobs: of the policy.
        slo: whose capacity the loads are shares of.
        seconds: length of a run.
        say: hears of progress.
    """

    def __init__(
        self,
        writer: Writer,
        runner: asyncio.Runner,
        load: Load,
        *,
        policy: str,
        knobs: Mapping[str, str],
        slo: str,
        seconds: float,
        say: Say,
    ) -> None:
        self._writer, self._runner, self._load, self._say = writer, runner, load, say
        self._policy, self._knobs, self._promise = policy, knobs, parse_promise(slo)
        self._slo, self._seconds = slo, seconds
        self._works: list[Workload] = []
        self._runs: list[list[_Run]] = [[] for _ in SHARES]

    def prepare(self, server: Target, path: Path, saved: calibration.Saved) -> None:
        """Measure what lies between a client and the engine, and choose the rates."""
        overhead = _overhead(server, self._writer, self._runner, path, saved, self._load, self._policy, self._knobs)
        self._say(f"a client's first token comes {1e3 * overhead:.1f} ms after the engine's")
        self._saved = replace(saved, overhead=overhead)
        answer = search(self._target(self._saved), Plan(start=1.0, seconds=60.0, max_windows=20, confirm=0.0))
        if answer.estimate is None:
            raise ValueError(f"no capacity to compare at: {answer.note}")
        rate = answer.estimate.rate
        self._say(f"predicted capacity for {self._slo}: {rate:.3g} requests/s")
        draws = enumerate(SHARES)
        self._works = [self._load.draw(share * rate, self._seconds, 100 + place) for place, share in draws]

    def repeat(self, server: Target, path: Path, between: Callable[[], None] = lambda: None) -> None:
        """Every load once, and ``between`` after each."""
        for place, (share, work) in enumerate(zip(SHARES, self._works, strict=True)):
            number = len(self._runs[place])
            self._say(f"at {share:.0%} of it, {len(work)} requests, run {number + 1}")
            before = len(read_steps(path))
            schedule = from_workload(work, replace(self._writer, salt=f"{self._writer.salt} held {place} {number}"))
            records = self._runner.run(play(server, schedule))
            steps = read_steps(path)[before:]
            self._runs[place].append((compared(records.calls), steps, _preempted(records.samples)))
            between()

    def table(self, fitted: calibration.Saved) -> tuple[calibration.Saved, str]:
        """How well a cost model predicts all that was measured."""
        saved = replace(self._saved, cost=fitted.cost, paces=fitted.paces)
        target = self._target(saved)
        lines = [
            line
            for share, work, found in zip(SHARES, self._works, self._runs, strict=True)
            for line in _rows(share, work, target, saved, found)
        ]
        head = ["load", "quantity", "measured", "spread", "predicted", "error", "within"]
        missed = sum(line[-1] == "NO" for line in lines)
        known = sum(line[-1] != "-" for line in lines)
        within = f"within 10 %, or within the spread of {len(self._runs[0])} repeats"
        return saved, f"{table(head, lines)}\n{known - missed} of {known} predictions are {within}"

    def _target(self, saved: calibration.Saved) -> Simulated:
        return simulated(saved, self._load, self._promise, self._policy, self._knobs)


def _rows(
    share: float,
    work: Workload,
    target: Simulated,
    saved: calibration.Saved,
    runs: Sequence[_Run],
) -> list[list[str]]:
    result = simulate(work, target.config, target.policy, target.cost)
    records = [replace(record, arrival=record.arrival - saved.overhead) for record in result.records]
    predicted = compared(records)
    rows = [
        Row(name=name, measured=tuple(run[0][name] for run in runs), predicted=predicted[name]) for name in predicted
    ]
    steps = [calibration.with_gaps([r for r in run[1] if r.features.computes]) for run in runs]
    steps = [run for run in steps if run]
    if steps:
        measured = tuple(1e3 * fmean(record.seconds for record in run) for run in steps)
        modelled = median(1e3 * fmean(saved.cost.seconds(record.features) for record in run) for run in steps)
        rows.insert(0, Row(name="step ms", measured=measured, predicted=modelled))
    rows.append(Row(name="preemptions", measured=tuple(run[2] for run in runs), predicted=result.totals.preemptions))
    return [[f"{share:.0%}", *row.cells()] for row in rows]


def compared(records: Sequence[Heard]) -> dict[str, float | None]:
    """What is compared, in milliseconds and tokens per second."""
    done = [record for record in records if record.completed]
    found: dict[str, float | None] = {}
    gaps = [gap for record in done for gap in record.gaps]
    for name, values in (
        ("TTFT", [record.ttft for record in done if record.ttft is not None]),
        ("ITL", gaps),
        ("E2E", [record.e2e for record in done if record.e2e is not None]),
    ):
        for percent, value in zip((50, 95), percentiles(values, (50.0, 95.0)), strict=True):
            found[f"{name} p{percent}"] = None if value is None else 1e3 * value
    ends = [record.ended for record in done if record.ended is not None]
    found["tokens/s"] = sum(record.output_tokens for record in done) / max(ends) if ends else None
    return found


def _preempted(samples: Sequence[Any]) -> float | None:
    values = [sample.preemptions for sample in samples if sample.preemptions is not None]
    return values[-1] - values[0] if values else None


def _overhead(
    server: Target,
    writer: Writer,
    runner: asyncio.Runner,
    path: Path,
    saved: calibration.Saved,
    load: Load,
    policy: str,
    knobs: Mapping[str, str],
) -> float:
    """What a first token takes besides the engine: median over a few requests that meet nobody.

    Where the model is wrong about the steps of their prompts, that is not to be made up for here, with every request of
    every load: what those steps took longer than it says is left out.
    """
    asks = [
        replace(ask, arrival=1.0 * i, input_tokens=max(ask.input_tokens, 2), output_tokens=8, max_tokens=8)
        for i, ask in enumerate(load.crowd(9, 3))
    ]
    alone = Workload(name="alone", asks=tuple(asks))
    before = len(read_steps(path))
    records = runner.run(
        play(server, from_workload(alone, replace(writer, salt=f"{writer.salt} alone"), concurrency=1))
    )
    steps = calibration.with_gaps(read_steps(path)[before:])
    errors = [
        sum(step.seconds - saved.cost.seconds(step.features) for step in prompt)
        for is_prompt, prompt in groupby(steps, key=lambda step: step.features.num_prefills > 0)
        if is_prompt
    ]
    if len(errors) != len(records.calls):
        raise ValueError(f"{len(records.calls)} requests, one after the other, had {len(errors)} prompts computed")
    result = simulate(alone, SchedulerConfig(**saved.settings), make_preset(policy, knobs).policy, saved.cost)
    triples = zip(records.calls, result.records, errors, strict=True)
    return max(
        0.0, median(a.ttft - b.ttft - late for a, b, late in triples if a.ttft is not None and b.ttft is not None)
    )
