"""What ``hopon capacity`` does: from what was asked for to a search, a table, a page and a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from hopon.bench.command import fit_words, named
from hopon.bench.play import Watch, check
from hopon.bench.schedule import Writer
from hopon.bench.target import Target as ServerTarget
from hopon.capacity import files, report
from hopon.capacity.cause import find_cause
from hopon.capacity.estimate import Estimate
from hopon.capacity.live import Live
from hopon.capacity.load import Load
from hopon.capacity.promise import Promise
from hopon.capacity.search import Plan, Target, Window, search
from hopon.capacity.simulated import Simulated
from hopon.capacity.window import WARM_UP
from hopon.core.policy.presets import make_preset
from hopon.sim.command import make_config, make_machine
from hopon.sim.hardware import hardware
from hopon.workload.ask import Piece

Say = Callable[[str], None]

FIRST_CONCURRENCY = 16
FIRST_SECONDS = 8.0
FIRST_SHARE = 0.6
"""Of the rate of a closed loop: where the search begins when nobody says better."""


COUNTED = 100
"""Requests that a window should count, beside those of its warm-up."""

SHORTEST, LONGEST = 10.0, 40.0
"""Seconds of a window whose length nobody chose: a dozen of them are to end within ten minutes."""

PREDICTED_SECONDS = 60.0
"""Length of a simulated window of a prediction."""

GUESSED_STEP = 1.3
"""Factor between rates of the bracket around a prediction."""


def window_seconds(rate: float, promise: Promise) -> float:
    """Length of a window that counts enough requests at a rate, and in which a crowd can build up that is too large for
    the promise; within what is bearable."""
    enough = max(float(ceil(COUNTED / (1 - WARM_UP) / rate)), 2 * promise.longest)
    return min(LONGEST, max(SHORTEST, enough))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How long and how sure; see ``hopon capacity --help``. Without ``seconds`` the rate decides."""

    start: float | None = None
    seconds: float | None = None
    minutes: float | None = None
    half_width: float = 0.1
    max_windows: int = 80
    seed: int = 0
    json_file: Path | None = None
    html_file: Path | None = None
    resume: bool = False

    def plan(self, promise: Promise, start: float, step: float = 2.0) -> Plan:
        """For a search that begins there."""
        return Plan(
            start=start,
            seconds=self.seconds or window_seconds(start, promise),
            step=step,
            budget=None if self.minutes is None else 60 * self.minutes,
            half_width=self.half_width,
            max_windows=self.max_windows,
            seed=self.seed,
        )


def make_simulated(
    *,
    load: Load,
    promise: Promise,
    policy: str,
    knobs: Mapping[str, str],
    settings: Mapping[str, int | bool | None],
    cost: str,
    model: str,
    hardware_name: str,
    replicas: int = 1,
    router: str = "least-load",
    overhead: float | None = None,
    fast: bool = False,
) -> Simulated:
    """A deployment in the simulator; ``overhead`` is by default what the cost model was measured with.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: a file cannot be read.
    """
    preset = make_preset(policy, knobs)
    device = hardware(hardware_name)
    machine = make_machine(cost, model, device)
    config = make_config(preset, machine, load.crowd(1000, 0), settings)
    return Simulated(
        load=load,
        promise=promise,
        config=config,
        policy=preset.policy,
        cost=machine.with_blocks(config.block_size, device),
        replicas=replicas,
        router=router,
        overhead=machine.overhead if overhead is None else overhead,
        paces=machine.paces,
        fast=fast,
    )


def run_simulated(target: Simulated, wanted: Wanted, about: Mapping[str, Any], title: str, say: Say) -> str:
    """A search in the simulator."""
    start = wanted.start or first_rate(target)
    return _run(target, wanted, lambda: wanted.plan(target.promise, start), about, title, say)


def predict(target: Simulated) -> Estimate | None:
    """Where the simulator thinks that capacity is; None where it finds none."""
    plan = Plan(start=first_rate(target), seconds=PREDICTED_SECONDS, max_windows=20, confirm=0.0)
    return search(target, plan).estimate


def first_rate(target: Simulated) -> float:
    """Where a search begins: requests per second that a crowd is served at, all of it at once."""
    window = target.measure(1e6, 0, 200 / 1e6)
    longest = window.figures.get("e2e_p95") or 1.0
    return float(max(1e-3, FIRST_SHARE * window.figures["requests"] / longest))


def run_live(
    server: ServerTarget,
    load: Load,
    promise: Promise,
    wanted: Wanted,
    writer: Writer,
    about: Mapping[str, Any],
    *,
    say: Say,
    watch: Watch | None = None,
    simulated: Simulated | None = None,
    runner: asyncio.Runner | None = None,
) -> str:
    """A search on a server, which begins where the simulator thinks that it ends; ``runner`` stays open.

    Raises:
        TargetError: it does not answer.
    """
    with nullcontext(runner) if runner is not None else asyncio.Runner() as runner:
        server = runner.run(named(server))
        if writer.as_text:
            writer = runner.run(fit_words(server, writer))
        runner.run(check(server, writer.prompt((Piece(-9, 16),)), count=2))
        live = Live(target=server, load=load, promise=promise, writer=writer, runner=runner, watch=watch)

        predicted = None
        if simulated is not None:
            predicted = predict(simulated)
            say("the simulator finds no capacity" if predicted is None else f"predicted: {predicted.rate:.3g}/s")

        def plan() -> Plan:
            if wanted.start is not None:
                return wanted.plan(promise, wanted.start)
            if predicted is not None:
                return wanted.plan(promise, predicted.rate, GUESSED_STEP)
            say(f"saturating the server with {FIRST_CONCURRENCY} requests at once, to know where to begin")
            return wanted.plan(
                promise, FIRST_SHARE * live.saturated_rate(FIRST_CONCURRENCY, FIRST_SECONDS, wanted.seed)
            )

        about = {"server": server.base, "model": server.model, **about}
        return _run(live, wanted, plan, about, server.model, say, predicted)


def _run(
    target: Target,
    wanted: Wanted,
    make_plan: Callable[[], Plan],
    about: Mapping[str, Any],
    title: str,
    say: Say,
    predicted: Estimate | None = None,
) -> str:
    known: list[Window] = []
    if wanted.resume:
        assert wanted.json_file is not None, "a search goes on from a file"
        plan, known = files.read(wanted.json_file, about)
        say(f"going on behind {len(known)} windows")
    else:
        plan = make_plan()
        if plan.seconds * plan.start * (1 - WARM_UP) < COUNTED:
            say(f"windows of {plan.seconds:g} s count fewer than {COUNTED} requests at {plan.start:.3g}/s")
    windows = list(known)

    def note(window: Window, found: Estimate | None) -> None:
        windows.append(window)
        if wanted.json_file is not None:
            files.write(wanted.json_file, about, plan, windows, None)
        share = min((share.value or 0.0) for share in window.shares)
        kept = "kept" if window.kept else f"broken{': ' + window.unstable if window.unstable else ''}"
        so_far = "" if found is None else f"; so far {found.rate:.3g}/s +-{100 * found.half_width:.0f} %"
        say(f"{window.phase:8} {window.rate:8.3g}/s  {share:6.1%} {kept}{so_far}")

    answer = search(target, plan, note, known)
    cause = None if answer.estimate is None else find_cause(answer.windows, answer.estimate.low)
    if wanted.json_file is not None:
        files.write(wanted.json_file, about, plan, answer.windows, answer)
    if wanted.html_file is not None:
        wanted.html_file.write_text(report.page(answer, about, cause, title), encoding="utf-8")
    text = report.text(answer, about, cause)
    if predicted is not None:
        off = (
            ""
            if answer.estimate is None
            else f", {predicted.rate / answer.estimate.rate - 1:+.0%} of what was measured"
        )
        text += (
            f"\npredicted by the simulator: {predicted.rate:.3g}/s ({predicted.low:.3g} to {predicted.high:.3g}){off}"
        )
    return text
