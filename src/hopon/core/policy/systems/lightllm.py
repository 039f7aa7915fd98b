"""LightLLM: memory by the token, and an admission that foresees the peak ("past-future").

A newcomer starts when the memory that all of them together will hold at the worst moment stays below the pool. The
worst moments are those just before somebody ends, so the peak is exact if the lengths were known; they are predicted,
from what requests have come to lately or, cautiously, as ``max_tokens``. Where the prediction was too low, a sequence
that finds no token pauses: it drops what it holds and computes it again later.

Three kinds of steps: prompts or decodes (``lightllm``), both in one pass (``lightllm-mixed``), and both with small
prompt pieces (``lightllm-splitfuse``).

Source: LightLLM's router and its worker's classification of requests, public code of 2025; ``splitfuse`` is the mode of
2024. Not modelled: the router plans every 30 ms and hands a batch over to the worker, which then computes it within
its own budget, so that up to two budgets of prompts may have been let in; here both happen in the step in which a
prompt's first piece is computed. A piece that does not fit into the budget ends the step's prompts; LightLLM looks for
a smaller one behind it. A step of prompts alone sets no tokens aside for the decodes that wait for it. When nothing
else runs, a newcomer starts if it fits, and a paused one need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Offer, Verdict
from hopon.core.policy.composition import Action, Admit, Continue, Evict, Which, one_by_one
from hopon.core.policy.eviction import Victim
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Observer, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step

_MAX_PAUSED_PER_STEP = 2
_STEPS_BETWEEN_RETRIES = 100


def peak_tokens(demands: Iterable[tuple[int, int]]) -> int:
    """Most tokens that sequences will hold at once.

    Args:
        demands: of each sequence, tokens held now and tokens still to come.
    """
    peak = held = 0
    for count, (now, left) in enumerate(sorted(demands, key=lambda demand: -demand[1]), start=1):
        held += now
        peak = max(peak, left * count + held)
    return peak


class OutputLength(Observer):
    """A moving average of the lengths of finished outputs; it settles as more of them are seen.

    Args:
        initial: first guess, in tokens.
    """

    def __init__(self, initial: int) -> None:
        self._average = float(initial)
        self._weight = 0.5

    @property
    def value(self) -> int:
        """Predicted output tokens of a request, at least 64."""
        return max(64, int(self._average))

    def finished(self, sequence: Sequence) -> None:
        """Learn from one that ran."""
        if sequence.admitted is not None:
            self._average += self._weight * (sequence.num_output - self._average)
            self._weight = max(0.04, 0.8 * self._weight)


class PastFuture:
    """A newcomer starts when the foreseen peak stays below the pool; a paused one when all it knows fits.

    Args:
        lengths: predicts outputs.
        token_ratio: share of the pool in use from which everybody is believed to reach ``max_tokens``.
        chunk: tokens of a prompt's piece.
        steps_per_chunk: steps that a piece takes, with those that it waits.
        oracle: ``max_tokens`` is what a request really comes to; no margins.
    """

    def __init__(
        self, *, lengths: OutputLength, token_ratio: float, chunk: int, steps_per_chunk: int, oracle: bool
    ) -> None:
        self._lengths = lengths
        self._token_ratio = token_ratio
        self._chunk = chunk
        self._steps_per_chunk = steps_per_chunk
        self._oracle = oracle

    def claim(self, sequence: Sequence) -> int:
        """Nothing beforehand."""
        return 0

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP, in order."""
        piece = min(sequence.num_tokens - offer.num_cached, self._chunk)
        if offer.num_tokens < piece or offer.num_needed > offer.num_free:
            return Verdict.STOP
        if sequence.resumes:
            size = step.config.block_size
            promised = sum(max(0, one.num_tokens - len(one.blocks) * size) for one in step.running)
            room = offer.num_free * size - promised
            return Verdict.START if sequence.num_tokens - offer.num_cached <= room else Verdict.STOP
        beside = [*step.running, *paused(step)]
        if not beside:
            return Verdict.START
        busy = step.num_blocks - step.num_free >= self._token_ratio * step.num_blocks
        peak = peak_tokens(self.demand(one, busy) for one in (*beside, sequence))
        fits = peak < step.config.capacity_tokens and len(beside) < step.config.max_num_seqs
        return Verdict.START if fits else Verdict.STOP

    def demand(self, sequence: Sequence, busy: bool) -> tuple[int, int]:
        """Tokens that it holds and tokens that it is believed to need still."""
        num_output = sequence.num_tokens - sequence.num_prompt
        if self._oracle:
            return sequence.num_tokens, max(0, sequence.max_output - num_output - 1)
        length = sequence.max_output
        if not (busy or sequence.request.params.ignore_eos):
            length = min(length, max(int(1.1 * num_output), self._lengths.value))
        waits = -(-sequence.num_remaining // self._chunk) * self._steps_per_chunk
        return sequence.num_tokens + 1, max(0, waits + length - num_output - 1) + 16


class Pause:
    """Who finds no token is marked, two in a step at most, and pauses before the next step; the others just wait."""

    def __init__(self) -> None:
        self.marked: list[Sequence] = []

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim | None:
        """Nothing for now. Alone, it has all there is."""
        if step.num_running == 1:
            return Victim(sequence=sequence)
        if len(self.marked) < _MAX_PAUSED_PER_STEP:
            self.marked.append(sequence)
        return None


class PrefillOrDecode:
    """Prompts alone when there are any, at once (aggressive) or after some decodes; otherwise decodes.

    Args:
        pause: whom to pause.
        chunk: tokens of a prompt's piece.
        decodes_between: decode steps after a prefill step; 0 is aggressive.
        mixed: prompts and decodes in one step.
    """

    def __init__(self, *, pause: Pause, chunk: int, decodes_between: int, mixed: bool) -> None:
        self._pause = pause
        self._chunk = chunk
        self._decodes_between = decodes_between
        self._mixed = mixed
        self._decodes_left = 0
        self._count = 0

    def compose(self, step: Step) -> Iterator[Action]:
        """Again when nobody had a token, as often as somebody pauses."""
        self._count += 1
        yield from self._evict_marked(step)
        yield from self._run(step)
        while not step.chunks and any(not sequence.num_in_flight for sequence in self._pause.marked):
            yield from self._evict_marked(step)
            yield from self._run(step)

    def _evict_marked(self, step: Step) -> Iterator[Action]:
        marked, self._pause.marked = self._pause.marked, []
        for sequence in marked:
            if sequence.row is not None and not sequence.finished:
                yield Evict(Victim(sequence=sequence))

    def _run(self, step: Step) -> Iterator[Action]:
        if self._mixed:
            yield Continue(which=Which.DECODE)
            yield from self._prefill(step)
            return
        if self._decodes_left:
            self._decodes_left -= 1
            yield Continue(which=Which.DECODE)
        if not step.chunks:
            yield from self._prefill(step)
            if step.chunks:
                self._decodes_left = self._decodes_between
        if not step.chunks:
            yield Continue(which=Which.DECODE)

    def _prefill(self, step: Step) -> Iterator[Action]:
        yield Continue(which=Which.PREFILL, max_chunk=self._chunk)
        if not step.num_running or self._count % _STEPS_BETWEEN_RETRIES == 0:
            yield from one_by_one(step, Admit(max_seqs=1, max_chunk=self._chunk, accepts=_has_paused))
        yield from one_by_one(step, Admit(max_seqs=1, max_chunk=self._chunk, accepts=_is_new))


def paused(step: Step) -> Iterator[Sequence]:
    """Those that have run; they wait ahead of those that have not."""
    return takewhile(_has_paused, step.waiting)


def _has_paused(sequence: Sequence) -> bool:
    return sequence.resumes


def _is_new(sequence: Sequence) -> bool:
    return not sequence.resumes


@dataclass(frozen=True, kw_only=True, slots=True)
class LightLlm:
    """Steps of prompts or of decodes.

    Args:
        running_max_req_size: most sequences that have started (``--running_max_req_size``).
        batch_max_tokens: tokens of one step (``--batch_max_tokens``).
        chunked_prefill_size: tokens of a prompt's piece (``--chunked_prefill_size``); 0: half of a step's.
        router_token_ratio: share of the pool in use from which everybody is believed to reach ``max_tokens``; at 0
            always, at 1 the average of finished outputs counts (``--router_token_ratio``).
        router_max_wait_tokens: decode steps between prefill steps when not aggressive (``--router_max_wait_tokens``).
        initial_output_len: first guess of an output's length, before any has been seen (2048 in the source).
        aggressive: a waiting prompt need not wait for decode steps (``--disable_aggressive_schedule`` is False).
        oracle: max_tokens is the true output length, as in a trace made for it; plans then know the future.

    Raises:
        ValueError: a knob out of range.
    """

    running_max_req_size: int = 1000
    batch_max_tokens: int = 16384
    chunked_prefill_size: int = 0
    router_token_ratio: float = 0.0
    router_max_wait_tokens: int = 1
    initial_output_len: int = 2048
    aggressive: bool = True
    oracle: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Memory by the token."""
        return _settings(self.running_max_req_size, self.batch_max_tokens)

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module."""
        return _policy(
            config,
            chunk=self.chunked_prefill_size,
            token_ratio=self.router_token_ratio,
            initial_output_len=self.initial_output_len,
            steps_per_chunk=self.router_max_wait_tokens + 1,
            decodes_between=0 if self.aggressive else self.router_max_wait_tokens,
            mixed=False,
            oracle=self.oracle,
        )

    card: ClassVar[Card] = Card(
        system="LightLLM",
        aliases=("continuous batching", "TokenAttention", "past-future scheduler"),
        joins="In order, while the memory that all together will hold at the foreseen worst moment stays below the "
        "pool and a seat is free.",
        prefill="In pieces, in passes of prompts only; decodes wait (aggressive), or get a few passes between them.",
        memory="By the token (pages of one token), as it is computed; outputs are foreseen as max_tokens, or as "
        "what requests came to lately.",
        eviction="Where the forecast was too low, at most two requests a step pause: they drop what they hold and "
        "are tried again every 100 steps.",
        short_waits="It waits while the forecast says that it and all others would need more than the pool at "
        "their worst moment, however empty the pool is now; paused ones wait for a retry.",
        flags={
            "running_max_req_size": "--running_max_req_size",
            "batch_max_tokens": "--batch_max_tokens",
            "chunked_prefill_size": "--chunked_prefill_size",
            "router_token_ratio": "--router_token_ratio",
            "router_max_wait_tokens": "--router_max_wait_tokens",
            "initial_output_len": "",
            "aggressive": "--disable_aggressive_schedule (inverted)",
            "oracle": "",
        },
        limits="Cautious by default: with router_token_ratio 0 everybody is believed to reach max_tokens. A good "
        "forecast needs requests that resemble those before.",
        not_modelled="The router's 30 ms rhythm and the two budgets of prompts that it may let in.",
        source="LightLLM's router and worker, public code",
        date="2025",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LightLlmMixed:
    """Decodes and prompts in one step.

    Args:
        running_max_req_size: most sequences that have started (``--running_max_req_size``).
        batch_max_tokens: tokens of one step (``--batch_max_tokens``).
        chunked_prefill_size: tokens of a prompt's piece (``--chunked_prefill_size``); 0: half of a step's.
        router_token_ratio: share of the pool in use from which everybody is believed to reach ``max_tokens``; at 0
            always, at 1 the average of finished outputs counts (``--router_token_ratio``).
        initial_output_len: first guess of an output's length, before any has been seen (2048 in the source).
        oracle: max_tokens is the true output length, as in a trace made for it; plans then know the future.

    Raises:
        ValueError: a knob out of range.
    """

    running_max_req_size: int = 1000
    batch_max_tokens: int = 16384
    chunked_prefill_size: int = 0
    router_token_ratio: float = 0.0
    initial_output_len: int = 2048
    oracle: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Memory by the token."""
        return _settings(self.running_max_req_size, self.batch_max_tokens)

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module."""
        return _policy(
            config,
            chunk=self.chunked_prefill_size,
            token_ratio=self.router_token_ratio,
            initial_output_len=self.initial_output_len,
            steps_per_chunk=1,
            decodes_between=0,
            mixed=True,
            oracle=self.oracle,
        )

    card: ClassVar[Card] = Card(
        system="LightLLM, prompts and decodes in one step",
        aliases=("mixed batching", "chunked prefill", "TokenAttention"),
        joins=LightLlm.card.joins,
        prefill="In pieces, in the same pass as decodes, which take their tokens first.",
        memory=LightLlm.card.memory,
        eviction=LightLlm.card.eviction,
        short_waits="It waits while the forecast says that it and all others would need more than the pool at "
        "their worst moment, however empty the pool is now; and for tokens of the step behind decodes and earlier "
        "prompts.",
        flags={
            "running_max_req_size": "--running_max_req_size",
            "batch_max_tokens": "--batch_max_tokens",
            "chunked_prefill_size": "--chunked_prefill_size",
            "router_token_ratio": "--router_token_ratio",
            "initial_output_len": "",
            "oracle": "",
        },
        limits=LightLlm.card.limits,
        not_modelled=LightLlm.card.not_modelled,
        source="LightLLM's router and worker, public code",
        date="2025",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LightLlmSplitFuse:
    """Decodes and small prompt pieces in one step.

    Args:
        running_max_req_size: most sequences that have started (``--running_max_req_size``).
        batch_max_tokens: tokens of one step, the user's to choose in LightLLM (``--batch_max_tokens``).
        splitfuse_block_size: tokens of a prompt's piece (``--splitfuse_block_size``).
        router_token_ratio: share of the pool in use from which everybody is believed to reach ``max_tokens``; at 0
            always, at 1 the average of finished outputs counts (``--router_token_ratio``).
        initial_output_len: first guess of an output's length, before any has been seen (2048 in the source).
        oracle: max_tokens is the true output length, as in a trace made for it; plans then know the future.

    Raises:
        ValueError: a knob out of range.
    """

    running_max_req_size: int = 1000
    batch_max_tokens: int = 1024
    splitfuse_block_size: int = 256
    router_token_ratio: float = 0.0
    initial_output_len: int = 2048
    oracle: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Memory by the token."""
        return _settings(self.running_max_req_size, self.batch_max_tokens)

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module."""
        return _policy(
            config,
            chunk=self.splitfuse_block_size,
            token_ratio=self.router_token_ratio,
            initial_output_len=self.initial_output_len,
            steps_per_chunk=1,
            decodes_between=0,
            mixed=True,
            oracle=self.oracle,
        )

    card: ClassVar[Card] = Card(
        system="LightLLM, SplitFuse mode",
        aliases=("SplitFuse", "chunked prefill", "TokenAttention"),
        joins=LightLlm.card.joins,
        prefill="In small pieces of splitfuse_block_size, in the same pass as decodes, which take their tokens first.",
        memory=LightLlm.card.memory,
        eviction=LightLlm.card.eviction,
        short_waits="It waits while the forecast says that it and all others would need more than the pool at "
        "their worst moment, however empty the pool is now; and for tokens of the small passes behind earlier "
        "prompts.",
        flags={
            "running_max_req_size": "--running_max_req_size",
            "batch_max_tokens": "--batch_max_tokens",
            "splitfuse_block_size": "--splitfuse_block_size",
            "router_token_ratio": "--router_token_ratio",
            "initial_output_len": "",
            "oracle": "",
        },
        limits=LightLlm.card.limits,
        not_modelled=LightLlm.card.not_modelled,
        source="LightLLM's splitfuse mode, public code",
        date="2024",
    )


def _check(preset: LightLlm | LightLlmMixed | LightLlmSplitFuse) -> None:
    if not 0 <= preset.router_token_ratio <= 1:
        raise ValueError(f"router_token_ratio must be in [0, 1], got {preset.router_token_ratio}")
    limits = {
        "chunked_prefill_size": 0,
        "router_max_wait_tokens": 0,
        "splitfuse_block_size": 1,
        "initial_output_len": 1,
    }
    for name, least in limits.items():
        value = getattr(preset, name, least)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _settings(max_num_seqs: int, max_num_batched_tokens: int) -> Mapping[str, int | bool]:
    return {
        "block_size": 1,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }


def _policy(
    config: SchedulerConfig,
    *,
    chunk: int,
    token_ratio: float,
    initial_output_len: int,
    steps_per_chunk: int,
    decodes_between: int,
    mixed: bool,
    oracle: bool,
) -> Policy:
    budget = config.max_num_batched_tokens
    limit = config.long_prefill_token_threshold or budget
    piece = min(chunk or max(1, budget // 2), budget, limit)
    lengths = OutputLength(initial_output_len)
    pause = Pause()
    return Policy(
        order=Arrival(),
        admission=PastFuture(
            lengths=lengths, token_ratio=token_ratio, chunk=piece, steps_per_chunk=steps_per_chunk, oracle=oracle
        ),
        composition=PrefillOrDecode(pause=pause, chunk=piece, decodes_between=decodes_between, mixed=mixed),
        eviction=pause,
        observers=(lengths,),
    )
