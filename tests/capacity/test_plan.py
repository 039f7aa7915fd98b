"""Planning: fewer replicas for less traffic and better machines, and it says that it is a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hopon.capacity.plan import Site, first_guess, needed, plan
from hopon.capacity.promise import Share, parse_promise
from hopon.capacity.search import Window
from hopon.cli import app
from hopon.sim.hardware import hardware
from hopon.workload.draw import draw
from hopon.workload.lengths import Uniform

SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}


def site(rate: float = 20.0, gpu: str = "a100-80", count: int = 300) -> Site:
    return Site(
        traffic=draw(count=count, rate=rate, inputs=Uniform(400, 1200), outputs=Uniform(10, 40), seed=1),
        promise=parse_promise("ttft<1s tpot<50ms"),
        model="llama-3-8b",
        hardware=hardware(gpu),
        policy="hopon",
        max_replicas=16,
    )


def replicas(one: Site) -> int:
    found = needed(one, "least-load", SETTINGS, first_guess(one, SETTINGS)).replicas
    assert found is not None
    return found


def test_more_traffic_needs_more_and_better_machines_fewer() -> None:
    """Never the other way round; and at the ends of the range it is really more."""
    counts = [replicas(site(rate)) for rate in (5.0, 20.0, 60.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    machines = []
    for factor in (0.5, 1.0, 1.4):
        one = site(60.0)
        device = replace(one.hardware, flops_efficiency=0.66 * factor, bandwidth_efficiency=0.7 * factor)
        machines.append(replicas(replace(one, hardware=device)))
    assert machines == sorted(machines, reverse=True)
    assert machines[0] > machines[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made(Site):
    """Keeps the promise from so many replicas on, and remembers how many were tried."""

    truth: int
    asked: list[int] = field(default_factory=list)

    def play(self, replicas: int, router: str, settings: Mapping[str, int]) -> Window:
        self.asked.append(replicas)
        met = 100 if replicas >= self.truth else 0
        shares = (Share("all", met, 100, 0.95),)
        return Window(rate=1.0, seed=0, seconds=1.0, shares=shares, figures={"replicas": replicas, "busy": 0.5})


def made(truth: int) -> Made:
    one = site()
    return Made(
        traffic=one.traffic, promise=one.promise, model=one.model, hardware=one.hardware, policy="hopon",
        max_replicas=16, truth=truth,
    )  # fmt: skip


@pytest.mark.parametrize("guess", [1, 3, 7, 16, 40])
def test_the_smallest_number_is_found_from_any_guess(guess: int) -> None:
    """No count is simulated twice, none is beyond the most, and a right guess takes two simulations."""
    for truth in range(1, 17):
        one = made(truth)
        assert needed(one, "r", {}, guess).replicas == truth
        assert len(set(one.asked)) == len(one.asked)
        assert max(one.asked) <= 16
        if guess == truth:
            assert len(one.asked) == (2 if truth > 1 else 1)
    assert needed(made(17), "r", {}, guess).replicas is None


def test_settings_that_need_more_than_the_best_are_tried_once() -> None:
    """A ladder whose later settings are worse is quick, and says so."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Ladder(Made):
        def play(self, replicas: int, router: str, settings: Mapping[str, int]) -> Window:
            one = replace(self, truth=4 if settings["max_num_seqs"] == 1 else 9)
            return Made.play(one, replicas, router, settings)

    one = made(4)
    ladder = Ladder(**{name: getattr(one, name) for name in Made.__slots__ + Site.__slots__})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hopon.capacity.plan.first_guess", lambda site, settings: 4)
        said: list[str] = []
        plan(ladder, ["round-robin"], {"max_num_seqs": [1, 2, 3]}, said.append)
    assert said == ["seqs=1: 4 replicas", "seqs=2: more than 4", "seqs=3: more than 4"]
    assert len(one.asked) < 12


def test_a_plan_says_that_it_is_one(tmp_path: Path) -> None:
    """The number needed, what it would be on other machines, where the assumptions come from."""
    said: list[str] = []
    ladder = {"max_num_seqs": [64], "max_num_batched_tokens": [512, 2048]}
    text = plan(site(40.0), ["least-load", "round-robin"], ladder, said.append)
    assert len(said) == 2
    assert "needed: " in text
    assert "This is a prediction" in text
    assert "NVIDIA A100 datasheet" in text
    assert "if the machine does better or worse than assumed" in text


def test_too_few_replicas_are_said() -> None:
    """No number is made up where none that was tried is enough."""
    text = plan(replace(site(200.0), max_replicas=1), ["least-load"], {"max_num_seqs": [64]}, lambda line: None)
    assert "not even 1 replicas keep the promise" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--slo", "ttft<1s"], "--trace, or --rate"),
        (["--slo", "ttft<1h", "--rate", "1"], "ttft<1h"),
        (["--slo", "ttft<1s", "--rate", "1", "--gpu", "abacus"], "abacus"),
        (["--slo", "ttft<1s", "--rate", "1", "--model", "nothing"], "nothing"),
        (["--slo", "ttft<1s", "--rate", "1", "--max-num-seqs", "few"], "128,256"),
    ],
)
def test_bad_input_is_named(args: list[str], words: str) -> None:
    """What is wrong is in the message."""
    result = CliRunner().invoke(app, ["plan", "--num-requests", "20", *args], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code != 0
    assert words in result.output + str(result.exception)
