"""Engines die, requests do not: what a client hears is what an undisturbed engine would have told, bit by bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.types import Delta, FinishReason, Guide, GuideKind, Logprob, Request, SamplingParams
from hopon.serve.client import EngineClient, Mailbox
from hopon.serve.link import EngineHandle, launch
from tests.serve.faults import DEADLY

STORIES = Path(__file__).parents[1] / "data" / "stories260k"


@dataclass
class Outcome:
    """Everything that a client hears of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: FinishReason | None = None
    message: str = ""
    entries: set[tuple[float | None, int]] = field(default_factory=set)  # what was told of its admission

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "nothing follows the end"
        if delta.tokens:
            assert delta.index == len(self.tokens)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish, self.message = delta.finish, delta.message
        self.entries.add((delta.admitted, delta.cached_tokens))

    def content(self) -> tuple[object, ...]:
        return self.tokens, self.logprobs, self.prompt_logprobs, self.finish


async def follow(client: EngineClient, request: Request) -> Outcome:
    mailbox, outcome = Mailbox(), Outcome()
    client.submit(request, mailbox)
    while outcome.finish is None:
        for _, delta in await mailbox.get():
            outcome.take(delta)
    return outcome


async def follow_all(client: EngineClient, requests: Sequence[Request], prefix: str) -> list[Outcome]:
    named = [replace(request, request_id=f"{prefix}{i}") for i, request in enumerate(requests)]
    return list(await asyncio.gather(*(follow(client, request) for request in named)))


@asynccontextmanager
async def engine(factory: str, options: EngineOptions) -> AsyncIterator[EngineClient]:
    """A supervised engine; ``client.num_deaths`` counts."""

    def relaunch(incarnation: int, config: SchedulerConfig) -> EngineHandle:
        return launch(factory, options, incarnation=incarnation)

    client = await EngineClient.attach(launch(factory, options), relaunch=relaunch)
    try:
        yield client
    finally:
        await client.close()


def requests_of_all_kinds(count: int, length: int, seed: int) -> list[Request]:
    """For a vocabulary of 512: greedy and random ones, with every option that looks back at the output."""
    draw = random.Random(seed)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"logprobs": 3},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.2, "logprobs": 2, "temperature": 0.0},
        {"min_tokens": length // 2, "top_k": 20},
        {"top_p": 0.9, "min_p": 0.02, "logit_bias": ((400, 2.0), (401, -3.0))},
        {"allowed_token_ids": tuple(range(300, 420)), "bad_words": ((310, 311), (320,))},
        {"guide": Guide(GuideKind.GRAMMAR, 'start: "<" item ("," item)* ">"\nitem: /[a-z]{1,6}/'), "logprobs": 1},
        {"guide": Guide(GuideKind.REGEX, "(the [a-z]+ (and|or) ){3,60}end"), "repetition_penalty": 1.1},
    ]
    requests = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        stops = (2,) if i % 3 else (2, *draw.sample(range(300, 500), 5))
        params = SamplingParams(max_tokens=draw.randint(length * 3 // 4, length), ignore_eos=False, **kind)  # type: ignore[arg-type]
        requests.append(
            Request(
                request_id="",
                prompt=tuple(draw.randrange(3, 512) for _ in range(draw.randint(1, 60))),
                params=params,
                seed=draw.getrandbits(64),
                choice=i % 2,
                stop_token_ids=stops,
            )
        )
    return requests


async def kill_at_random(client: EngineClient, times: int, draw: random.Random) -> int:
    """Kill the engine so often while at least eight requests are open; returns how often it was done.

    Moments: while it loads, in a trial, in full swing. It gives a token now and then, lest the client give up, and
    lest one request be alone in a step too often.
    """
    for number in range(times):
        seen = tokens_of(client)
        if number % 3:
            await until(lambda seen=seen: tokens_of(client) > seen or client.num_open < 8)  # type: ignore[misc]
        await asyncio.sleep(draw.uniform(0, 0.15))
        if client.num_open < 8:
            return number
        deaths = client.num_deaths
        client.kill()
        await until(lambda deaths=deaths: client.num_deaths > deaths)  # type: ignore[misc]
        await asyncio.sleep(draw.uniform(0, 0.1))
    return times


def tokens_of(client: EngineClient) -> int:
    return client.stats.num_generated_tokens if client.stats is not None else 0


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 256])
async def test_64_streams_survive_deaths_at_random_moments(
    effort: Callable[[int, int], int], max_num_batched_tokens: int
) -> None:
    """Every request has the tokens, log-probabilities of output and prompt, and the end of an undisturbed run; the
    seat and the cached tokens that it was first told stay; counters never fall."""
    kills = effort(3, 20)
    requests = requests_of_all_kinds(64, effort(120, 440), seed=max_num_batched_tokens)
    options = EngineOptions(
        model=str(STORIES), max_num_batched_tokens=max_num_batched_tokens, num_kv_blocks=2500, threads=1
    )
    async with engine("tests.serve.faults:load_slow", options) as client:
        killing = asyncio.create_task(kill_at_random(client, kills, random.Random(max_num_batched_tokens)))
        disturbed = await follow_all(client, requests, "disturbed")
        assert await killing == kills, "the streams ended before the engine was killed often enough"
        assert client.num_deaths == kills
        assert client.num_replayed_requests >= kills * 8
        total = tokens_of(client)
        undisturbed = await follow_all(client, requests, "undisturbed")
        assert client.num_deaths == kills
        assert tokens_of(client) > total
        assert client.num_open == 0
        await until(lambda: client.stats is not None and client.stats.num_used_blocks == 0)
    for request, one, other in zip(requests, disturbed, undisturbed, strict=True):
        assert one.content() == other.content(), request
        assert one.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert len({entry for entry in one.entries if entry[0] is not None}) == 1


async def test_scores_of_a_long_prompt_are_delivered_once(effort: Callable[[int, int], int]) -> None:
    """Killed in the middle of scoring a prompt, chunk by chunk: every score comes once, in order."""
    request = Request(
        request_id="",
        prompt=tuple(random.Random(5).randrange(3, 512) for _ in range(400)),
        params=SamplingParams(max_tokens=3, prompt_logprobs=1),
        seed=1,
    )
    options = EngineOptions(model=str(STORIES), max_num_batched_tokens=16, max_num_seqs=4, num_kv_blocks=64, threads=1)
    async with engine("tests.serve.faults:load_slow", options) as client:
        [undisturbed] = await follow_all(client, [request], "u")
        assert len(undisturbed.prompt_logprobs) == 399
        for number in range(effort(2, 20)):
            mailbox, outcome = Mailbox(), Outcome()
            client.submit(replace(request, request_id=f"d{number}"), mailbox)
            at = random.Random(number).randrange(1, 399)
            while outcome.finish is None:
                for _, delta in await mailbox.get():
                    outcome.take(delta)
                if at and len(outcome.prompt_logprobs) >= at:
                    at = 0
                    client.kill()
            assert outcome.content() == undisturbed.content()
            assert client.num_deaths == number + 1


@pytest.mark.parametrize("behind", [0, 5])
async def test_a_deadly_request_fails_alone(behind: int) -> None:
    """It kills engines at once, or in the middle of its output: it is failed, 20 others end as they would have, and so
    do those that arrive while it is looked for."""
    draw = random.Random(behind)
    innocent = [
        Request(
            request_id="",
            prompt=tuple(draw.randrange(10, 1000) for _ in range(draw.randint(1, 40))),
            params=SamplingParams(max_tokens=60, logprobs=0),
            seed=i,
        )
        for i in range(30)
    ]
    deadly = Request(
        request_id="deadly", prompt=(DEADLY, behind, 3), params=SamplingParams(max_tokens=60), seed=1, priority=-1
    )
    async with engine("tests.serve.faults:load_deadly_ledger", EngineOptions(model="1000")) as client:
        undisturbed = await follow_all(client, innocent, "u")
        early = asyncio.create_task(follow_all(client, innocent[:20], "d"))
        await asyncio.sleep(0.1)
        dying = asyncio.create_task(follow(client, deadly))
        await until(lambda: client.num_deaths > 2)
        late = asyncio.create_task(follow_all(client, innocent[20:], "l"))
        failed = await dying
        assert failed.finish is FinishReason.FATAL
        assert len(failed.tokens) == behind
        disturbed = [*await early, *await late]
        assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
        assert 3 <= client.num_deaths <= 7
        assert not client.dead.is_set()


async def test_nobody_is_failed_for_dying_alone_twice_with_a_token_in_between() -> None:
    """A request alone on the server, its engine killed again and again: it goes on as long as it gets on."""
    request = Request(request_id="r", prompt=(9, 9), params=SamplingParams(max_tokens=100), seed=3)
    async with engine("tests.serve.faults:load_slow_ledger", EngineOptions(model="1000")) as client:
        undisturbed = await follow(client, request)
        following = asyncio.create_task(follow(client, request))
        for _ in range(4):
            seen = tokens_of(client)
            await until(lambda seen=seen: tokens_of(client) > seen)  # type: ignore[misc]
            client.kill()
            deaths = client.num_deaths
            await until(lambda deaths=deaths: client.num_deaths > deaths)  # type: ignore[misc]
        assert (await following).content() == undisturbed.content()


async def test_a_request_aborted_while_there_is_no_engine_is_not_replayed() -> None:
    """Who leaves in the meantime is forgotten, and the next engine never hears of it."""
    request = Request(request_id="gone", prompt=(9, 9), params=SamplingParams(max_tokens=1000), seed=3)
    async with engine("hopon.testing:load_ledger", EngineOptions(model="1000")) as client:
        mailbox = Mailbox()
        ticket = client.submit(request, mailbox)
        await mailbox.get()
        client.kill()
        await until(lambda: client.num_deaths == 1)
        client.abort(ticket)
        assert client.num_open == 0
        assert client.is_restarting
        other = replace(request, request_id="other", params=SamplingParams(max_tokens=5))
        assert len((await follow(client, other)).tokens) == 5
        assert client.stats is not None
        assert client.stats.num_running + client.stats.num_waiting <= 1


async def test_five_deaths_without_a_token_are_the_end() -> None:
    """Then open requests get an error, and no request is taken any more."""
    request = Request(request_id="r", prompt=(9, 9), params=SamplingParams(max_tokens=10), seed=3)
    options = EngineOptions(model="1000")
    broken = replace(options, policy="no such policy")

    def relaunch(incarnation: int, config: SchedulerConfig) -> EngineHandle:
        return launch("hopon.testing:load_ledger", broken, incarnation=incarnation)

    client = await EngineClient.attach(launch("tests.serve.faults:load_slow_ledger", options), relaunch=relaunch)
    following = asyncio.create_task(follow(client, request))
    await asyncio.sleep(0)
    client.kill()
    assert (await following).finish is FinishReason.ERROR
    assert client.dead.is_set()
    assert client.num_deaths == 5
    assert "no such policy" in client.problem
    await client.close()
