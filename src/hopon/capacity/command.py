"""What ``hopon capacity`` does: from what was asked for to a search, a table, a page and a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from hopon.core.policy.presets import make_preset
from hopon.sim.command import make_config, make_machine
from hopon.sim.hardware import hardware
from hopon.workload import Piece

Say = Callable[[str], None]

FIRST_CONCURRENCY = 16
FIRST_SECONDS = 8.0
FIRST_SHARE = 0.6
"""Of the rate of a closed loop: where the search begins when nobody says better."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How long and how sure; see ``hopon capacity --help``."""

    start: float | None = None
    seconds: float = 20.0
    half_width: float = 0.1
    max_windows: int = 40
    seed: int = 0
    json_file: Path | None = None
    html_file: Path | None = None
    resume: bool = False

    def plan(self, start: float) -> Plan:
        """For a search that begins there."""
        return Plan(
            start=start,
            seconds=self.seconds,
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
        fast=fast,
    )


def run_simulated(target: Simulated, wanted: Wanted, about: Mapping[str, Any], title: str, say: Say) -> str:
    """A search in the simulator."""
    start = wanted.start or first_rate(target)
    return _run(target, wanted, lambda: start, about, title, say)


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
) -> str:
    """A search on a server.

    Raises:
        TargetError: it does not answer.
    """
    with asyncio.Runner() as runner:
        server = runner.run(named(server))
        if writer.as_text:
            writer = runner.run(fit_words(server, writer))
        runner.run(check(server, writer.prompt((Piece(-9, 16),)), count=2))
        live = Live(target=server, load=load, promise=promise, writer=writer, runner=runner, watch=watch)

        def start() -> float:
            if wanted.start is not None:
                return wanted.start
            say(f"saturating the server with {FIRST_CONCURRENCY} requests at once, to know where to begin")
            return FIRST_SHARE * live.saturated_rate(FIRST_CONCURRENCY, FIRST_SECONDS, wanted.seed)

        return _run(live, wanted, start, {"server": server.base, "model": server.model, **about}, server.model, say)


def _run(
    target: Target, wanted: Wanted, start: Callable[[], float], about: Mapping[str, Any], title: str, say: Say
) -> str:
    known: list[Window] = []
    if wanted.resume:
        assert wanted.json_file is not None, "a search goes on from a file"
        plan, known = files.read(wanted.json_file, about)
        say(f"going on behind {len(known)} windows")
    else:
        plan = wanted.plan(start())
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
    return report.text(answer, about, cause)
