"""Predictions of the simulator beside what a server does with the same requests.

1. The simulator says where a deployment's capacity is, for a mix that its cost model was not fitted to.
2. At shares of that capacity the same requests go to the server, several times, and through the simulator. Every
   quantity is compared, and the capacity that all those runs tell.

A machine is not as fast at all times: on a shared host the same step takes 47 ms in one minute and 55 in the next. So
runs to fit to should lie between those that are compared, and the model that is judged be fitted to all of the former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean, median

from hopon.bench.play import play
from hopon.bench.schedule import Writer, from_workload
from hopon.bench.target import Target
from hopon.capacity.calibrate import Say
from hopon.capacity.live import server_figures
from hopon.capacity.load import Load
from hopon.capacity.promise import Promise, parse_promise
from hopon.capacity.search import Plan, Window, breaks_first, search
from hopon.capacity.simulated import Simulated
from hopon.capacity.window import fold
from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset
from hopon.metrics import Heard, percentiles
from hopon.sim import calibrate as calibration
from hopon.sim.report import number, table
from hopon.sim.run import simulate
from hopon.tracing import StepRecord, read_steps
from hopon.workload.ask import Workload

SHARES = (0.5, 0.8, 0.95, 1.2)
"""Of the capacity, at which predictions are compared."""

_SEED = 100
"""Of the first load's requests; they are the same in every repeat and in the simulator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a client saw (as :func:`compared` has it, and as a window), the steps, and preemptions."""

    figures: dict[str, float | None]
    window: Window
    steps: Sequence[StepRecord]
    preemptions: float | None


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
        """Of three repeats around their median, as a share: what the engine disagrees with itself by.

        With more than three it is the mean over all threes, which does not grow with their number, but is known better.
        """
        known = [value for value in self.measured if value is not None]
        threes = list(combinations(known, min(3, len(known)))) if known and median(known) else []
        return fmean(max(abs(v - median(three)) for v in three) for three in threes) / median(known) if threes else 0.0

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
        self._rates: list[float] = []
        self._works: list[Workload] = []
        self._runs: list[list[Run]] = [[] for _ in SHARES]

    def prepare(self, server: Target, path: Path, saved: calibration.Saved) -> None:
        """Measure what lies between a client and the engine, and choose the rates."""
        overhead = _overhead(server, self._writer, self._runner, path, saved, self._load, self._policy, self._knobs)
        self._say(f"a client's first token comes {1e3 * overhead:.1f} ms after the engine's")
        self._saved = replace(saved, overhead=overhead)
        answer = search(self._target(self._saved), Plan(start=1.0, seconds=60.0, confirm=0.0))
        if answer.estimate is None:
            raise ValueError(f"no capacity to compare at: {answer.note}")
        rate = answer.estimate.rate
        self._say(f"predicted capacity for {self._slo}: {rate:.3g} requests/s")
        self._rates = [share * rate for share in SHARES]
        self._works = [self._load.draw(rate, self._seconds, seed) for seed, rate in enumerate(self._rates, _SEED)]

    def repeat(self, server: Target, path: Path, between: Callable[[], None] = lambda: None) -> None:
        """Every load once, and ``between`` after each."""
        for place, (share, work) in enumerate(zip(SHARES, self._works, strict=True)):
            number = len(self._runs[place])
            self._say(f"at {share:.0%} of it, {len(work)} requests, run {number + 1}")
            before = len(read_steps(path))
            schedule = from_workload(work, replace(self._writer, salt=f"{self._writer.salt} held {place} {number}"))
            records = self._runner.run(play(server, schedule))
            figures = server_figures(records.samples, self._seconds)
            window = fold(
                records.calls,
                self._promise,
                rate=self._rates[place],
                seed=_SEED + place,
                seconds=self._seconds,
                recomputed=figures.get("recomputed", 0.0),
            )
            run = Run(
                figures=compared(records.calls),
                window=window,
                steps=read_steps(path)[before:],
                preemptions=figures.get("preemptions"),
            )
            self._runs[place].append(run)
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
        lines.append(["all", *self._capacity(target).cells()])
        head = ["load", "quantity", "measured", "spread", "predicted", "error", "within"]
        missed = sum(line[-1] == "NO" for line in lines)
        known = sum(line[-1] != "-" for line in lines)
        within = "within 10 %, or within the spread of three repeats"
        return saved, f"{table(head, lines)}\n{known - missed} of {known} predictions are {within}"

    def _capacity(self, target: Simulated) -> Row:
        """As the windows of all loads tell it, measured and simulated; the latter in each of the machine's paces."""
        _, measured = breaks_first([run.window for runs in self._runs for run in runs])
        _, predicted = breaks_first(
            [
                replace(target, paces=(pace,)).measure(rate, seed, self._seconds)
                for pace in target.paces or (1.0,)
                for seed, rate in enumerate(self._rates, _SEED)
            ]
        )
        ends = (measured.low, measured.rate, measured.high) if measured else ()
        return Row(name="capacity /s", measured=ends, predicted=predicted.rate if predicted else None)

    def _target(self, saved: calibration.Saved) -> Simulated:
        return simulated(saved, self._load, self._promise, self._policy, self._knobs)


def _rows(
    share: float,
    work: Workload,
    target: Simulated,
    saved: calibration.Saved,
    runs: Sequence[Run],
) -> list[list[str]]:
    result = simulate(work, target.config, target.policy, target.cost)
    records = [replace(record, arrival=record.arrival - saved.overhead) for record in result.records]
    predicted = compared(records)
    rows = [
        Row(name=name, measured=tuple(run.figures[name] for run in runs), predicted=predicted[name])
        for name in predicted
    ]
    steps = [calibration.with_gaps([r for r in run.steps if r.features.computes]) for run in runs]
    steps = [run for run in steps if run]
    if steps:
        measured = tuple(1e3 * fmean(record.seconds for record in run) for run in steps)
        modelled = median(1e3 * fmean(saved.cost.seconds(record.features) for record in run) for run in steps)
        rows.insert(0, Row(name="step ms", measured=measured, predicted=modelled))
    rows.append(
        Row(name="preemptions", measured=tuple(run.preemptions for run in runs), predicted=result.totals.preemptions)
    )
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
