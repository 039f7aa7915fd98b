"""Faults that load tests and simulators had elsewhere; each test is named after its case in tests/field_cases.md."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hopon.bench.schedule import Writer
from hopon.bench.target import Target
from hopon.capacity.command import make_simulated
from hopon.capacity.comparison import Run, _rows
from hopon.capacity.live import Live
from hopon.capacity.load import Load, parse_kinds
from hopon.capacity.promise import parse_promise
from hopon.capacity.search import Answer, Plan, search
from hopon.capacity.simulated import Simulated
from hopon.core.clock import VirtualClock
from hopon.core.config import SchedulerConfig
from hopon.core.engine import Engine, Shutdown
from hopon.core.policy.presets import make_preset
from hopon.core.scheduler import Scheduler
from hopon.sim import calibrate as calibration
from hopon.sim.cost import Fitted, Linear
from hopon.sim.loop import CostPace
from hopon.sim.run import commands, simulate
from hopon.sim.timed import TimedDevice
from hopon.sim.tokens import SimulatedDevice
from hopon.testing import ScriptedInbox
from hopon.workload.draw import Arrivals
from tests.bench.virtual import Server, VirtualLoop, slots

LOAD = Load(kinds=parse_kinds("random", (), "16-32", "1"))


def _search(arrivals: Arrivals, seed: int, seconds: float) -> Answer:
    """Four slots of half a second each, promised: nineteen of twenty within a second."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def begin() -> Server:
            return Server(slots(4, 0.5))

        live = Live(
            target=Target(url=runner.run(begin()).url, model="m"),
            load=replace(LOAD, arrivals=arrivals),
            promise=parse_promise("e2e_p95<1s"),
            writer=Writer(lowest=10, vocab_size=1000),
            runner=runner,
        )
        return search(live, Plan(start=5.0, seconds=seconds, seed=seed, max_windows=24))


@pytest.mark.parametrize(("arrivals", "seconds", "rate", "within"), [
    ("constant", 60.0, 8.0, 0.05), ("poisson", 120.0, 5.8, 0.1),
])  # fmt: skip
def test_v111_the_limit_of_a_queue_with_slots(
    arrivals: Arrivals, seconds: float, rate: float, within: float, effort: Callable[[int, int], int]
) -> None:
    """Known limits are found, with an interval, and what is beyond the slots is called what it is: unstable."""
    for seed in range(effort(1, 5)):
        answer = _search(arrivals, 100 * seed, seconds)
        assert answer.estimate is not None
        assert answer.estimate.rate == pytest.approx(rate, rel=within)
        assert answer.estimate.low < answer.estimate.rate < answer.estimate.high
        beyond = [window for window in answer.windows if window.rate > 9.2]  # over a tenth of all stays behind
        assert beyond
        assert all(window.unstable for window in beyond)


def _fitted(path: Path, overhead: float) -> Simulated:
    cost = Fitted(base=0.01, knots=(0,), slopes=(1e-5,), c=0.0, d=0.0, e=0.0)
    settings = {"num_blocks": 1024, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 12}
    saved = calibration.Saved(
        cost=cost, capacity_tokens=16384, kv_bytes_per_token=1, overhead=overhead, settings=settings
    )
    found = calibration.Calibration(
        cost=cost, num_fitted=1, error_fitted=0.0, num_mixed=0, error_mixed=None, num_held_out=1, error_held_out=0.0,
        error_total=0.0,
    )  # fmt: skip
    calibration.write(path, saved, found)
    return make_simulated(
        load=LOAD, promise=parse_promise("ttft<1s"), policy="hopon", knobs={}, settings={}, cost=f"fitted:{path}",
        model="", hardware_name="a100-80",
    )  # fmt: skip


def test_v113_what_a_request_costs_beside_its_steps_is_a_fitted_number(tmp_path: Path) -> None:
    """With answers of one token, the measured overhead is part of every first token; settings are the server's."""
    without, with_ = _fitted(tmp_path / "a", 0.0), _fitted(tmp_path / "b", 0.25)
    assert without.settings()["max_num_seqs"] == 12
    a, b = (one.measure(3.0, 1, 30.0).figures["ttft_p50"] for one in (without, with_))
    assert b == pytest.approx(a + 0.25)


def test_v114_a_busy_host_changes_no_simulated_time(tmp_path: Path) -> None:
    """The same bytes with and without others that compute beside it."""
    command = [sys.executable, "-m", "hopon", "simulate", "--num-requests", "60", "--rate", "20", "--json"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        subprocess.run([*command, str(tmp_path / "busy.json")], check=True, capture_output=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    subprocess.run([*command, str(tmp_path / "idle.json")], check=True, capture_output=True)
    assert (tmp_path / "busy.json").read_bytes() == (tmp_path / "idle.json").read_bytes()


def test_v116_errors_are_told_by_quantity(tmp_path: Path) -> None:
    """First tokens, gaps, whole requests, throughput and preemptions each have a row, so that none hides another's
    error; what nobody measured is no number.
    """
    target = _fitted(tmp_path / "a", 0.0)
    work = LOAD.draw(3.0, 10.0, 1)
    saved = calibration.read(tmp_path / "a")
    seen: dict[str, float | None] = {f"{name} p{p}": 10.0 for name in ("TTFT", "ITL", "E2E") for p in (50, 95)}
    seen["tokens/s"] = 10.0
    nothing: dict[str, float | None] = dict.fromkeys(seen)
    window = target.measure(3.0, 1, 10.0)
    runs = [Run(figures=seen, window=window, steps=[], preemptions=0.0)]
    runs.append(replace(runs[0], figures=nothing, preemptions=None))
    rows = _rows(0.5, work, target, saved, runs)
    assert [row[1] for row in rows] == [*seen, "preemptions"]
    assert not {"nan", "inf"} & {word for row in rows for cell in row for word in cell.lower().split("%")}
    by_name = {row[1]: row for row in rows}
    assert by_name["ITL p50"][-2:] == ["-", "-"]  # answers of one token have no gaps to predict
    assert by_name["TTFT p50"][-1] in ("yes", "NO")


@pytest.mark.parametrize("oversubscribed", [0.7, 1.4, 3.0])
def test_v115_memory_that_is_too_small_preempts_in_both_alike(oversubscribed: float) -> None:
    """Whatever the pool's share of what all requests need: the engine's loop and the simulator preempt and recompute
    the same, and only where memory is short.
    """
    work = Load(kinds=parse_kinds("random", (), "32-64", "64-128")).crowd(24, 1)
    needed = sum(-(-(ask.input_tokens + ask.output_tokens) // 16) for ask in work)
    config = SchedulerConfig(
        num_blocks=max(16, int(needed / oversubscribed)), max_model_len=256, max_num_seqs=24,
        enable_prefix_caching=False,
    )  # fmt: skip
    policy = make_preset("vllm", {}).policy
    result = simulate(work, config, policy, Linear())
    clock = VirtualClock()
    scheduler = Scheduler(config, policy(config))
    device = TimedDevice(SimulatedDevice(work.output_lengths.__getitem__), CostPace(Linear()), clock)
    inbox = ScriptedInbox(clock, [*commands(work), (1e9, Shutdown())])
    Engine(scheduler, device, clock=clock).run(inbox, lambda news, stats: None)
    assert scheduler.counters.num_preemptions == result.totals.preemptions
    assert scheduler.counters.num_recomputed_tokens == result.totals.recomputed_tokens
    assert (result.totals.preemptions > 0) == (oversubscribed > 1)
