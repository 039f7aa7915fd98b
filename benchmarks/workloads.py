"""The five workloads W1-W5: what is asked, not how it is sent.

Every prompt is a text of common English words with an exact number of tokens of the SmolLM2 tokenizer, drawn from a
seed, so that every server in every run gets the same requests. Output lengths are forced by the client.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from hopon.bench.words import WORDS

SEED = 20261129


class Codec(Protocol):
    """The tokenizer that counts a prompt's tokens: no special tokens added, none hidden."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt as text and as ids, and how many tokens to generate."""

    text: str
    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """A fixed list of requests, at most ``concurrency`` at once, each started as soon as a place is free.

    ``reuses_prefixes`` says what the workload is meant to show: with it, prompts must be found in the prefix cache;
    without it none may be, or the run is void.
    """

    name: str
    asks: tuple[Ask, ...]
    concurrency: int
    reuses_prefixes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Interference:
    """For ``seconds`` seconds ``clients`` clients stream short prompts one after another; long prompts arrive between.

    Client ``i`` asks ``streams[i]``, ``streams[i + clients]`` and so on, around the list. Long prompt ``k`` is sent
    ``interval * (k + 1)`` seconds after the start.
    """

    name: str
    streams: tuple[Ask, ...]
    clients: int
    arrivals: tuple[Ask, ...]
    interval: float
    seconds: float
    reuses_prefixes: bool = False


Workload = Crowd | Interference

NAMES = ("W1", "W2", "W3", "W4", "W5")


def workload(name: str, codec: Codec) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"workload must be one of {', '.join(NAMES)}, got {name!r}")
    draw = _Prompts(codec, SEED + (5 if name == "W5" else sum(map(ord, name))))
    match name:
        case "W1":  # a mixed crowd: prompts of 32 to 256 tokens, answers with a long tail
            asks = tuple(_mixed(draw) for _ in range(64))
            return Crowd(name=name, asks=asks, concurrency=32)
        case "W2":  # one user alone
            return Crowd(name=name, asks=tuple(draw.ask(128, 128) for _ in range(4)), concurrency=1)
        case "W3":  # prefill only
            return Crowd(name=name, asks=tuple(draw.ask(1024, 1) for _ in range(8)), concurrency=1)
        case "W4":  # a common prefix of 512 tokens, 32 tokens of one's own
            shared = draw.ids(512)
            asks = tuple(_behind(shared, draw.ids(32), codec) for _ in range(64))
            return Crowd(name=name, asks=asks, concurrency=32, reuses_prefixes=True)
        case _:  # streams that long prompts must not stall
            return Interference(
                name=name,
                streams=tuple(draw.ask(64, 256) for _ in range(64)),
                clients=16,
                arrivals=tuple(draw.ask(2000, 8) for _ in range(9)),
                interval=2.0,
                seconds=20.0,
            )


def _mixed(draw: _Prompts) -> Ask:
    num_tokens = draw.rng.randint(32, 256)
    answer = round(math.exp(draw.rng.gauss(math.log(48), 0.9)))
    return draw.ask(num_tokens, min(256, max(8, answer)))


def _behind(shared: tuple[int, ...], own: tuple[int, ...], codec: Codec) -> Ask:
    ids = shared + own
    return Ask(codec.decode(list(ids)), ids, 32)


class _Prompts:
    """Draws prompts of an exact length. Cutting ids can cut a word: a text counts only if it encodes to that length."""

    def __init__(self, codec: Codec, seed: int) -> None:
        self.codec = codec
        self.rng = random.Random(seed)

    def ask(self, num_tokens: int, max_tokens: int) -> Ask:
        text, ids = self._draw(num_tokens)
        return Ask(text, ids, max_tokens)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        return self._draw(num_tokens)[1]

    def _draw(self, num_tokens: int) -> tuple[str, tuple[int, ...]]:
        while True:
            words = [self.rng.choice(WORDS) for _ in range(num_tokens + 8)]
            ids = self.codec.encode(" ".join(words))[:num_tokens]
            text = self.codec.decode(ids)
            if len(self.codec.encode(text)) == num_tokens:
                return text, tuple(ids)
