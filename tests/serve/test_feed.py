"""How news gets from the engine's messages to a connection: on the spot, later for slow clients, never out of order."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from hopon.core.types import Delta, FinishReason, Request, SamplingParams
from hopon.serve.client import ConsumerGoneError
from hopon.serve.feed import Feed, Gathered
from hopon.serve.metrics import Metrics
from hopon.serve.output import Output, TextOptions
from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import Server, eventually


class Unheard:
    """Metrics of nobody."""

    def first_token(self, *args: object) -> None: ...

    def tokens(self, *args: object) -> None: ...

    def finished(self, *args: object, **kwargs: object) -> None: ...


def outputs(tokenizer: Tokenizer, count: int, stop: Sequence[str] = ()) -> list[Output]:
    metrics = cast(Metrics, Unheard())
    return [
        Output(
            Request(request_id=f"r{i}", prompt=(1,), params=SamplingParams(), seed=1),
            tokenizer,
            TextOptions(stop=tuple(stop)),
            metrics,
        )
        for i in range(count)
    ]


def delta(index: int, token: int, finish: FinishReason | None = None) -> Delta:
    return Delta(request_id="r", time=1.0, index=index, tokens=(token,), finish=finish)


async def test_news_is_taken_on_the_spot_only_while_somebody_waits(tokenizer: Tokenizer) -> None:
    """What comes while nobody waits piles up per output and is handed out together; nothing overtakes anything."""
    a, b, c = 100, 101, 102
    ended: list[int] = []
    feed = Feed(outputs(tokenizer, 2), lambda slot, now: ended.append(slot))
    seen: list[tuple[str, list[tuple[int, list[int]]]]] = []

    def note(where: str, gathered: Gathered) -> bool:
        seen.append((where, [(slot, list(news.tokens)) for slot, news in gathered.items()]))
        return True

    feed.take_now = lambda gathered: note("now", gathered)
    feed.put(0, delta(0, a))
    feed.flush()
    feed.put(1, delta(0, b))
    feed.put(0, delta(1, c))
    feed.flush()

    async def follow() -> None:
        async for gathered in feed:
            note("later", gathered)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0)
    feed.put(1, delta(1, c))
    feed.put(0, delta(2, b))
    feed.flush()
    feed.take_now = lambda gathered: False
    feed.put(0, delta(3, a))
    feed.flush()
    feed.take_now = lambda gathered: note("now", gathered)
    feed.put(0, delta(4, b, FinishReason.LENGTH))
    feed.put(1, delta(2, a, FinishReason.LENGTH))
    feed.flush()
    await task
    assert ended == [0, 1]
    assert seen == [
        ("later", [(0, [a, c]), (1, [b])]),
        ("now", [(1, [c]), (0, [b])]),
        ("later", [(0, [a, b]), (1, [a])]),
    ]


async def test_an_end_is_left_to_whoever_waits(tokenizer: Tokenizer) -> None:
    """A stop string ends an output before the engine knows: that is told at once, and what follows is dropped."""
    tokens = tokenizer.encode("say stop and more", add_special_tokens=False)
    ended: list[int] = []
    feed = Feed(outputs(tokenizer, 1, stop=("stop",)), lambda slot, now: ended.append(slot))
    taken: list[str] = []

    def take(gathered: Gathered) -> bool:
        taken.append(gathered[0].text)
        return True

    feed.take_now = take
    waiting = asyncio.create_task(anext(feed))
    await asyncio.sleep(0)
    for i, token in enumerate(tokens):
        feed.put(0, delta(i, token))
        feed.flush()
    last = (await waiting)[0]
    assert ended == [0]
    assert last.finish is FinishReason.STOP
    assert "".join(taken) + last.text == "say "
    with pytest.raises(StopAsyncIteration):
        await anext(feed)


async def test_trouble_on_the_spot_is_the_requests_own(tokenizer: Tokenizer) -> None:
    """What goes wrong with a text, or with writing it, is raised where the request is followed, not to the engine."""

    def broken(gathered: Gathered) -> bool:
        raise OverflowError("too much")

    feed = Feed(outputs(tokenizer, 1), lambda slot, now: None)
    feed.take_now = broken
    waiting = asyncio.create_task(anext(feed))
    await asyncio.sleep(0)
    feed.put(0, delta(0, 100))
    feed.flush()
    with pytest.raises(OverflowError):
        await waiting

    feed = Feed(outputs(tokenizer, 1), lambda slot, now: None)
    feed.put(0, delta(0, tokenizer.vocab_size))
    feed.flush()
    with pytest.raises(ValueError, match="token id"):
        await anext(feed)

    feed = Feed(outputs(tokenizer, 1), lambda slot, now: None)
    feed.put(0, delta(0, 100))
    feed.leave()
    with pytest.raises(ConsumerGoneError):
        await anext(feed)


def parts(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """The events of a stream that is read to its end."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    lines = response.read().decode().splitlines()
    assert lines[-2] == "data: [DONE]"
    return (json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line)


def scores(chunks: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """Log-probabilities of every output."""
    found: dict[int, list[float]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    return found


def test_a_client_that_does_not_read_keeps_nobody(server: Server) -> None:
    """Others are served meanwhile; behind what the kernel takes (4 MB) his news piles up in few events, not in many
    written ones, and he gets all of it when he reads."""
    body: dict[str, Any] = {"prompt": "once", "max_tokens": 120, "n": 60, "seed": 5, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 20, "return_tokens_as_token_ids": True, "request_id": "x" * 100}
    quick = server.stream(**body)
    with server.begin(body) as sock:
        eventually(lambda: server.num_busy() == 60)
        assert server.complete("others", max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        eventually(lambda: server.num_busy() == 0)
        slow = list(parts(sock))
    assert scores(slow) == scores(quick)
    assert sum(map(len, scores(slow).values())) == 60 * 120
    assert len(slow) < 0.9 * len(quick), "news for him was written without end"
