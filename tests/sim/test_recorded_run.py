"""A real model on the real clock, recorded, then played again and fitted to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hopon.core.clock import WallClock
from hopon.core.config import EngineOptions
from hopon.core.engine import Abort, Command, Engine, Shutdown
from hopon.core.policy.presets import make_preset
from hopon.core.types import Delta, Request, SamplingParams
from hopon.model.cpu import load
from hopon.sim.calibrate import calibrate
from hopon.sim.replay import replay
from hopon.tracing import (
    Entry,
    JournalScheduler,
    StepRecord,
    TracedExecutor,
    read_journal,
    read_steps,
    write_journal,
    write_steps,
)

STORIES = Path(__file__).parents[1] / "data" / "stories260k"


class Clients:
    """An inbox whose commands come after so many polls, whatever the time is; at the end it says so."""

    def __init__(self, commands: Sequence[tuple[int, Command]]) -> None:
        self._commands = sorted(commands, key=lambda entry: entry[0])
        self._polls = 0

    def drain(self, timeout: float | None) -> list[Command]:
        if timeout is None and self._commands:  # nothing to do until the next one
            self._polls = max(self._polls, self._commands[0][0])
        due = [command for poll, command in self._commands if poll <= self._polls]
        self._commands = self._commands[len(due) :]
        self._polls += 1
        return due or ([Shutdown()] if timeout is None else [])


@pytest.mark.parametrize("policy", ["hopon", "vllm-v0", "static-impatient", "sglang"])
def test_v115_a_real_run_is_planned_again(policy: str, tmp_path: Path) -> None:
    """A run of a real model with late arrivals, aborts, preemptions (hopon) and real times is recorded to files; the
    simulator makes the same plans of them, and a cost model can be fitted to its steps."""
    rng = random.Random(policy)
    deployment = load(
        EngineOptions(model=str(STORIES), num_kv_blocks=24, max_model_len=256, threads=1), lambda what, share: None
    )
    config = replace(deployment.config, max_num_seqs=8, max_num_batched_tokens=64)
    preset = make_preset(policy)
    clock = WallClock()
    entries: list[Entry] = []
    steps: list[StepRecord] = []
    traced = TracedExecutor(deployment.executor, clock, steps.append)
    engine = Engine(JournalScheduler(config, preset.policy(config), entries.append), traced, clock=clock)
    asked: list[tuple[int, Command]] = [
        (
            rng.randrange(120),
            Request(
                request_id=str(i),
                prompt=tuple(rng.randrange(3, 500) for _ in range(rng.randint(1, 80))),
                params=SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 60)),
                seed=i % 3,
                arrival=clock.now(),
                stop_token_ids=(1, 2),
            ),
        )
        for i in range(24)
    ]
    asked += [(rng.randrange(60, 200), Abort(str(i))) for i in range(3)]
    heard: list[Delta] = []
    engine.run(Clients(asked), lambda news, stats: heard.extend(news))
    deployment.executor.close()
    assert policy != "hopon" or engine.scheduler.counters.num_preemptions > 0
    assert sum(delta.finish is not None for delta in heard) == 24

    write_journal(tmp_path / "journal.jsonl", config, entries)
    write_steps(tmp_path / "steps.jsonl", steps)
    found_config, found = read_journal(tmp_path / "journal.jsonl")
    played = replay(found_config, make_preset(policy).policy(found_config), found)
    assert played.difference is None
    assert played.num_plans == len(steps)
    told = {record.request_id: record for record in played.meter.recorder.records()}
    assert {delta.request_id: delta.time for delta in heard if delta.finish} == {n: r.ended for n, r in told.items()}
    assert calibrate(read_steps(tmp_path / "steps.jsonl")).num_mixed >= 0
