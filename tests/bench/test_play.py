"""The generator tells the truth: against servers with known times the figures are those of the closed forms."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import pytest

from hopon.bench.play import play
from hopon.bench.records import CUT, Records
from hopon.bench.report import to_json
from hopon.bench.schedule import Schedule, Session, Turn, Writer, conversations, from_workload
from hopon.bench.summary import parse_slo, summarise
from hopon.bench.target import Target
from hopon.metrics import percentiles
from hopon.workload.draw import arrival_times, draw
from hopon.workload.lengths import Uniform
from tests.bench.virtual import Call, Script, Server, VirtualLoop, slots, steady, virtual


def schedule_of(times: Sequence[float], max_tokens: int = 4, **more: Any) -> Schedule:
    turn = Turn(content="hello", max_tokens=max_tokens)
    sessions = tuple(Session(turns=(turn,), arrival=time) for time in times)
    return Schedule(sessions=sessions, name="test", writer=Writer(), **more)


async def run(script: Script, schedule: Schedule, **target: Any) -> tuple[Records, Server]:
    server = Server(script)
    records = await play(Target(url=server.url, model="m", **target), schedule)
    return records, server


def measured(script: Script, schedule: Schedule, **target: Any) -> Records:
    return virtual(lambda: run(script, schedule, **target))[0]


def every(gap: float, count: int) -> list[float]:
    return [gap * place for place in range(count)]


def test_figures_of_a_steady_server_are_exact() -> None:
    """TTFT, ITL, TPOT and E2E of a server that answers like clockwork are the clock's."""
    records = measured(steady(0.3, 0.05), schedule_of(every(0.1, 50), max_tokens=11))
    served = summarise(records).served
    for values, expected in ((served.ttft, 0.3), (served.itl, 0.05), (served.tpot, 0.05), (served.e2e, 0.8)):
        assert [values.p50, values.p99] == pytest.approx([expected, expected])
    assert served.seconds == pytest.approx(4.9 + 0.8)
    assert served.output_tokens == 550
    assert served.output_tokens_per_second == pytest.approx(550 / 5.7)


def test_latency_counts_the_network_and_the_new_connection() -> None:
    """With 20 ms one way, a first request pays for connecting, sending and receiving; one on a kept connection less."""
    schedule = schedule_of([0.0, 10.0], max_tokens=1)
    first, second = virtual(lambda: run(steady(0.3, 0.0), schedule), latency=0.02)[0].calls
    assert first.ttft == pytest.approx(0.02 + 0.02 + 0.3 + 0.02)
    assert second.ttft == pytest.approx(0.02 + 0.3 + 0.02)


def test_open_loop_never_waits_for_a_frozen_server() -> None:
    """A server that never answers gets every request at its time, and each of them times out by itself."""

    async def frozen(call: Call) -> None:
        await asyncio.sleep(1e6)

    async def main() -> tuple[Records, Server]:
        return await run(frozen, schedule_of(every(0.01, 500)), timeout=60.0)

    records, server = virtual(main)
    assert [call.arrived for call in server.calls] == pytest.approx(every(0.01, 500))
    summary = summarise(records)
    assert summary.errors == {"timeout": 500}
    assert summary.peak_open == 500
    assert summary.served.ttft.count == 0
    assert all(call.ended == pytest.approx(call.arrival + 60) for call in records.calls)


def test_v101_a_role_frame_is_no_token_and_reasoning_is_one() -> None:
    """The role frame at 0 ms is not the first token; the thought at 300 ms is; the text at 500 ms is the second."""

    async def script(call: Call) -> None:
        call.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.3)
        call.event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
        await asyncio.sleep(0.2)
        call.event({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]})
        call.end(2, reason=None)

    [call] = measured(script, schedule_of([0.0]), chat=True).calls
    assert [call.ttft, call.e2e, call.tpot] == pytest.approx([0.3, 0.5, 0.2])
    assert call.reason == "stop"


def test_v102_an_answer_of_one_piece_has_its_time_and_usage_none() -> None:
    """One piece at 200 ms and the usage frame at 900 ms: TTFT and E2E are 200 ms."""

    async def script(call: Call) -> None:
        await asyncio.sleep(0.2)
        call.text("x", finish_reason="length")
        await asyncio.sleep(0.7)
        call.end(1, reason=None)

    [call] = measured(script, schedule_of([0.0])).calls
    assert [call.ttft, call.e2e, call.ended] == pytest.approx([0.2, 0.2, 0.9])


def test_v103_pieces_of_several_tokens_count_as_many() -> None:
    """Ten pieces of four tokens every 400 ms: TPOT is 3.6 s / 39, and 400 ms is the gap between pieces only."""
    records = measured(steady(0.4, 0.4, per_piece=4), schedule_of([0.0], max_tokens=40))
    summary = summarise(records)
    assert summary.served.output_tokens == 40
    assert summary.served.tpot.p50 == pytest.approx(3.6 / 39)
    assert summary.served.itl.count == 9
    assert summary.served.itl.p50 == pytest.approx(0.4)
    assert summary.pieces == 10


@pytest.mark.parametrize("told", ["usage", "token ids", "pieces"])
def test_tokens_are_counted_by_the_best_that_the_server_tells(told: str) -> None:
    """Usage goes before token ids, and these before pieces; what was used is said, and pieces are warned about."""

    async def script(call: Call) -> None:
        ids = {} if told == "pieces" else {"token_ids": [1, 2, 3]}
        call.text("abc", **ids)
        await asyncio.sleep(0.1)
        call.text("abc", **ids)
        call.end(7 if told == "usage" else None)

    records = measured(script, schedule_of([0.0], max_tokens=7))
    assert records.calls[0].output_tokens == {"usage": 7, "token ids": 6, "pieces": 2}[told]
    summary = summarise(records)
    assert summary.counted_by == {told: 1}
    assert any("no usage" in warning for warning in summary.warnings) is (told == "pieces")


def test_v104_failed_and_empty_answers_are_errors_and_broken_promises() -> None:
    """3 of 10 get HTTP 500, 1 of 10 an empty stream: four errors, no latency of theirs, and goodput without them."""

    async def script(call: Call) -> None:
        place = round(call.arrived * 10) % 10
        if place in (0, 3, 6):
            call.reply(500, '{"error": "no"}')
        elif place == 9:
            call.end(0)
        else:
            await steady(0.2, 0.1)(call)

    records = measured(script, schedule_of(every(0.1, 100)))
    summary = summarise(records, parse_slo("ttft<1s"))
    assert summary.errors == {"HTTP 500": 30, "empty answer": 10}
    assert summary.messages["HTTP 500"] == '{"error": "no"}'
    assert summary.served.ttft.count == 60
    assert summary.served.ttft.mean == pytest.approx(0.2)
    assert summary.served.attainment == pytest.approx(0.6)


def test_v104_what_the_end_of_the_run_cuts_is_neither_good_nor_bad() -> None:
    """Requests that are open when the run is ended have no latency and break no promise."""

    async def script(call: Call) -> None:
        await steady(0.5 if call.arrived < 1 else 50.0, 0.0)(call)

    async def main() -> Records:
        server = Server(script)
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(2.05, stop.set)
        return await play(Target(url=server.url, model="m"), schedule_of(every(0.1, 100)), stop=stop)

    records = virtual(main)
    summary = summarise(records, parse_slo("e2e<1s"))
    assert records.interrupted
    assert len(records.calls) == 21
    assert (summary.cut, summary.served.requests, summary.served.attainment) == (11, 10, 1.0)
    assert [call.error for call in records.calls] == [""] * 10 + [CUT] * 11
    assert any("ended early" in warning for warning in summary.warnings)


def test_v105_spaces_are_tokens_if_the_server_says_so() -> None:
    """A text of 15 spaces is 15 tokens: nothing is tokenized again."""

    async def script(call: Call) -> None:
        call.text(" " * 15)
        call.end(15)

    assert measured(script, schedule_of([0.0], max_tokens=15)).calls[0].output_tokens == 15


def test_v108_no_limit_of_the_client_s_own() -> None:
    """300 requests at once against a server of 2 s: all are open at once and none is slower."""
    records, server = virtual(lambda: run(slots(300, 2.0), schedule_of([0.0] * 300)))
    summary = summarise(records)
    assert summary.peak_open == 300
    assert max(call.arrived for call in server.calls) == pytest.approx(0.0)
    assert summary.served.e2e.maximum == pytest.approx(2.0)


def test_v109_one_token_has_no_tpot_and_json_no_nan() -> None:
    """Answers of one token have neither ITL nor TPOT; the file has null there and no NaN anywhere."""
    records = measured(steady(0.1, 0.1), schedule_of([0.0, 1.0], max_tokens=1))
    summary = summarise(records)
    assert (summary.served.tpot.p50, summary.served.itl.p50, records.calls[0].tpot) == (None, None, None)
    text = json.dumps(to_json(_manifest(), summary, records), allow_nan=False)
    assert json.loads(text)["summary"]["served"]["tpot"]["p50"] is None


@pytest.mark.parametrize("kind", ["constant", "poisson"])
def test_v110_arrivals_at_the_server_are_spread_as_asked(kind: Any) -> None:
    """20 per second for 30 s: constant gaps do not vary, Poisson gaps vary by 1, and a seed always gives the same."""
    work = draw(count=600, rate=20.0, inputs=Uniform(4, 4), outputs=Uniform(1, 1), arrivals=kind, seed=3)
    logs = []
    for _ in range(2):
        _, server = virtual(lambda: run(steady(0.1, 0.0), from_workload(work, Writer())))
        logs.append([call.arrived for call in server.calls])
    assert logs[0] == logs[1]
    assert logs[0] == pytest.approx([ask.arrival for ask in work])
    gaps = [after - before for before, after in pairwise(logs[0])]
    variation = stdev(gaps) / mean(gaps)
    assert variation == pytest.approx(0.0, abs=1e-6) if kind == "constant" else 0.85 < variation < 1.15


def test_slots_under_constant_arrivals() -> None:
    """Four places of 0.5 s: at 8 per second nobody waits; at 10 the wait grows by the same step with every four."""
    easy = summarise(measured(slots(4, 0.5), schedule_of(every(1 / 8, 200), max_tokens=1)))
    assert easy.served.e2e.maximum == pytest.approx(0.5)
    assert easy.answered_rate == pytest.approx(200 / (199 / 8 + 0.5))
    records = measured(slots(4, 0.5), schedule_of(every(1 / 10, 200), max_tokens=1))
    # The k-th group of four is served in the k-th half second behind the places' first arrivals.
    expected = [0.5 * (place // 4 + 1) + 0.1 * (place % 4) - 0.1 * place for place in range(200)]
    assert [call.e2e for call in records.calls] == pytest.approx(expected)


def test_slots_under_poisson_arrivals() -> None:
    """Four places of 0.5 s under Poisson arrivals: every latency is that of the queue's recursion."""
    times = arrival_times(rate=6.0, count=2000, seed=5)
    records = measured(slots(4, 0.5), schedule_of(times, max_tokens=1))
    free = [0.0] * 4
    expected = []
    for time in times:
        start = max(time, min(free))
        free[free.index(min(free))] = start + 0.5
        expected.append(start + 0.5 - time)
    assert [call.e2e for call in records.calls] == pytest.approx(expected)
    assert summarise(records).served.e2e.p95 == pytest.approx(percentiles(expected, [95.0])[0])


def test_a_closed_loop_fills_its_places() -> None:
    """With three at once and 0.5 s each, ten requests take four rounds, and each starts when a place is free."""
    records = measured(slots(10, 0.5), schedule_of([0.0] * 10, max_tokens=1, concurrency=3))
    assert [call.arrival for call in records.calls] == pytest.approx([0.5 * (place // 3) for place in range(10)])
    summary = summarise(records)
    assert (summary.peak_open, summary.offered_rate) == (3, None)
    assert records.seconds == pytest.approx(2.0)


def test_a_limited_run_is_cut() -> None:
    """A closed loop of two seconds ends after two seconds."""
    schedule = schedule_of([0.0] * 1000, max_tokens=1, concurrency=2, limit=2.0)
    summary = summarise(measured(slots(9, 0.3), schedule))
    assert (summary.served.requests, summary.cut) == (12, 2)


def test_a_slow_client_is_told_and_latencies_count_from_the_intended_time() -> None:
    """The client's thread is busy for a second: requests due meanwhile are late, their TTFT says so, and it is told."""

    async def main() -> Records:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        server = Server(steady(0.1, 0.0))
        loop.call_at(1.03, loop.stall, 1.0)
        return await play(Target(url=server.url, model="m"), schedule_of(every(0.1, 40), max_tokens=1))

    records = virtual(main)
    for call in records.calls:
        late = max(0.0, 2.03 - call.arrival) if call.arrival > 1.05 else 0.0
        heard = 2.03 - call.arrival if call.arrival == pytest.approx(1.0) else 0.1 + late
        assert call.ttft == pytest.approx(heard), call.arrival
    summary = summarise(records)
    assert summary.send_delay.maximum == pytest.approx(0.93)
    assert any("could not keep up" in warning for warning in summary.warnings)
    assert any("event loop" in warning for warning in summary.warnings)
    steadfast = summarise(measured(steady(0.1, 0.0), schedule_of(every(0.1, 40), max_tokens=1)))
    assert steadfast.warnings == ()


def test_refused_broken_and_wrong_answers_are_told_apart() -> None:
    """Every way to fail has a name of its own, and none of them ends the run."""

    async def script(call: Call) -> None:
        match round(call.arrived):
            case 0:
                call.text("x")
                call.event({"error": {"message": "out of memory"}})
                call.end(1)
            case 1:
                call.text("x")
                await asyncio.sleep(0.1)
                call.hang_up()
            case 2:
                call.text("x")
                call.stop()
            case 3:
                call.event(b"<html>")
                call.end(1)
            case 4:
                call.reply(503, "full")
            case _:
                call.reply(200, json.dumps({"choices": [{"text": "x", "finish_reason": "stop"}]}))

    records = measured(script, schedule_of(every(1.0, 6), max_tokens=1))
    assert [call.error for call in records.calls] == [
        "error in the stream",
        "connection broken",
        "broken off",
        "not OpenAI's stream",
        "HTTP 503",
        "",
    ]
    assert "out of memory" in records.calls[0].message

    async def nobody() -> Records:
        return await play(Target(url="http://mock:81", model="m"), schedule_of([0.0]))

    assert virtual(nobody).calls[0].error == "connection refused"


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    """A server that closes idle connections after a while costs a new connection, not an error."""

    async def script(call: Call) -> None:
        await steady(0.1, 0.0)(call)
        await asyncio.sleep(1.0)
        call.hang_up()

    async def main() -> tuple[Records, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        server = Server(script)
        records = await play(Target(url=server.url, model="m"), schedule_of([0.0, 0.5, 1.1, 3.0], max_tokens=1))
        return records, loop.num_connections

    records, _ = virtual(main, latency=0.01)
    assert [call.error for call in records.calls] == [""] * 4


def test_turns_follow_answers_and_carry_them() -> None:
    """Each turn is sent its time to think after the answer before, and holds all that was said."""
    schedule = conversations(
        [0.0, 0.3],
        Writer(as_text=True),
        turns=Uniform(3, 3),
        inputs=Uniform(5, 5),
        outputs=Uniform(2, 2),
        think=2.0,
        seed=1,
    )

    async def script(call: Call) -> None:
        await asyncio.sleep(0.5)
        call.event({"choices": [{"delta": {"content": "yes "}}]})
        call.event({"choices": [{"delta": {"content": "no"}, "finish_reason": "stop"}]})
        call.end(2, reason=None)

    records, server = virtual(lambda: run(script, schedule, chat=True))
    assert len(records.calls) == 6
    first = [call for call in records.calls if call.session == 0]
    for before, after, turn in zip(first, first[1:], schedule.sessions[0].turns[1:], strict=False):
        assert before.ended is not None
        assert after.arrival == pytest.approx(before.ended + turn.think)
        assert after.ttft == pytest.approx(0.5)
    longest = max((call.body["messages"] for call in server.calls), key=len)
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == "yes no"


def test_the_server_s_numbers_are_on_the_run_s_timeline() -> None:
    """Waiting, running, KV use and preemptions are asked for every second, and preemptions of the run are counted."""

    async def main() -> Records:
        loop = asyncio.get_running_loop()

        def page() -> str:
            now = loop.time()
            return (
                f'vllm:num_requests_waiting{{engine="0"}} {now:.0f}\nvllm:num_requests_running 2\n'
                f"vllm:kv_cache_usage_perc 0.25\nvllm:num_preemptions_total {7 + 3 * now:.0f}\nother 1\n"
            )

        server = Server(steady(4.5, 0.0), metrics=page)
        return await play(Target(url=server.url, model="m"), schedule_of([0.0], max_tokens=1))

    records = virtual(main)
    assert [sample.time for sample in records.samples] == pytest.approx([0, 1, 2, 3, 4])
    assert [sample.waiting for sample in records.samples] == [0, 1, 2, 3, 4]
    assert {(sample.running, sample.kv_usage) for sample in records.samples} == {(2.0, 0.25)}
    assert summarise(records).preemptions == 12


def test_answers_of_another_length_are_told() -> None:
    """A server that does not honour the length asked for is named, since it did less work than was asked."""

    async def script(call: Call) -> None:
        call.text("x")
        call.end(1, reason="stop")

    summary = summarise(measured(script, schedule_of([0.0], max_tokens=5)))
    assert summary.unlike_asked == 1
    assert any("1 instead of 5" in warning for warning in summary.warnings)
    assert summarise(measured(script, schedule_of([0.0], max_tokens=5), ignore_eos=False)).warnings == ()


def _cdf(kind: str, gap: float) -> float:
    """Of gaps of mean 1: exponential, gamma of shape 4, gamma of shape 1/2."""
    match kind:
        case "poisson":
            return 1 - math.exp(-gap)
        case "steady":
            return 1 - math.exp(-4 * gap) * sum((4 * gap) ** k / math.factorial(k) for k in range(4))
        case _:
            return math.erf(math.sqrt(gap / 2))


@pytest.mark.parametrize(("kind", "shape"), [("poisson", 1.0), ("steady", 4.0), ("bursty", 0.5)])
def test_gaps_at_the_server_have_the_distribution_asked_for(kind: str, shape: float) -> None:
    """Kolmogorov-Smirnov at 1 %: 5,000 gaps as they arrive at the server, none clipped; others' do not pass."""
    rate = 50.0
    times = arrival_times(
        rate=rate,
        count=5001,
        arrivals="poisson" if kind == "poisson" else "gamma",
        variation=1 / math.sqrt(shape),
        seed=11,
    )
    _, server = virtual(lambda: run(steady(0.1, 0.0), schedule_of(times, max_tokens=1)))
    gaps = sorted(rate * (after.arrived - before.arrived) for before, after in pairwise(server.calls))
    critical = 1.63 / math.sqrt(len(gaps))

    def distance(of: str) -> float:
        size = len(gaps)
        return max(
            max(_cdf(of, gap) - place / size, (place + 1) / size - _cdf(of, gap)) for place, gap in enumerate(gaps)
        )

    assert distance(kind) < critical
    for other in {"poisson", "steady", "bursty"} - {kind}:
        assert distance(other) > critical
    assert len(set(gaps)) > 4990  # clipped gaps would be equal


def test_a_ramp_rises_on_a_straight_line() -> None:
    """From 2 to 10 per second in 600 requests: 100 s, of which each second has as many as the line says."""
    times = arrival_times(rate=2.0, end_rate=10.0, count=600, arrivals="constant")
    for moment in (10, 50, 90):
        expected = 2 * moment + 0.08 * moment * moment / 2
        assert sum(time < moment for time in times) == pytest.approx(expected, abs=1)
    assert times[-1] == pytest.approx(100, abs=0.2)


def _manifest() -> Any:
    from hopon.bench.manifest import Declared, describe

    async def main() -> Any:
        server = Server(steady(0.1, 0.1))
        return await describe(Target(url=server.url, model="m"), schedule_of([0.0]), Declared())

    return virtual(main)
