"""The search end to end: in the simulator, on files, and against a server."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hopon.bench.schedule import Writer
from hopon.bench.target import Target
from hopon.capacity import files
from hopon.capacity.command import Wanted, make_simulated, predict, run_live, run_simulated
from hopon.capacity.estimate import estimate
from hopon.capacity.load import Load, parse_kinds
from hopon.capacity.promise import parse_promise
from hopon.capacity.search import Plan
from hopon.capacity.simulated import Simulated
from hopon.capacity.window import backlog_growth, fold
from hopon.cli import app as command_line
from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset
from hopon.core.types import FinishReason
from hopon.metrics import RequestRecord
from hopon.sim.cost import Linear
from tests.bench.preset_server import PresetServer
from tests.bench.virtual import VirtualLoop


def simulated(slo: str, **given: Any) -> Simulated:
    return make_simulated(
        load=Load(kinds=parse_kinds("random", (), "100-200", "20-60")),
        promise=parse_promise(slo),
        knobs={},
        hardware_name="a100-80",
        **{"policy": "hopon", "settings": {"max_num_seqs": 16}, "cost": "linear", "model": "llama-3-8b"} | given,
    )


def test_capacity_in_the_simulator(tmp_path: Path) -> None:
    """The same seed gives the same answer; file and page hold it; a looser promise or more seats carry more."""
    rates = []
    for slo, seats in (("ttft<300ms tpot<60ms", 16), ("ttft<2s tpot<60ms", 16), ("ttft<300ms tpot<60ms", 48)):
        target = simulated(slo, settings={"max_num_seqs": seats})
        found = []
        for name in ("a", "b"):
            wanted = Wanted(
                seconds=20.0, max_windows=14, json_file=tmp_path / f"{name}.json", html_file=tmp_path / f"{name}.html"
            )
            found.append(run_simulated(target, wanted, {"x": 1}, "t<>", lambda line: None))
        assert found[0] == found[1]
        assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
        content = json.loads((tmp_path / "a.json").read_text())
        answer = content["answer"]["estimate"]
        assert f"capacity: {answer['rate']:.3g} requests/s" in found[0]
        page = (tmp_path / "a.html").read_text()
        assert f"<h1>{answer['rate']:.3g} requests/s" in page
        assert "t&lt;&gt;" in page
        assert page.count("<figure>") == 6
        rates.append(answer["rate"])
    assert rates[0] < rates[1]
    assert rates[0] < rates[2]


def test_an_interrupted_search_is_resumed(tmp_path: Path) -> None:
    """What was measured is on disk after every run; --resume ends where an undisturbed search does, or says why not."""
    target = simulated("ttft<300ms tpot<60ms")
    path = tmp_path / "search.json"
    whole = run_simulated(target, Wanted(seconds=20.0, json_file=path), {"x": 1}, "t", lambda line: None)
    content = json.loads(path.read_text())
    del content["answer"]
    content["windows"] = content["windows"][:3]
    path.write_text(json.dumps(content))
    said: list[str] = []
    again = Wanted(seconds=20.0, json_file=path, resume=True)
    assert run_simulated(target, again, {"x": 1}, "t", said.append) == whole
    assert said[0] == "going on behind 3 windows"
    with pytest.raises(ValueError, match=r"x was 1 and is 2 now"):
        run_simulated(target, again, {"x": 2}, "t", said.append)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"max_num_seqs": 4}, "queue"),
        ({"max_num_seqs": 64, "num_blocks": 90, "enable_prefix_caching": False}, "KV memory"),
        ({"max_num_seqs": 400}, "batch growth"),
    ],
)
def test_what_breaks_first_is_named(settings: dict[str, Any], cause: str) -> None:
    """Few seats queue, little memory preempts, many seats make long steps."""
    slo = "tpot<50ms" if cause == "batch growth" else "ttft<1s tpot<200ms"
    target = simulated(slo, settings=settings, policy="vllm")
    text = run_simulated(target, Wanted(seconds=40.0), {}, "t", lambda line: None)
    assert f"because of: {cause} " in text


def records(rate: float, service: Callable[[float], float], seconds: float = 100.0) -> list[RequestRecord]:
    times = [i / rate for i in range(int(rate * seconds))]
    return [
        RequestRecord(
            request_id=str(i), arrival=t, input_tokens=1, token_times=[service(t)], ended=service(t),
            finish=FinishReason.LENGTH,
        )
        for i, t in enumerate(times)
    ]  # fmt: skip


def test_a_growing_backlog_is_seen() -> None:
    """Served at 80 % of the offered rate, a fifth of the arrivals stays behind; a steady queue does not grow."""
    growing = records(5.0, lambda t: 1.0 + t / 0.8)
    assert backlog_growth(growing, 100.0) == pytest.approx(0.2 * 5.0 * 75, rel=0.1)
    steady = records(5.0, lambda t: t + 3.0)
    assert backlog_growth(steady, 100.0) < 1.0
    promise = parse_promise("e2e<100s")
    assert fold(steady, promise, rate=5.0, seed=0, seconds=100.0).kept
    worse = records(5.0, lambda t: 1.0 + t / 0.7)
    window = fold(worse, promise, rate=5.0, seed=0, seconds=100.0)
    assert not window.kept
    assert "the backlog grew by" in window.unstable
    assert window.figures["answered_per_second"] == pytest.approx(0.7 * 5.0, rel=0.05)
    assert "computed twice" in fold(steady, promise, rate=5.0, seed=0, seconds=100.0, recomputed=0.3).unstable


def queue(load: float, seed: int) -> list[RequestRecord]:
    """24 s of Poisson arrivals at 32 seats with exponential service, filled to ``load`` of what they carry."""
    draw = random.Random(seed)
    rate, seats = 12.0, [0.0] * 32
    found: list[RequestRecord] = []
    t = draw.expovariate(rate)
    while t < 24.0:
        end = max(t, heapq.heappop(seats)) + draw.expovariate(rate / (32 * load))
        heapq.heappush(seats, end)
        found.append(
            RequestRecord(
                request_id=str(len(found)), arrival=t, input_tokens=1, token_times=[end], ended=end,
                finish=FinishReason.LENGTH,
            )
        )  # fmt: skip
        t += draw.expovariate(rate)
    return found


def test_a_busy_queue_has_its_ups_and_downs() -> None:
    """Of 100 runs at 90 % of what a queue carries hardly one looks as if it could not last, at 160 % nearly all do."""
    promise = parse_promise("e2e<1000s")

    def flagged(load: float) -> int:
        windows = [fold(queue(load, seed), promise, rate=12.0, seed=seed, seconds=24.0) for seed in range(100)]
        return sum(bool(window.unstable) for window in windows)

    assert flagged(0.9) <= 3
    assert flagged(1.6) >= 90


def test_a_class_is_read_and_bad_ones_are_named() -> None:
    """Name, weight, lengths of prompts and answers."""
    [chat] = parse_kinds("random", ["chat 3 32-64 exp:20:90"], "1", "1")
    assert (chat.name, chat.weight) == ("chat", 3.0)
    for text, words in (("chat 3 32", "NAME WEIGHT"), ("chat x 1 1", "weight of class 'chat'"), ("c 0 1 1", "above 0")):
        with pytest.raises(ValueError, match=words):
            parse_kinds("random", [text], "1", "1")


def test_estimates_of_nothing() -> None:
    """No windows, no estimate."""
    assert estimate([], 0.95) is None


def test_the_simulator_says_where_a_live_search_begins() -> None:
    """hopon's own scheduler behind a scripted server in virtual time, and a simulation of it: the first window is at
    the predicted rate, both answers are told beside each other, and they agree.
    """
    load = Load(kinds=parse_kinds("random", (), "20-40", "20-40"))
    promise = parse_promise("ttft<1s")
    step = Linear(base=0.02, per_sequence=0.0, per_prompt_token=0.0)
    config = SchedulerConfig(
        num_blocks=4096, block_size=16, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=256
    )
    simulated = Simulated(load=load, promise=promise, config=config, policy=make_preset("hopon", {}).policy, cost=step)
    said: list[str] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def begin() -> PresetServer:
            return PresetServer("hopon", {}, seats=4, step=0.02)

        server = runner.run(begin())
        text = run_live(
            Target(url=server.server.url, model="m"), load, promise, Wanted(max_windows=16),
            Writer(lowest=10, vocab_size=1000), {}, say=said.append, simulated=simulated, runner=runner,
        )  # fmt: skip
        runner.run(server.close())
    predicted = predict(simulated)
    assert predicted is not None
    assert said[0] == f"predicted: {predicted.rate:.3g}/s"
    assert said[1].split()[:2] == ["bracket", f"{predicted.rate:.3g}/s"]
    found = re.search(r"predicted by the simulator: .*, ([+-]\d+)% of what was measured", text)
    assert found is not None, text
    assert abs(int(found[1])) <= 15


def test_a_machine_with_bad_minutes_carries_less() -> None:
    """Every window has one of the paces, always the same one; where half of them are slow, the limit is theirs."""
    load = Load(kinds=parse_kinds("random", (), "20-40", "20-40"))
    config = SchedulerConfig(
        num_blocks=4096, block_size=16, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=256
    )
    steady = Simulated(
        load=load,
        promise=parse_promise("ttft<1s"),
        config=config,
        policy=make_preset("hopon", {}).policy,
        cost=Linear(base=0.02, per_sequence=0.0, per_prompt_token=0.0),
    )
    drifting = replace(steady, paces=(1.0, 1.3))
    windows = [drifting.measure(3.0, seed, 20.0) for seed in range(12)]
    assert windows == [drifting.measure(3.0, seed, 20.0) for seed in range(12)]
    fast, slow = (replace(steady, paces=(pace,)) for pace in drifting.paces)
    assert all(
        window in (fast.measure(3.0, seed, 20.0), slow.measure(3.0, seed, 20.0)) for seed, window in enumerate(windows)
    )
    rates = []
    for target in (steady, drifting, slow):
        found = predict(target)
        assert found is not None
        rates.append(found.rate)
    assert rates[0] > 1.1 * rates[1] > 1.05 * rates[2]


def test_a_search_of_a_served_model_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that hopon starts has another port every time; the search is the same one."""
    path, ports = tmp_path / "search.json", iter((1001, 1002, 1003))

    @contextmanager
    def served(*given: Any) -> Iterator[Target]:
        yield Target(url=f"http://127.0.0.1:{next(ports)}", model="m")

    def run_live(target: Target, load: Load, promise: Any, wanted: Wanted, writer: Writer, about: Any, **_: Any) -> str:
        if wanted.resume:
            return f"{len(files.read(path, about)[1])} windows known"
        files.write(path, about, Plan(start=1.0, seconds=1.0), [], None)
        return "begun"

    monkeypatch.setattr("hopon.cli.capacity.served", served)
    monkeypatch.setattr("hopon.capacity.command.run_live", run_live)
    runner, words = CliRunner(), ["--json", str(path)]
    assert "begun" in runner.invoke(command_line, ["capacity", "tiny", *words]).output
    assert "0 windows known" in runner.invoke(command_line, ["capacity", "tiny", *words, "--resume"]).output
    other = runner.invoke(command_line, ["capacity", "large", *words, "--resume"])
    assert "server was 'tiny' and is 'large' now" in str(other.exception)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--max-windows", "3"), "at most 3 windows are fewer than at least 12"),
        (("--half-width", "0"), "half_width must be above 0, got 0"),
        (("--start", "-1"), "start must be above 0, got -1"),
    ],
)
def test_a_search_that_cannot_be_starts_no_server(
    words: tuple[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by name at once."""
    monkeypatch.setattr("hopon.cli.capacity.served", lambda *given: pytest.fail("a server was started"))
    assert reason in str(CliRunner().invoke(command_line, ["capacity", "tiny", *words]).exception)


@pytest.mark.parametrize(
    ("slo", "rate", "seconds"),
    [
        ("ttft<1s", 0.5, 40.0),
        ("ttft<1s", 5.0, 27.0),
        ("ttft<1s", 100.0, 10.0),
        ("ttft<1s e2e<15s", 100.0, 30.0),
        ("chat: ttft<1s; background: e2e<60s", 100.0, 40.0),
        ("tpot<50ms", 100.0, 10.0),
    ],
)
def test_rate_and_promise_decide_how_long_a_window_is(slo: str, rate: float, seconds: float) -> None:
    """A hundred requests behind the warm-up and twice the longest limit, within bounds; or the seconds asked for."""
    assert Wanted().plan(parse_promise(slo), rate).seconds == seconds
    assert Wanted(seconds=3.0).plan(parse_promise(slo), rate).seconds == 3.0
