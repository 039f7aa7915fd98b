"""What ``hopon tune`` does: from what was asked for to trials, a table, a page and a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from hopon.bench.command import named
from hopon.bench.play import Watch, check
from hopon.bench.schedule import Writer
from hopon.bench.target import Target as ServerTarget
from hopon.capacity import tune_report
from hopon.capacity.command import FIRST_SHARE, first_rate, make_simulated
from hopon.capacity.knobs import KNOBS, Candidate, Value, doublings, ladder
from hopon.capacity.live import Live
from hopon.capacity.load import Load
from hopon.capacity.promise import Promise
from hopon.capacity.search import Window
from hopon.capacity.simulated import Simulated
from hopon.capacity.trials import Measure, Trials
from hopon.capacity.tune import (
    MEASURED,
    SIMULATED,
    Say,
    Step,
    compare,
    explore,
    goodput,
    raise_knob,
    ranked,
)
from hopon.sim.report import number, table
from hopon.workload.ask import Piece

SIMULATED_SECONDS = 30.0
SIMULATED_REQUESTS = 250
"""A simulated window lasts so long, or longer until it has so many requests."""

SIMULATED_SEEDS = (1000, 1001)
RAISED_AT = 0.9
"""Of the rate at which a crowd is served in the simulator: where a knob is raised when nobody says at which rate."""

Serve = Callable[[Candidate], AbstractContextManager[ServerTarget]]


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is tuned.

    Args:
        load: what is offered.
        promise: what was promised.
        cost: of the simulator: linear, distserve, roofline or fitted:FILE.
        model: for the roofline.
        hardware: for the roofline.
    """

    load: Load
    promise: Promise
    cost: str
    model: str
    hardware: str

    def simulated(self, candidate: Candidate) -> Simulated:
        """A candidate in the simulator.

        Raises:
            ValueError: settings that exclude each other, or an unknown policy; names them.
        """
        values = dict(candidate.values)
        settings = {
            "num_blocks" if name == "num_kv_blocks" else name: value
            for name, value in values.items()
            if name != "policy" and isinstance(value, int)
        }
        return make_simulated(
            load=self.load,
            promise=self.promise,
            policy=str(values.get("policy", "hopon")),
            knobs={},
            settings=settings,
            cost=self.cost,
            model=self.model,
            hardware_name=self.hardware,
            fast=True,
        )

    def measure(self, candidate: Candidate, rate: float, seed: int, seconds: float) -> Window:
        """A window in the simulator."""
        return self.simulated(candidate).measure(rate, seed, seconds)

    def values(self, candidate: Candidate) -> dict[str, Value]:
        """Of all knobs."""
        config = self.simulated(candidate).config
        numbers = {name: getattr(config, "num_blocks" if name == "num_kv_blocks" else name) for name in KNOBS[:-1]}
        return numbers | {"policy": dict(candidate.values).get("policy", "hopon")}


@dataclass(frozen=True, kw_only=True)
class Engines:
    """How candidates are served and loaded.

    Args:
        serve: a server with a candidate's flags, for a while.
        writer: makes prompts.
        runner: of the event loop that plays windows.
        watch: hears of progress.
    """

    serve: Serve
    writer: Writer
    runner: asyncio.Runner
    watch: Watch | None = None

    def measure(self, site: Site) -> Measure:
        """Windows on servers that are started for them, so that candidates share neither memory nor caches."""

        def window(candidate: Candidate, rate: float, seed: int, seconds: float) -> Window:
            with self.serve(candidate) as target:
                server = self.runner.run(named(target))
                self.runner.run(check(server, self.writer.prompt((Piece(-9, 16),)), count=2))
                live = Live(
                    target=server,
                    load=site.load,
                    promise=site.promise,
                    writer=self.writer,
                    runner=self.runner,
                    watch=self.watch,
                )
                return live.measure(rate, seed, seconds)

        return window


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How long and how often; see ``hopon tune --help``."""

    base: Candidate
    knobs: Mapping[str, Sequence[Value]]
    rate: float | None = None
    best: int = 3
    rounds: int = 3
    seconds: float = 20.0
    seed: int = 0
    html_file: Path | None = None

    @property
    def seeds(self) -> list[int]:
        """Of the rounds."""
        return [self.seed + place for place in range(self.rounds)]


def simulated_seconds(rate: float) -> float:
    """Length of a simulated window."""
    return max(SIMULATED_SECONDS, float(ceil(SIMULATED_REQUESTS / rate)))


def tune(
    site: Site, engines: Engines | None, wanted: Wanted, trials: Trials, about: Mapping[str, Any], say: Say
) -> str:
    """Simulate all candidates, measure the best few if there are engines, and say which flags to use.

    Raises:
        ValueError: names what is wrong and the limit.
        TargetError: the settings that one starts from cannot be served.
    """
    start = first_rate(site.simulated(wanted.base))
    now, asked = site.values(wanted.base), wanted.knobs
    ladders = {name: asked.get(name) or ladder(name, now[name]) for name in KNOBS if not asked or name in asked}
    limits = explore(trials, site.measure, wanted.base, now, ladders, start, simulated_seconds, SIMULATED_SEEDS, say)
    simulated = list(trials.of(SIMULATED))
    tuning = tune_report.Tuning(limits=limits, simulated=simulated)
    best = ranked(limits, wanted.best)
    if engines is not None and best:
        # Between what the first and the best are thought to carry the difference shows, however little it is.
        rate = wanted.rate or sqrt(max(limits[0].rate, best[0].rate / 4) * best[0].rate) or start
        rate = float(f"{rate:.3g}")
        say(f"on the engine: {1 + len(best)} candidates in turn at {rate:g} requests/s")
        candidates = [wanted.base, *(limit.candidate for limit in best)]
        measured = compare(trials, engines.measure(site), candidates, rate, wanted.seconds, wanted.seeds, say)
        tuning = tune_report.Tuning(limits=limits, simulated=simulated, measured=measured, rate=rate)
    if wanted.html_file is not None:
        wanted.html_file.write_text(tune_report.page(tuning, about), encoding="utf-8")
    return tune_report.text(tuning, about)


def walk(site: Site, engines: Engines | None, wanted: Wanted, name: str, trials: Trials, say: Say) -> str:
    """Raise a knob until the promise breaks.

    Raises:
        ValueError: a knob without an order or that is 0, or settings that cannot work.
        TargetError: the first value cannot be served.
    """
    now = site.values(wanted.base)[name]
    values = wanted.knobs.get(name) or (doublings(now) if isinstance(now, int) else ())
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) != len(values) or not numbers or numbers[0] < 1:
        raise ValueError(f"{name} cannot be raised from {now!r}: give its values, rising numbers from 1 on")
    if wanted.rate is not None:
        rate = wanted.rate
    else:
        crowd = first_rate(site.simulated(wanted.base)) / FIRST_SHARE
        say(f"no rate was given: {RAISED_AT:g} times the {crowd:.3g} requests/s that the simulator serves a crowd at")
        rate = float(f"{RAISED_AT * crowd:.3g}")
    say(f"at {rate:g} requests/s, promised: {site.promise.text}")
    kind, measure = (SIMULATED, site.measure) if engines is None else (MEASURED, engines.measure(site))
    steps, end = raise_knob(
        trials, kind, measure, wanted.base, name, numbers, rate, wanted.seconds, wanted.seeds, say
    )  # fmt: skip
    held = [step.value for step in steps if step.kept]
    last = f"highest value that keeps {site.promise.text}: {held[-1]}" if held else "no value keeps the promise"
    return f"{table(*_steps(name, steps))}\n\n{end}\n{last} ({kind}, at {rate:g} requests/s)"


def _steps(name: str, steps: Sequence[Step]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for step in steps:
        figures = step.window.figures
        milliseconds = (figures.get(key) for key in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "e2e_p95"))
        rows.append([
            str(step.value),
            "yes" if step.kept else "NO",
            f"{goodput(step.window):.3g}",
            *("-" if value is None else f"{1e3 * value:.0f}" for value in milliseconds),
            number(figures.get("output_tokens_per_second"), 0),
            number(figures.get("running"), 1),
            number(figures.get("waiting"), 1),
            number(figures.get("preemptions"), 0),
        ])  # fmt: skip
    head = ["kept", "goodput/s", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "E2E p95 ms", "tok/s", "running"]
    return [name, *head, "waiting", "preempted"], rows
