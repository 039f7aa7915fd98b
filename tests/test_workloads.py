"""The benchmark's requests, its reading of streams and its verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client import ARRIVAL, Played, play
from benchmarks.measure import ForeignCpu, median, percentile, summarise
from benchmarks.servers import Hopon
from benchmarks.workloads import NAMES, Ask, Crowd, Interference, workload
from hopon.bench.records import Record
from hopon.bench.target import TargetError
from hopon.serve.tokenizer import Tokenizer

DIGESTS = {
    "W1": "0abb2e278dafc9a843f46a94541ad3b854ca403c95cc7a421604c153af8e156a",
    "W2": "8f7e349f2fc6a1cd634cb49a6183b1e31cdc179a0e1223c9181c10702e8c5f2f",
    "W3": "cb2bdc8ded983abcecf4bc14463ea7a49a71c23268a98e4a36e305ea7ff180f0",
    "W4": "911179b33f80512b4abdcb612c0844ba8f43dfddbdbd5521db155555de71eb95",
    "W5 streams": "9bf9608c4cf1faa6f904ec77a4f450337ae0cd47c477b5bdd0519f45b4296b52",
    "W5 arrivals": "847540cd9dcba31927e39d79c1ee271d6f5c8ef46267eb122c5dbe6157dc16d1",
}
"""SHA-256 of [[text, ids, max_tokens], ...] as JSON, from the load generator that measured the published peers."""


class _Codec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _digest(asks: Sequence[Ask]) -> str:
    rows = [[ask.text, list(ask.ids), ask.max_tokens] for ask in asks]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def test_requests_are_those_of_the_published_measurements(smollm2: Path) -> None:
    """Every text, every id and every length of W1-W5 equals what the peers were measured with."""
    codec = _Codec(Tokenizer.load(smollm2))
    found = {}
    for name in NAMES:
        drawn = workload(name, codec)
        if isinstance(drawn, Crowd):
            found[name] = _digest(drawn.asks)
        else:
            found[f"{name} streams"] = _digest(drawn.streams)
            found[f"{name} arrivals"] = _digest(drawn.arrivals)
    assert found == DIGESTS


def test_an_unknown_workload_is_named() -> None:
    """Asking for a workload that does not exist says which there are."""

    class Never:
        def encode(self, text: str) -> list[int]:
            raise AssertionError("nothing to encode")

        def decode(self, ids: list[int]) -> str:
            raise AssertionError("nothing to decode")

    with pytest.raises(ValueError, match="W1, W2, W3, W4, W5, got 'W9'"):
        workload("W9", Never())


def _record(*times: float, **fields: Any) -> Record:
    count = {"input_tokens": 4, "output_tokens": len(times)}
    return Record(number=0, piece_times=array("d", times), **count | fields)


def _played(**fields: Any) -> Played:
    return Played(records=tuple(_record(0.3, 0.4, 0.6, **fields) for _ in range(2)), seconds=2.0)


PLAIN = Crowd(name="P", asks=(Ask("a", (1, 2), 3), Ask("b", (1, 3), 3)), concurrency=2)
REUSE = Crowd(name="R", asks=PLAIN.asks, concurrency=2, reuses_prefixes=True)


def test_numbers_of_a_run() -> None:
    """TTFT starts at sending, gaps are pooled over requests, rates are divided by the whole run."""
    run = summarise(PLAIN, "server", _played(cached_tokens=0), 0.01)
    assert run.void == ""
    assert (run.output_tokens, run.output_per_second, run.prompt_per_second) == (6, 3.0, 4.0)
    assert run.ttft_p50 == pytest.approx(0.3)
    assert run.itl_max == pytest.approx(0.2)
    assert run.itl_p50 == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("crowd", "cached", "void"),
    [
        (PLAIN, 0, ""),
        (PLAIN, 1, "switch it off"),
        (REUSE, 0, "switch it on"),
        (REUSE, 1, ""),
        (REUSE, 2, "it knew an earlier run"),
    ],
)
def test_v107_a_run_is_void_unless_the_cache_did_what_the_workload_means(crowd: Crowd, cached: int, void: str) -> None:
    """No hit where none is meant, some where reuse is meant, and never more than what the requests share."""
    run = summarise(crowd, "server", _played(cached_tokens=cached), None)
    assert void in run.void
    assert bool(run.void) == bool(void)


def test_v104_failed_requests_void_a_run_and_stay_out_of_its_latencies() -> None:
    """A request that failed has no latency, and a run with one does not count."""
    bad = _record(99.0, error="HTTP 500", message="broken")
    played = Played(records=(*_played().records, bad), seconds=2.0)
    run = summarise(PLAIN, "server", played, None)
    assert run.num_errors == 1
    assert run.ttft_p95 == pytest.approx(0.3)
    assert "1 of 3 requests failed, the first with: HTTP 500 broken" in run.void


def test_v109_one_piece_has_no_gap() -> None:
    """Answers of one piece give no inter-token latency, not zero and not a number that is none."""
    run = summarise(PLAIN, "server", Played(records=(_record(0.5),), seconds=1.0), None)
    assert (run.itl_p50, run.itl_max) == (None, None)


def test_the_median_is_of_the_runs_that_count() -> None:
    """A void run does not move a median; when all are void the median says so."""
    good = [summarise(PLAIN, "s", Played(records=_played().records, seconds=t), None) for t in (1, 2, 4)]
    void = summarise(PLAIN, "s", _played(cached_tokens=5), None)
    assert median([*good, void]).seconds == 2
    assert median([*good, void]).void == ""
    assert median([void]).void != ""


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1), share=st.floats(0, 1))
def test_percentiles_lie_within_and_never_fall(values: list[float], share: float) -> None:
    """A percentile lies between the extremes, and a larger share never gives less."""
    found = percentile(values, share)
    assert found is not None
    assert (
        min(values) <= found <= max(values)
        or found == pytest.approx(min(values))
        or found == pytest.approx(max(values))
    )
    lower = percentile(values, share / 2)
    assert lower is not None
    assert lower <= found or lower == pytest.approx(found)
    assert percentile([], share) is None


def test_own_processor_time_is_not_foreign() -> None:
    """Work of this process does not count as the work of others."""
    foreign = ForeignCpu([])
    total = sum(index * index for index in range(2_000_000))
    assert total > 0
    assert 0 <= foreign.share() <= 1


def test_a_server_of_our_own_is_counted_once() -> None:
    """A busy child that is also named as a server does not hide what others burn."""
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE)
    try:
        foreign = ForeignCpu([child.pid])
        once = ForeignCpu([])
        while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.5:
            time.sleep(0.05)
        (*_, named), (*_, unnamed) = foreign._read(), once._read()
        assert named == pytest.approx(unnamed, abs=0.1)
    finally:
        child.communicate(b"\n")


class _FakeServer:
    """Answers completions with one piece per token on a free port; remembers how many requests ran at once."""

    def __init__(self, cached: int) -> None:
        self.cached = cached
        self.now = self.most = self.asked = 0

    async def __aenter__(self) -> _FakeServer:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(0.001)
        usage = {
            "prompt_tokens": len(body["prompt"].split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        self.now -= 1
        return response


@pytest.fixture
async def fake_server() -> AsyncIterator[_FakeServer]:
    async with _FakeServer(cached=0) as server:
        yield server


async def test_v108_a_crowd_fills_its_places_and_no_more(fake_server: _FakeServer) -> None:
    """The client has no limit of its own: as many requests run at once as the workload says, and all are answered."""
    asks = tuple(Ask(f"one two {index}", (1, 2, index), 5) for index in range(250))
    played = await play(Crowd(name="C", asks=asks, concurrency=120), fake_server.url, "any")
    run = summarise(Crowd(name="C", asks=asks, concurrency=120), "fake", played, None)
    assert fake_server.most == 120
    assert (run.num_errors, run.output_tokens, run.prompt_tokens, run.pieces) == (0, 1250, 750, 1250)
    assert run.void == ""


async def test_streams_go_on_while_long_prompts_arrive(fake_server: _FakeServer) -> None:
    """Every long prompt is sent, and the streams' numbers leave them out."""
    plan = Interference(
        name="I",
        streams=(Ask("a", (1,), 3),),
        clients=2,
        arrivals=(Ask("a b c", (1, 2, 3), 1),) * 3,
        interval=0.05,
        seconds=0.3,
    )
    played = await play(plan, fake_server.url, "any")
    run = summarise(plan, "fake", played, None)
    arrivals = [record for record in played.records if record.kind == ARRIVAL]
    assert len(arrivals) == 3
    assert run.output_tokens == 3 * (len(played.records) - 3)
    assert run.void == ""


async def test_a_dead_server_is_an_error_of_every_request() -> None:
    """Where nobody listens, every record says so instead of an exception ending the benchmark."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    played = await play(PLAIN, f"http://127.0.0.1:{port}", "any")
    assert all(record.error == "connection refused" for record in played.records)


STORIES = Path(__file__).parent / "data" / "stories260k"


def test_a_server_of_our_own_is_measured() -> None:
    """The benchmark starts hopon, plays to it, sees what its cache did, and tells weights and KV from other memory."""
    hopon = Hopon("tiny", str(STORIES), ("--dtype", "f32", "--threads", "1", "--max-num-seqs", "8"))
    asks = tuple(
        Ask("Once upon a time there was a little girl who liked to play" + end, (1,) * 40, 8) for end in "abcd"
    )
    for caching in (False, True):
        crowd = Crowd(name="T", asks=asks, concurrency=2, reuses_prefixes=caching)
        with hopon.start(prefix_caching=caching) as server:
            run = summarise(crowd, server.label, asyncio.run(play(crowd, server.url, server.model)), None)
            assert run.void == ""
            assert (run.cached_tokens > 0) is caching
            assert (run.output_tokens, run.num_errors) == (32, 0)
            assert server.seconds_to_ready is not None
            assert "curl" in server.introduction()
            memory = server.memory()
            assert memory is not None
            assert memory.weights > 1_000_000
            assert 0 < memory.kv < memory.total
            assert memory.rest > 0


def test_a_server_that_does_not_start_says_why() -> None:
    """The benchmark ends with the server's own words."""
    with (
        pytest.raises(TargetError, match=r"block_size .* got 17"),
        Hopon("bad", str(STORIES), ("--block-size", "17")).start(prefix_caching=True),
    ):
        pytest.fail("it is not ready")
