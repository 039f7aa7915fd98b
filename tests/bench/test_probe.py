"""The probe tells static, dynamic and continuous batching apart by when newcomers are let in."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from hopon.bench.probe import Verdict, judge, probe
from hopon.bench.records import Record
from hopon.bench.schedule import Writer
from hopon.bench.server import serve
from hopon.bench.target import Target, TargetError
from tests.bench.preset_server import PresetServer
from tests.bench.virtual import Call, Server, virtual

STORIES = Path(__file__).parents[1] / "data" / "stories260k"


def find_out(preset: str, knobs: str = "", *, seats: int = 16, whole: bool = False) -> Verdict:
    async def main() -> Verdict:
        made = dict(word.split("=") for word in knobs.split())
        server = PresetServer(preset, made, seats=seats, whole=whole)
        try:
            return await probe(Target(url=server.server.url, model="m"), Writer())
        finally:
            await server.close()

    return virtual(main, latency=0.0005)


@pytest.mark.parametrize("seats", [4, 16])
@pytest.mark.parametrize("preset", ["hopon", "vllm", "orca", "sarathi", "tgi", "lightllm", "sglang", "llama-cpp"])
def test_continuous_systems_are_continuous(preset: str, seats: int) -> None:
    """With free seats and without, whatever the preset's name: newcomers join while others run."""
    verdict = find_out(preset, seats=seats)
    assert verdict.kind == "continuous", verdict.text()
    assert verdict.joins > 0


@pytest.mark.parametrize("delivery", ["batch", "stream"])
@pytest.mark.parametrize("group", ["group_size=4 max_wait=2", "max_wait=2", "group_size=3 max_wait=3"])
def test_static_batching_is_static_streamed_or_not(group: str, delivery: str) -> None:
    """A group that nobody may join is static, also when its tokens are streamed."""
    verdict = find_out("static", f"{group} delivery={delivery}")
    assert verdict.kind == "static", verdict.text()
    assert verdict.streams is (delivery == "stream")
    assert verdict.lone_wait == pytest.approx(float(group[-1]), abs=0.2)


def test_a_group_that_is_waited_for_for_ever_is_static() -> None:
    """Where a lone request is never answered, company releases it."""
    verdict = find_out("static", "group_size=4")
    assert (verdict.kind, verdict.lone_wait) == ("static", None), verdict.text()


@pytest.mark.parametrize("delivery", ["batch", "stream"])
@pytest.mark.parametrize(
    ("knobs", "delay"), [("", 0.0), ("preferred_batch_size=4,8 max_queue_delay_microseconds=300000", 0.3)]
)
def test_dynamic_batching_is_dynamic(knobs: str, delay: float, delivery: str) -> None:
    """Whole requests in batches of whatever is there, at once or after a delay."""
    verdict = find_out("dynamic", f"{knobs} delivery={delivery}")
    assert verdict.kind == "dynamic", verdict.text()
    assert verdict.lone_wait == pytest.approx(delay, abs=0.2)


@pytest.mark.parametrize("seats", [4, 16])
def test_a_continuous_server_that_does_not_stream(seats: int) -> None:
    """Answers told as a whole, each at its own end: continuous all the same."""
    assert find_out("hopon", seats=seats, whole=True).kind == "continuous"


def _stream(sent: float, times: list[float]) -> Record:
    return Record(number=0, arrival=sent, piece_times=array("d", times), output_tokens=len(times), ended=times[-1])


def test_without_overlap_there_is_no_verdict() -> None:
    """If nobody came while others ran, nothing can be said."""
    longs = [_stream(0.0, [k / 10 for k in range(1, 20)]) for _ in range(4)]
    assert judge(longs, [_stream(5.0, [5.1])], 0.0).kind == "inconclusive"


def test_a_failing_server_is_named() -> None:
    """A refusal ends the probe with the server's words."""

    async def script(call: Call) -> None:
        call.reply(503, "full")

    async def main() -> None:
        await probe(Target(url=Server(script).url, model="m"), Writer())

    with pytest.raises(TargetError, match="HTTP 503: full"):
        virtual(main)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ((), "continuous"),
        (("--policy", "static", "--policy-knob", "max_wait=1.5"), "static"),
        (("--policy", "dynamic"), "dynamic"),
    ],
)
def test_real_servers_are_told_apart(flags: tuple[str, ...], kind: str) -> None:
    """`hopon serve` under three policies, over HTTP."""
    with serve(str(STORIES), ("--dtype", "f32", "--threads", "1", *flags)) as started:
        target = Target(url=started.url, model=str(STORIES.name))
        verdict = asyncio.run(probe(target, Writer(vocab_size=512), num_streams=6, tokens=100))
    assert verdict.kind == kind, verdict.text()
