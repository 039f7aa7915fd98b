"""How predictions are put beside what was measured."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hopon.bench.records import Record, Records
from hopon.bench.schedule import Schedule, Writer
from hopon.bench.target import Target
from hopon.capacity.calibrate import WAYS, Fitting
from hopon.capacity.comparison import Comparison, Row, compared
from hopon.capacity.load import Load, parse_kinds
from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset
from hopon.core.types import FinishReason
from hopon.metrics import RequestRecord
from hopon.sim.calibrate import Saved
from hopon.sim.cost import Fitted, Paced
from hopon.sim.run import simulate
from hopon.tracing import StepFeatures, StepRecord
from hopon.workload.ask import Piece


def heard(ttft: float, gap: float) -> RequestRecord:
    times = array("d", [ttft + gap * i for i in range(5)])
    return RequestRecord(
        request_id="a",
        arrival=0.0,
        input_tokens=3,
        admitted=0.0,
        token_times=times,
        cached_tokens=0,
        ended=times[-1],
        finish=FinishReason.LENGTH,
        source=0,
    )


def test_v112_v116_errors_that_cancel_are_seen() -> None:
    """A first token that is predicted too early and gaps that are too long by as much leave E2E right; both show."""
    measured, predicted = compared([heard(1.0, 0.25)]), compared([heard(0.2, 0.45)])
    rows = {name: Row(name=name, measured=(value,), predicted=predicted[name]) for name, value in measured.items()}
    errors = {name: row.error for name, row in rows.items()}
    assert errors["TTFT p50"] == pytest.approx(-0.8)
    assert errors["ITL p95"] == pytest.approx(0.8)
    assert errors["E2E p50"] == pytest.approx(0.0)
    assert errors["tokens/s"] == pytest.approx(0.0)
    assert rows["TTFT p50"].cells()[-2:] == ["-80.0%", "NO"]
    assert rows["E2E p95"].cells()[-1] == "yes"


@pytest.mark.parametrize(("measured", "predicted"), [((), 1.0), ((None,), 1.0), ((0.0,), 1.0), ((1.0,), None)])
def test_v116_what_cannot_be_compared_has_no_error(measured: tuple[float | None, ...], predicted: float | None) -> None:
    """Neither infinite nor NaN: a dash."""
    assert Row(name="x", measured=measured, predicted=predicted).cells()[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("measured", "spread"),
    [((10.0,), 0.0), ((10.0, 12.0), 1 / 11), ((9.0, 10.0, 14.0), 0.4), ((9.0, 10.0, None, 14.0), 0.4),
     ((9.0, 10.0, 11.0, 14.0), (1 + 4 + 3 + 3) / 4 / 10.5), ((0.0, 0.0, 0.0), 0.0)],
)  # fmt: skip
def test_v116_the_spread_is_that_of_three_repeats(measured: tuple[float | None, ...], spread: float) -> None:
    """However many there are: the spread of more would be larger, and excuse more."""
    assert Row(name="x", measured=measured, predicted=10.0).spread == pytest.approx(spread)


TRUE = Fitted(base=0.05, knots=(0, 64), slopes=(1e-3, 5e-4), c=0.0, d=0.0, e=0.0)
SERVER, PATH = Target(url="http://127.0.0.1:1", model="m"), Path("steps.jsonl")


class Machine:
    """In place of a server: whatever is played to it takes the true time, one request after the other."""

    def __init__(self, delay: float = 0.0) -> None:
        self.steps: list[StepRecord] = []
        self.schedules: list[Schedule] = []
        self._delay = delay
        self._now = 0.0

    def step(self, features: StepFeatures, seconds: float | None = None) -> None:
        taken = TRUE.seconds(features) if seconds is None else seconds
        self.steps.append(StepRecord(step=len(self.steps), start=self._now, seconds=taken, features=features))
        self._now += taken

    async def play(self, server: Target, schedule: Schedule) -> Records:
        self.schedules.append(schedule)
        return Records(calls=tuple(self._answers(schedule)), seconds=self._now, open_loop=False)

    def _answers(self, schedule: Schedule) -> Iterator[Record]:
        for number, session in enumerate(schedule.sessions[:40]):
            begun, content = self._now, session.turns[0].content
            length = sum(piece.count for piece in content if isinstance(piece, Piece))
            self.step(StepFeatures(num_prefills=1, prefill_tokens=length))
            yield Record(number=number, arrival=begun, piece_times=array("d", [self._now + self._delay]))
            for _ in range(7):
                self.step(StepFeatures(num_decodes=1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(delay=0.004)
    for module in ("calibrate", "comparison"):
        monkeypatch.setattr(f"hopon.capacity.{module}.play", made.play)
        monkeypatch.setattr(f"hopon.capacity.{module}.read_steps", lambda path: list(made.steps))
    monkeypatch.setattr("hopon.capacity.calibrate.saved_model", lambda cost, path: saved(cost))
    return made


def saved(cost: Fitted) -> Saved:
    settings = {"num_blocks": 1024, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 12}
    return Saved(cost=cost, capacity_tokens=16384, kv_bytes_per_token=1, settings=settings)


def comparison(runner: asyncio.Runner, writer: Writer, seconds: float = 5.0) -> Comparison:
    load = Load(kinds=parse_kinds("random", (), "20-100", "8"))
    return Comparison(
        writer, runner, load, policy="hopon", knobs={}, slo="ttft<1s", seconds=seconds, say=lambda line: None
    )


def test_a_fit_is_to_its_own_runs(machine: Machine) -> None:
    """Ways follow one another with prompts that no cache knows, and steps of other runs in between do not count."""
    random = Random(1)
    with asyncio.Runner() as runner:
        fitting = Fitting(Writer(), runner, 1.0, lambda line: None)
        fitting.some(SERVER, PATH)
        for _ in range(200):
            machine.step(StepFeatures(num_prefills=1, prefill_tokens=random.randint(2, 500)), seconds=9.0)
        fitting.some(SERVER, PATH, 2)
    assert len({schedule.writer.salt for schedule in machine.schedules}) == len(machine.schedules) == WAYS + 2
    found, _ = fitting.fit(PATH)
    for tokens in (1, 40, 200, 900):
        step = StepFeatures(num_prefills=1, prefill_tokens=tokens)
        assert found.cost.seconds(step) == pytest.approx(TRUE.seconds(step), rel=0.02)


@pytest.mark.parametrize("wrong", [0.5, 1.0, 1.5])
def test_what_a_model_is_wrong_by_is_no_overhead(wrong: float, machine: Machine) -> None:
    """The delay between client and engine is found whatever the model says of the prompts' steps."""
    cost = Fitted(base=wrong * TRUE.base, knots=(0,), slopes=(wrong * 1e-3,), c=0.0, d=0.0, e=0.0)
    with asyncio.Runner() as runner:
        compared_to = comparison(runner, Writer())
        compared_to.prepare(SERVER, PATH, saved(cost))
    assert compared_to.table(saved(TRUE))[0].overhead == pytest.approx(0.004)


def test_comparisons_with_salts_of_their_own_share_no_prompt(machine: Machine) -> None:
    """Else the prefix cache of a server would know prompts of one from another."""
    with asyncio.Runner() as runner:
        for salt in ("a", "b"):
            one = comparison(runner, Writer(salt=salt))
            one.prepare(SERVER, PATH, saved(TRUE))
            for _ in range(2):
                one.repeat(SERVER, PATH)
    assert len({schedule.writer.salt for schedule in machine.schedules}) == len(machine.schedules) == 2 * (1 + 2 * 4)


def test_the_capacity_that_all_runs_tell_is_compared(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose steps take a quarter longer than predicted carries less, and the row says how much."""
    paces = (0.94, 1.0, 1.06)
    model = replace(saved(TRUE), paces=paces)
    rows = []
    for slower in (1.0, 1.25):
        with asyncio.Runner() as runner:
            one = comparison(runner, Writer(), seconds=60.0)
            one.prepare(SERVER, PATH, model)
            runs = iter(list(product(paces, one._works)))

            async def play(server: Target, schedule: Schedule, slower: float = slower, runs: Any = runs) -> Any:
                policy = make_preset("hopon", {}).policy
                pace, work = next(runs)
                cost = Paced(cost=TRUE, factor=slower * pace)
                result = simulate(work, SchedulerConfig(**model.settings), policy, cost)
                return SimpleNamespace(calls=result.records, samples=())

            with monkeypatch.context() as patch:
                patch.setattr("hopon.capacity.comparison.play", play)
                for _ in paces:
                    one.repeat(SERVER, PATH)
        _, text = one.table(model)
        rows.append(next(line for line in text.splitlines() if "capacity" in line).split())
    same, other = rows
    assert abs(float(same[-2].rstrip("%"))) < 3
    assert same[-1] == "yes"
    assert float(other[-2].rstrip("%")) > 10
