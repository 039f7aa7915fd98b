"""A cost model from runs of a real server.

The server records its steps (``--step-records``) while it is loaded in many ways: one user, crowds of several sizes,
open loops at low and at medium load. The cost model is fitted to those steps, and what it says of each run tells how
much faster the machine is at some times than at others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hopon.bench.play import check, play
from hopon.bench.schedule import Writer, from_workload
from hopon.bench.target import Target
from hopon.capacity.load import Load
from hopon.sim import calibrate as calibration
from hopon.sim.command import saved_model
from hopon.tracing import StepRecord, read_steps
from hopon.workload.ask import Workload
from hopon.workload.draw import Kind
from hopon.workload.lengths import Uniform

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
