"""Messages, framing, and both ends of the socket between the API process and the engine process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import Abort, EngineStats, Shutdown
from hopon.core.types import Delta, FinishReason, Logprob, Request, SamplingParams
from hopon.serve import wire
from hopon.serve.client import ConsumerGoneError, EngineClient, Mailbox
from hopon.serve.link import EngineError, EngineHandle
from hopon.serve.process import SocketInbox, import_factory

STATS = EngineStats(
    num_running=1,
    num_waiting=0,
    num_blocks=4,
    num_used_blocks=1,
    num_steps=1,
    num_scheduled_tokens=1,
    num_padding_tokens=0,
    num_generated_tokens=1,
    num_prompt_tokens=1,
    num_preemptions=0,
    num_recomputed_tokens=0,
    num_moved_blocks=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)
CONFIG = SchedulerConfig(num_blocks=4, max_model_len=64)


def request(name: str = "r") -> Request:
    return Request(request_id=name, prompt=(1, 2), params=SamplingParams(stop=("x",), logprobs=2), seed=2**64 - 1)


def delta(index: int, *tokens: int, name: str = "r", finish: FinishReason | None = None) -> Delta:
    return Delta(request_id=name, time=1.0, index=index, tokens=tokens, finish=finish)


def test_messages_survive_the_wire() -> None:
    """Every message comes out as it went in, 64-bit seeds and log-probabilities included."""
    told = Delta(request_id="r", time=1.5, tokens=(3,), logprobs=(Logprob(3, -0.5, ((3, -0.5),)),), admitted=1.0)
    up: list[wire.ToEngine] = [
        wire.Start("a:b", EngineOptions(model="m"), 3),
        wire.Submit(request()),
        wire.Cancel("r"),
        wire.Stop(),
    ]
    down: list[wire.FromEngine] = [
        wire.Loading("weights", 0.5),
        wire.Ready(CONFIG, {"dtype": "f32", "threads": 2}, 3),
        wire.Step(3, ("r", "s")),
        wire.News(3, [told, delta(1, finish=FinishReason.LENGTH)], STATS),
        wire.Failed("why", expected=True),
    ]
    assert [wire.to_engine.decode(wire.frame(message)[4:]) for message in up] == up
    assert [wire.from_engine.decode(wire.frame(message)[4:]) for message in down] == down


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=6), st.lists(st.integers(1, 30), max_size=40))
def test_frames_survive_any_cut(names: list[str], cuts: list[int]) -> None:
    """However the stream is cut into reads, the same messages come out."""
    stream = b"".join(wire.frame(wire.Cancel(name)) for name in names)
    frames = wire.Frames()
    out: list[wire.ToEngine] = []
    for size in [*cuts, len(stream) + 1]:
        out += [wire.to_engine.decode(body) for body in frames.feed(stream[:size])]
        stream = stream[size:]
    assert out == [wire.Cancel(name) for name in names]


def test_a_damaged_stream_is_an_error() -> None:
    """A length that cannot be is not waited for."""
    with pytest.raises(ValueError, match="damaged"):
        list(wire.Frames().feed(b"\xff\xff\xff\xff"))


def test_inbox_waits_drains_and_ends() -> None:
    """Commands arrive in order, also in parts; an empty socket costs no wait; a closed one is a Shutdown."""
    ours, theirs = socket.socketpair()
    inbox = SocketInbox(theirs)
    assert inbox.drain(0.0) == []
    assert inbox.drain(0.01) == []
    data = wire.frame(wire.Submit(request())) + wire.frame(wire.Cancel("r"))
    ours.sendall(data[:-3])
    assert inbox.drain(None) == [request()]
    threading.Timer(0.05, ours.sendall, [data[-3:]]).start()
    assert inbox.drain(None) == [Abort("r")]
    ours.sendall(wire.frame(wire.Stop()))
    assert inbox.drain(0.0) == [Shutdown()]
    ours.close()
    assert inbox.drain(None) == [Shutdown()]
    theirs.close()


@pytest.mark.parametrize("name", ["nowhere", "hopon.core.types:nothing", "hopon.core.types:MAX_LOGPROBS"])
def test_bad_factory_names_are_errors(name: str) -> None:
    """The name is quoted in the error."""
    with pytest.raises(ValueError, match=name.rpartition(":")[2]):
        import_factory(name)


# ---- the client, against a scripted engine at the other end of the socket ----


class ScriptedEngine:
    """The engine's end of a client's socket; its process is one that sleeps."""

    def __init__(self, incarnation: int = 1) -> None:
        ours, self.sock = socket.socketpair()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.handle = EngineHandle(process=self.process, sock=ours, incarnation=incarnation)

    def send(self, *messages: wire.FromEngine) -> None:
        self.sock.sendall(b"".join(map(wire.frame, messages)))

    async def heard(self, count: int) -> list[wire.ToEngine]:
        """The next so many messages."""
        self.sock.setblocking(False)
        frames, messages = wire.Frames(), list[wire.ToEngine]()
        while len(messages) < count:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
            messages += [wire.to_engine.decode(body) for body in frames.feed(data)]
        assert len(messages) == count, messages
        return messages

    def leave(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.sock.close()


async def attached(engine: ScriptedEngine) -> EngineClient:
    engine.send(wire.Ready(CONFIG, {}, 1))
    return await EngineClient.attach(engine.handle)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_news_goes_to_its_mailbox_and_piles_up() -> None:
    """Deltas of several requests go to one mailbox by slot; what has piled up is handed out at once."""
    engine = ScriptedEngine()
    client = await attached(engine)
    mailbox = Mailbox()
    client.submit(request("a"), mailbox, 0)
    client.submit(request("b"), mailbox, 1)
    engine.send(wire.News(1, [delta(0, 5, name="a"), delta(0, 6, name="b")], STATS))
    engine.send(wire.News(1, [delta(1, 7, name="a", finish=FinishReason.LENGTH)], STATS))
    await until(lambda: client.num_open == 1)
    news = await mailbox.get()
    assert [(slot, d.tokens) for slot, d in news] == [(0, (5,)), (1, (6,)), (0, (7,))]
    engine.leave()
    await client.close()


async def test_what_cannot_be_sent_is_not_open() -> None:
    """A request that no message can hold is an error of its own, and leaves nothing behind."""
    engine = ScriptedEngine()
    client = await attached(engine)
    too_large = replace(request("a"), priority=2**70)
    with pytest.raises(OverflowError):
        client.submit(too_large, Mailbox())
    assert client.num_open == 0
    engine.leave()
    await client.close()


async def test_an_aborted_request_hears_nothing_more() -> None:
    """News that was under way when a request was aborted is dropped."""
    engine = ScriptedEngine()
    client = await attached(engine)
    mailbox = Mailbox()
    ticket = client.submit(request("a"), mailbox)
    other = Mailbox()
    client.submit(request("b"), other)
    client.abort(ticket)
    client.abort(ticket)
    engine.send(wire.News(1, [delta(0, 5, name="a"), delta(0, 6, name="b")], STATS))
    assert (await other.get())[0][1].tokens == (6,)
    assert client.num_open == 1
    engine.leave()
    await client.close()


@pytest.mark.parametrize("news", [wire.News(1, [delta(1, 5)], STATS), wire.News(2, [delta(0, 5)], STATS)])
async def test_only_the_next_output_of_this_engine_is_accepted(news: wire.News) -> None:
    """A gap in the output, or news of another incarnation, ends the connection; open requests get an error."""
    engine = ScriptedEngine()
    client = await attached(engine)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    mailbox = Mailbox()
    client.submit(request(), mailbox)
    engine.send(news)
    await client.dead.wait()
    [(_, last)] = await mailbox.get()
    assert last.finish is FinishReason.ERROR
    with pytest.raises(EngineError):
        client.submit(request("again"), mailbox)
    engine.leave()
    await client.close()


async def test_replay_keeps_the_order_and_what_was_delivered() -> None:
    """Suspects first, in halves, then everybody in order of arrival behind what was delivered. Scores that were told
    are not asked for again, what was first told of an admission stays, and a newcomer waits for his turn."""
    first, second = ScriptedEngine(), ScriptedEngine(2)
    first.send(wire.Ready(CONFIG, {}, 1))
    client = await EngineClient.attach(first.handle, relaunch=lambda incarnation, config: second.handle)
    mailbox = Mailbox()
    scored = replace(request("b"), params=SamplingParams(prompt_logprobs=0), priority=-3)
    for slot, asked in enumerate((request("a"), scored, request("c"))):
        client.submit(asked, mailbox, slot)
    score = Delta(request_id="b", time=1.0, index=0, prompt_logprobs=(Logprob(2, -1.0),), admitted=1.0, cached_tokens=1)
    first.send(wire.Step(1, ("a", "b")), wire.News(1, [delta(0, 5, name="a"), score], STATS))
    await until(lambda: client.stats is not None)
    first.leave()
    await until(lambda: client.num_deaths == 1)
    client.submit(request("d"), mailbox, 3)
    second.send(wire.Ready(CONFIG, {}, 2))
    assert await second.heard(1) == [wire.Submit(replace(request("a"), output=(5,)))]
    second.send(wire.Step(2, ("a",)), wire.News(2, [delta(1, 7, name="a")], STATS))
    unscored = replace(scored, params=SamplingParams())
    assert await second.heard(2) == [wire.Cancel("a"), wire.Submit(unscored)]
    told = Delta(request_id="b", time=2.0, tokens=(8,), admitted=2.0, cached_tokens=0)
    second.send(wire.News(2, [delta(2, 9, name="a"), told], STATS))
    assert await second.heard(1) == [wire.Cancel("b")]
    gone = [delta(3, name="a", finish=FinishReason.ABORT), delta(1, name="b", finish=FinishReason.ABORT)]
    second.send(wire.News(2, gone[:1], STATS))
    await asyncio.sleep(0.05)
    second.send(wire.News(2, gone[1:], STATS))
    assert await second.heard(4) == [
        wire.Submit(replace(request("a"), output=(5, 7, 9))),
        wire.Submit(replace(unscored, output=(8,))),
        wire.Submit(request("c")),
        wire.Submit(request("d")),
    ]
    news = [(slot, d.index, d.tokens, d.cached_tokens, d.admitted) for slot, d in await mailbox.get()]
    assert news == [
        (0, 0, (5,), 0, None),
        (1, 0, (), 1, 1.0),
        (0, 1, (7,), 0, None),
        (0, 2, (9,), 0, None),
        (1, 0, (8,), 1, 1.0),
    ]
    assert client.num_replayed_requests == 3
    assert client.num_replayed_tokens == 3
    second.leave()
    await client.close()


async def test_an_engine_that_skips_an_output_is_replaced() -> None:
    """A gap in the output: that engine is ended, and the next one is asked for what is missing."""
    first, second = ScriptedEngine(), ScriptedEngine(2)
    first.send(wire.Ready(CONFIG, {}, 1))
    client = await EngineClient.attach(first.handle, relaunch=lambda incarnation, config: second.handle)
    mailbox = Mailbox()
    client.submit(request("a"), mailbox)
    first.send(wire.News(1, [delta(0, 5, name="a"), delta(2, 7, name="a")], STATS))
    second.send(wire.Ready(CONFIG, {}, 2))
    assert await second.heard(1) == [wire.Submit(replace(request("a"), output=(5,)))]
    assert first.process.poll() is not None
    second.send(wire.News(2, [delta(1, 6, name="a", finish=FinishReason.LENGTH)], STATS))
    await until(lambda: client.num_open == 0)
    assert [d.tokens for _, d in await mailbox.get()] == [(5,), (6,)]
    first.leave()
    second.leave()
    await client.close()


async def test_counters_of_all_engines_add_up() -> None:
    """What a dead engine counted stays counted; its gauges do not."""
    first, second = ScriptedEngine(), ScriptedEngine(2)
    first.send(wire.Ready(CONFIG, {}, 1))
    client = await EngineClient.attach(first.handle, relaunch=lambda incarnation, config: second.handle)
    client.submit(request("a"), Mailbox())
    first.send(wire.News(1, [delta(0, 5, name="a")], STATS))
    await until(lambda: client.stats is not None)
    first.leave()
    await until(lambda: client.num_deaths == 1)
    assert client.stats == replace(STATS, num_running=0, num_used_blocks=0, num_waiting=1)
    second.send(wire.Ready(CONFIG, {}, 2))
    await second.heard(1)
    second.send(wire.News(2, [delta(1, 6, name="a")], STATS))
    await until(lambda: client.stats is not None and client.stats.num_steps == 2)
    assert client.stats == replace(
        STATS, num_steps=2, num_scheduled_tokens=2, num_generated_tokens=2, num_prompt_tokens=2
    )
    second.leave()
    await client.close()


async def test_an_engine_that_cannot_load_says_why() -> None:
    """attach raises the engine's last words."""
    engine = ScriptedEngine()
    engine.send(wire.Failed("no such file: model.gguf", expected=True))
    threading.Timer(0.05, engine.leave).start()
    with pytest.raises(EngineError, match=r"no such file: model\.gguf"):
        await EngineClient.attach(engine.handle)


async def test_a_consumer_that_left_is_told() -> None:
    """leave() wakes whoever waits."""
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.leave()
    with pytest.raises(ConsumerGoneError):
        await waiting
