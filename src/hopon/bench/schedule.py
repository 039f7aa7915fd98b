"""What is asked and when: sessions of one turn or of several, on a timetable or by a number of places.

A request of a :class:`hopon.workload.ask.Workload` becomes a session of one turn. What its prompt says is made up when
it is about to be sent: token ids or common English words, drawn from the seed, and from the run itself where the cache
is to be cold. Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

from hopon.bench.target import Message, Prompt
from hopon.bench.words import WORDS
from hopon.core.types import SamplingParams
from hopon.jsonl import read_lines
from hopon.workload.ask import Piece, Workload
from hopon.workload.draw import Kind
from hopon.workload.lengths import Lengths, Lognormal, Uniform

Content = str | tuple[int, ...] | tuple[Message, ...] | tuple[Piece, ...]
"""What a user says: given text, ids or messages, or pieces to be made up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of a session.

    Args:
        content: what is new in it; the turns before and their answers go in front.
        max_tokens: tokens of the answer; None leaves it to the server.
        think: seconds between the answer before and this turn.
        kind: its class in a mix.
        fields: fields of the body that it has alone.
    """

    content: Content
    max_tokens: int | None
    think: float = 0.0
    kind: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Turns that follow one another; ``arrival`` is when the first one is due, seconds from the beginning."""

    turns: tuple[Turn, ...]
    arrival: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A run to be.

    Args:
        sessions: in order of arrival.
        name: what it is, for people.
        concurrency: closed loop: so many sessions at once, each started when a place is free, arrivals do not count.
            None: open loop, every session starts when it is due, whatever became of the others.
        limit: seconds after which nothing more is sent, and what is still open is cut; None waits for all.
        writer: how pieces become prompts.
    """

    sessions: tuple[Session, ...]
    name: str
    writer: Writer
    concurrency: int | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if not self.sessions:
            raise ValueError(f"schedule {self.name}: no requests in it")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"the limit must be above 0 seconds, got {self.limit}")

    @property
    def num_turns(self) -> int:
        """Requests in it."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def offered_rate(self) -> float | None:
        """Sessions per second of an open loop; None for a closed loop, a single session and all at once."""
        span = self.sessions[-1].arrival - self.sessions[0].arrival
        return (len(self.sessions) - 1) / span if self.concurrency is None and span > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Makes prompts of pieces. Pieces of one id get the same tokens, whoever holds them.

    Args:
        as_text: words instead of token ids.
        salt: what made-up prompts depend on; another one in every run keeps the server's cache cold.
        lowest: smallest token id, so that control tokens are left out.
        vocab_size: token ids are below this.
        tokens_per_word: for words: prompt tokens that the server counts for each.
        overhead: for words: prompt tokens that a template adds.
    """

    as_text: bool = False
    salt: str = ""
    lowest: int = 100
    vocab_size: int = 10_000
    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.lowest < self.vocab_size:
            raise ValueError(f"token ids must be 0 <= lowest < vocab_size, got {self.lowest} and {self.vocab_size}")

    def prompt(self, content: Content) -> Prompt:
        """What is sent."""
        if isinstance(content, str) or not content or not isinstance(content[0], Piece):
            return content  # type: ignore[return-value]
        pieces: tuple[Piece, ...] = content
        if self.as_text:
            return self.words(pieces)
        ids = range(self.lowest, self.vocab_size)
        return tuple(token for piece in pieces for token in self._random(piece).choices(ids, k=piece.count))

    def words(self, pieces: Sequence[Piece]) -> str:
        """About as many tokens of text; what a template adds is taken from the last piece."""
        last = len(pieces) - 1
        texts = []
        for place, piece in enumerate(pieces):
            tokens = piece.count - (self.overhead if place == last else 0)
            count = max(1, round(tokens / self.tokens_per_word))
            texts.append(" ".join(self._random(piece).choices(WORDS, k=count)))
        return " ".join(texts)

    def _random(self, piece: Piece) -> Random:
        return Random(f"{self.salt} {piece.token}")


def from_workload(
    workload: Workload, writer: Writer, *, concurrency: int | None = None, limit: float | None = None
) -> Schedule:
    """A session of one turn for each request."""
    return Schedule(
        sessions=tuple(
            Session(
                arrival=ask.arrival,
                turns=(Turn(content=tuple(ask.pieces()), max_tokens=ask.max_tokens, kind=ask.kind),),
            )
            for ask in workload
        ),
        name="; ".join((workload.name, *workload.notes)),
        writer=writer,
        concurrency=concurrency,
        limit=limit,
    )


def conversations(
    times: Sequence[float],
    writer: Writer,
    *,
    turns: Lengths,
    inputs: Lengths,
    outputs: Lengths,
    think: float,
    seed: int,
    concurrency: int | None = None,
    limit: float | None = None,
) -> Schedule:
    """Chats: each turn is sent ``think`` seconds after the answer before, and holds all that was said so far.

    Args:
        times: when conversations begin.
        writer: must write text.
        turns: how many of a conversation.
        inputs: tokens of each message.
        outputs: tokens of each answer.
        think: mean of an exponential, seconds; 0 for none.
        seed: of all that is drawn.
        concurrency: see Schedule; so is limit.
        limit: seconds.

    Raises:
        ValueError: the writer writes ids, which answers cannot be put behind.
    """
    if not writer.as_text:
        raise ValueError("conversations need prompts as text: an answer's token ids are not known")
    if not think >= 0:
        raise ValueError(f"the time to think must be at least 0 seconds, got {think}")
    random = Random(f"{seed} conversation")
    number = 0
    sessions = []
    for time in times:
        made = []
        for turn in range(turns.draw(random)):
            count = inputs.draw(random)
            pause = random.expovariate(1 / think) if turn and think else 0.0
            made.append(
                Turn(content=(Piece(2 * number, count),), max_tokens=outputs.draw(random), think=pause, kind="")
            )
            number += 1
        sessions.append(Session(arrival=time, turns=tuple(made)))
    name = f"{len(sessions)} conversations of {sum(len(s.turns) for s in sessions)} turns, seed {seed}"
    return Schedule(sessions=tuple(sessions), name=name, writer=writer, concurrency=concurrency, limit=limit)


def from_lines(
    path: Path,
    times: Sequence[float],
    writer: Writer,
    *,
    max_tokens: int,
    seed: int,
    concurrency: int | None = None,
    limit: float | None = None,
) -> Schedule:
    """Prompts of a file (see :mod:`hopon.jsonl`), in a drawn order, again from the beginning when they run out.

    Raises:
        OSError: it cannot be read.
        ValueError: names the bad lines.
    """
    default = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    lines = read_lines(path, default)
    order = list(range(len(lines)))
    Random(f"{seed} order").shuffle(order)
    sessions = []
    for number, time in enumerate(times):
        line = lines[order[number % len(order)]]
        content: Content = tuple(line.messages) if line.messages is not None else _plain(line.prompt)
        params = line.params
        turn = Turn(content=content, max_tokens=params.max_tokens, fields=_changed(params, default))
        sessions.append(Session(arrival=time, turns=(turn,)))
    again = f", each up to {-(-len(sessions) // len(lines))} times" if len(sessions) > len(lines) else ""
    name = f"{len(sessions)} of the {len(lines)} prompts of {path.name}{again}, seed {seed}"
    return Schedule(sessions=tuple(sessions), name=name, writer=writer, concurrency=concurrency, limit=limit)


def _plain(prompt: str | list[int] | None) -> str | tuple[int, ...]:
    assert prompt is not None, "a line has a prompt or messages"
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _changed(params: SamplingParams, default: SamplingParams) -> dict[str, Any]:
    names = [one.name for one in fields(params) if one.name != "max_tokens"]
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}


SHAREGPT = (Lognormal(161, 1.3, 1024), Lognormal(338, 0.8, 1024))
"""Prompts and answers of a mean of 161 and 338 tokens, as the vLLM paper (SOSP 2023) reports of ShareGPT. The shape,
the variation and the cap are ours."""

MIXED = (
    Kind(name="short", weight=0.7, inputs=Uniform(32, 128), outputs=Uniform(8, 48)),
    Kind(name="long-prompt", weight=0.15, inputs=Uniform(512, 1024), outputs=Uniform(8, 48)),
    Kind(name="long-answer", weight=0.15, inputs=Uniform(32, 128), outputs=Uniform(128, 384)),
)
"""Short answers, long prompts and long generations beside one another."""
