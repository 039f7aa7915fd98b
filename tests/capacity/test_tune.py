"""Tuning: what the simulator finds, what a scripted engine is then asked, and what is recommended."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hopon.bench.schedule import Writer
from hopon.bench.target import Target, TargetError
from hopon.capacity.knobs import Candidate, parse_knob
from hopon.capacity.load import Load, parse_kinds
from hopon.capacity.promise import Share, parse_promise
from hopon.capacity.search import Window
from hopon.capacity.trials import Trials
from hopon.capacity.tune import Spot, best_of, compare, front, kept, limit_of, raise_knob, spots
from hopon.capacity.tune_command import Engines, Site, Wanted, tune, walk
from hopon.cli import app
from tests.bench.preset_server import PresetServer
from tests.bench.virtual import VirtualLoop

NOTHING = Candidate()


def site(slo: str = "ttft<1s tpot<60ms", **given: Any) -> Site:
    shape = {"input_len": "100-300", "output_len": "20-60"} | given
    return Site(
        load=Load(kinds=parse_kinds("random", (), shape["input_len"], shape["output_len"])),
        promise=parse_promise(slo),
        cost="linear",
        model="llama-3-8b",
        hardware="a100-80",
    )


def silent(line: str) -> None:
    pass


def one_second(rate: float) -> float:
    return 1.0


def seats(count: int) -> Candidate:
    return NOTHING.turned("max_num_seqs", count)


class Made:
    """Keeps the promise up to a rate of its own for each number of seats; counts what it was asked."""

    def __init__(self, limits: dict[int, float], noise: float = 0.0) -> None:
        self.limits, self.noise = limits, noise
        self.asked: list[tuple[Candidate, float, int]] = []

    def __call__(self, candidate: Candidate, rate: float, seed: int, seconds: float) -> Window:
        self.asked.append((candidate, rate, seed))
        count = int(dict(candidate.values).get("max_num_seqs", 8))
        if count not in self.limits:
            raise TargetError(f"no room for {count}")
        limit = self.limits[count] * (1 + self.noise * math.sin(seed + count))
        met = min(1000, int(1000 * min(1.0, limit / rate) ** 2))
        figures = {"output_tokens_per_second": 10 * min(rate, limit), "e2e_p95": 1 / max(1e-3, 2 * limit - rate)}
        return Window(rate=rate, seed=seed, seconds=seconds, shares=(Share("all", met, 1000, 0.95),), figures=figures)


def test_the_limit_of_a_candidate_is_found() -> None:
    """From below and from above, to a few percent above the start and coarsely below it; None is said as 0."""
    made = Made({8: 10.0})
    truth = 10.0 / math.sqrt(0.95)
    for start in (1.0, 9.0):
        assert limit_of(Trials({}), made, NOTHING, start, one_second, (1,)).rate == pytest.approx(truth, rel=0.04)
    assert truth / 1.2 < limit_of(Trials({}), made, NOTHING, 60.0, one_second, (1,)).rate <= truth
    assert limit_of(Trials({}), made, NOTHING, 3000.0, one_second, (1,)).rate == 0.0


def test_windows_of_one_rate_count_together() -> None:
    """A lucky and an unlucky window of different sizes are one share."""
    first = Window(rate=1.0, seed=0, seconds=1.0, shares=(Share("all", 99, 100, 0.95),))
    second = Window(rate=1.0, seed=1, seconds=1.0, shares=(Share("all", 9, 11, 0.95),))
    assert not kept([second])
    assert kept([first, second])
    assert not kept([first, second, second, second])


def test_the_simulator_turns_one_knob_at_a_time() -> None:
    """Few seats queue; more carry more, and the knobs behind keep them. The reason names both causes."""
    start = Candidate.of({"max_num_seqs": 4})
    knobs = {"max_num_seqs": [6, 8], "max_num_batched_tokens": [16, 512]}
    said: list[str] = []
    text = tune(site(output_len="100-200"), None, Wanted(base=start, knobs=knobs), Trials({}), {"x": 1}, said.append)
    assert "recommended: --max-num-seqs 8" in text
    assert "predicted, not measured" in text
    assert "because --max-num-seqs 4 breaks by queue" in text, text
    assert [line.split(":")[0] for line in said] == [
        "--max-num-seqs 4",
        "--max-num-seqs 6",
        "--max-num-seqs 8",
        "--max-num-seqs 8 --max-num-batched-tokens 16",
        "--max-num-seqs 8 --max-num-batched-tokens 512",
    ]


def test_impossible_settings_are_said_and_skipped() -> None:
    """A budget below the seats is no candidate."""
    said: list[str] = []
    wanted = Wanted(base=Candidate.of({"max_num_seqs": 64}), knobs={"max_num_batched_tokens": [32]})
    text = tune(site(output_len="100-200"), None, wanted, Trials({}), {}, said.append)
    assert "max_num_batched_tokens 32 must be at least max_num_seqs 64" in said[1]
    assert "nothing that was tried carries more" in text


def test_candidates_take_turns_on_the_engine() -> None:
    """The same rate and seeds for all, every second round backwards; who cannot be served is left out and named."""
    made, said = Made({8: 10.0, 16: 12.0}), list[str]()
    found = compare(Trials({}), made, [NOTHING, seats(16), seats(99)], 12.0, 5.0, [1, 2, 3], said.append)
    assert [(str(one), seed) for one, _, seed in made.asked if one != seats(99)] == [
        ("no flags", 1), ("--max-num-seqs 16", 1), ("--max-num-seqs 16", 2), ("no flags", 2), ("no flags", 3),
        ("--max-num-seqs 16", 3),
    ]  # fmt: skip
    assert [one.candidate for one in found] == [NOTHING, seats(16)]
    assert sum("left out: no room for 99" in line for line in said) == 1
    assert best_of(found).candidate == seats(16)


def test_a_gain_within_the_spread_is_none() -> None:
    """Windows that differ among themselves by more than candidates do recommend nothing."""
    found = compare(Trials({}), Made({8: 10.0, 16: 10.2}, 0.1), [NOTHING, seats(16)], 12.0, 5.0, [1, 2, 3, 4], silent)
    assert found[1].middle("goodput") != found[0].middle("goodput")
    assert best_of(found).candidate == NOTHING


def test_a_tuning_goes_on(tmp_path: Path) -> None:
    """What is in the file is not measured again, and the answer is that of one go; another tuning's file is refused."""
    path = tmp_path / "tune.json"
    made = Made({8: 10.0, 16: 12.0})
    whole = compare(Trials({"x": 1}, path), made, [NOTHING, seats(16)], 12.0, 5.0, [1, 2], silent)
    content = json.loads(path.read_text())
    content["windows"] = content["windows"][:3]
    path.write_text(json.dumps(content))
    again = Made({8: 10.0, 16: 12.0})
    trials = Trials({"x": 1}, path, resume=True)
    assert len(trials) == 3
    assert compare(trials, again, [NOTHING, seats(16)], 12.0, 5.0, [1, 2], silent) == whole
    assert len(again.asked) == 1
    with pytest.raises(ValueError, match="x was 1 and is 2 now"):
        Trials({"x": 2}, path, resume=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a tuning"):
        Trials({}, path, resume=True)


def test_a_knob_is_raised_until_the_promise_breaks() -> None:
    """Every step is kept, the last one broke, and nothing is asked behind it."""
    made = Made({4: 20.0, 8: 15.0, 16: 11.0, 32: 5.0, 64: 1.0})
    steps, end = raise_knob(Trials({}), "x", made, NOTHING, "max_num_seqs", [4, 8, 16, 32, 64], 10.0, 1.0, [1], silent)
    assert [(step.value, step.kept) for step in steps] == [(4, True), (8, True), (16, True), (32, False)]
    assert end == "max_num_seqs 32 breaks the promise"
    _, end = raise_knob(Trials({}), "x", made, NOTHING, "max_num_seqs", [4, 8, 12], 10.0, 1.0, [1], silent)
    assert end == "max_num_seqs 12 is not possible: no room for 12"


def test_raising_seats_trades_gaps_for_a_queue() -> None:
    """In the simulator, overloaded: more seats make longer gaps, until the promise about them breaks."""
    wanted = Wanted(base=Candidate.of({"max_num_seqs": 4}), knobs={}, rate=40.0, rounds=1, seconds=30.0)
    text = walk(site("itl_p50<40ms"), None, wanted, "max_num_seqs", Trials({}), silent)
    assert "max_num_seqs 32 breaks the promise" in text
    assert "highest value that keeps itl_p50<40ms: 16" in text
    with pytest.raises(ValueError, match="policy cannot be raised from 'hopon'"):
        walk(site(), None, wanted, "policy", Trials({}), silent)


def test_the_front_leaves_out_what_something_else_beats() -> None:
    """Rising throughput, rising latency; what a better one dominates is not on it, nor what cannot be kept up."""
    points = [Spot(candidate=seats(i), rate=1.0, tokens_per_second=t, latency=s) for i, (t, s) in
              enumerate([(100, 1.0), (90, 2.0), (50, 0.5), (99, 0.99), (100, 3.0)], 1)]  # fmt: skip
    assert [(spot.tokens_per_second, spot.latency) for spot in front(points)] == [(50, 0.5), (100, 1.0)]
    window = Window(rate=1.0, seed=0, seconds=1.0, shares=(Share("all", 1, 1, 0.5),), figures={
        "output_tokens_per_second": 5.0, "e2e_p95": 1.0})  # fmt: skip
    broken = Window(rate=2.0, seed=0, seconds=1.0, shares=window.shares, unstable="grows", figures=window.figures)
    assert [spot.rate for spot in spots([(NOTHING, window), (NOTHING, broken)], "e2e_p95")] == [1.0]


def test_engines_are_started_for_every_window(tmp_path: Path) -> None:
    """hopon's own scheduler behind a scripted server in virtual time: seats that the simulator likes are measured, and
    the gain is the servers'.
    """
    started: list[str] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        @contextmanager
        def serve(candidate: Candidate) -> Iterator[Target]:
            started.append(str(candidate))

            async def begin() -> PresetServer:
                return PresetServer("hopon", {}, seats=int(dict(candidate.values)["max_num_seqs"]), step=0.02)

            server = runner.run(begin())
            yield Target(url=server.server.url, model="m")
            runner.run(server.close())

        engines = Engines(serve=serve, writer=Writer(lowest=10, vocab_size=1000), runner=runner)
        wanted = Wanted(
            base=Candidate.of({"max_num_seqs": 2}), knobs={"max_num_seqs": [8]}, rounds=2, seconds=10.0, rate=4.0,
            html_file=tmp_path / "page.html",
        )  # fmt: skip
        text = tune(site("ttft<500ms"), engines, wanted, Trials({}, tmp_path / "t.json"), {}, silent)
    assert started == ["--max-num-seqs 2", "--max-num-seqs 8", "--max-num-seqs 8", "--max-num-seqs 2"]
    assert "recommended: --max-num-seqs 8\nmeasured: goodput" in text
    page = (tmp_path / "page.html").read_text()
    assert page.count("<figure>") == 3
    assert "<h1>recommended: --max-num-seqs 8</h1>" in page


def test_knobs_are_read_and_bad_ones_are_named() -> None:
    """Names as flags have them; values are whole numbers, but for policies."""
    assert parse_knob("max-num-seqs=1, 2") == ("max_num_seqs", [1, 2])
    assert parse_knob("policy=vllm,orca") == ("policy", ["vllm", "orca"])
    assert Candidate.of({"policy": "vllm", "max_num_seqs": 3}).flags == ["--max-num-seqs", "3", "--policy", "vllm"]
    for text, words in (
        ("seats=3", "unknown knob 'seats'"),
        ("max-num-seqs", "with its values"),
        ("max-num-seqs=x", "whole numbers, got 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_knob(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a model, or --target simulate"),
        (["http://x"], "give a model, not an address"),
        (["m"], "--cost fitted:FILE"),
        (["--target", "simulate", "--raise", "max-num-seqs"], "belong together"),
        (["m", "--cost", "fitted:x", "--serve-flags", "--max-num-seqs 3"], "is a knob"),
        (["--target", "simulate", "--rounds", "0"], "must be above 0"),
    ],
)
def test_bad_flags_are_named(args: list[str], words: str) -> None:
    """Before anything is started."""
    result = CliRunner().invoke(app, ["tune", *args], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert words in result.output
