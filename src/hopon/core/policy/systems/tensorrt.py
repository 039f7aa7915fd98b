"""TensorRT-LLM's in-flight batching: a capacity scheduler chooses requests, a micro-batch scheduler their tokens.

Requests stand in a list in order of arrival. The capacity scheduler is one of three. ``trt-no-evict``
(GUARANTEED_NO_EVICT, the default): a request starts only where memory for its prompt and all of its output is there, so
that a started request is never paused; the first that does not fit ends the walk. ``trt-max-utilization``
(MAX_UTILIZATION): memory for the next step is enough; where that is missing, the last started request is paused and
recomputes, and nobody starts in that step. ``trt-static`` (STATIC_BATCH): as no-evict, but requests start only when
none is running. With block reuse, a request whose first new block is just being computed by another is passed over
until it can take that block.

The micro-batch scheduler gives each generating request its token, and prompts what is left of ``max_num_tokens``: whole
if all fit, else in pieces that are multiples of a unit, by one of two policies. FIRST_COME_FIRST_SERVED fills the pass
in order; EQUAL_PROGRESS gives each prompt in turn one unit more.
Source: ``cpp/tensorrt_llm/batch_manager/{capacityScheduler,microBatchScheduler}.cpp`` (2024/2025).

Not modelled: beams, draft tokens, adapters, several attention windows, the two-step look-ahead of overlapped
execution, priorities. A reservation is taken at the start instead of being counted on, which costs cached prefixes
earlier. A piece that is rounded down to nothing ends the pass for prompts that have not started, where the original
tries smaller ones behind it; nobody who runs is paused for an older request that was passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, Offer, ReserveMaxTokens, Verdict, WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue, Which, one_by_one
from hopon.core.policy.eviction import Eviction, Never, Newest
from hopon.core.policy.order import Age
from hopon.core.policy.preset import Card, Policy
from hopon.core.policy.systems.static import Delivery, check_delivery
from hopon.core.sequence import Sequence
from hopon.core.step import Step

Chunking = Literal["fcfs", "equal-progress"]


@dataclass(frozen=True, kw_only=True)
class TrtNoEvict:
    """A started request runs to its end.

    Args:
        chunking: ``context_chunking_policy``: "fcfs" (FIRST_COME_FIRST_SERVED) or "equal-progress" (EQUAL_PROGRESS).
        chunk_unit: tokens of which pieces are multiples; 0 for a block, or all of ``max_num_batched_tokens`` where
            that is less.
    """

    chunking: Chunking = "fcfs"
    chunk_unit: int = 0

    static: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.chunking not in ("fcfs", "equal-progress"):
            raise ValueError(f"chunking must be 'fcfs' or 'equal-progress', got {self.chunking!r}")
        if self.chunk_unit < 0:
            raise ValueError(f"chunk_unit must be at least 0 (0 = block_size), got {self.chunk_unit}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """``max_batch_size``, ``max_num_tokens``, ``tokens_per_block``, block reuse, chunked context."""
        return {
            "max_num_seqs": 2048,
            "max_num_batched_tokens": 8192,
            "block_size": 32,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a unit that no pass can hold."""
        return self._policy(config, ReserveMaxTokens(), Never())

    def _policy(
        self, config: SchedulerConfig, admission: Admission, eviction: Eviction, delivery: Delivery = "stream"
    ) -> Policy:
        unit = self.chunk_unit or min(config.block_size, config.max_num_batched_tokens)
        if unit > config.max_num_batched_tokens:
            raise ValueError(f"chunk_unit {unit} exceeds max_num_batched_tokens {config.max_num_batched_tokens}")
        pieces = FirstComeFirstServed(unit) if self.chunking == "fcfs" else EqualProgress(unit)
        if config.enable_prefix_caching:
            admission = PassOverShared(admission)
        return Policy(
            order=Age(),
            admission=admission,
            composition=InFlight(pieces, static=self.static),
            eviction=eviction,
            delivery=delivery,
        )

    card: ClassVar[Card] = Card(
        system="TensorRT-LLM, GUARANTEED_NO_EVICT (its default)",
        aliases=("in-flight batching", "continuous batching", "iteration-level batching"),
        joins="In any step, in order, if blocks for its prompt and all of its possible output are free; the first "
        "that does not fit ends the walk; one whose prefix another is just computing is passed over.",
        prefill="Whole where all prompts fit into the pass beside the decodes, else in pieces that are multiples "
        "of a block, first come first served or in equal progress.",
        memory="Prompt + max_tokens are set aside at the start.",
        eviction="Never: a started request is not paused.",
        short_waits="It waits until memory for its whole possible answer is free beside what all running requests "
        "may still need, and behind a larger request that does not fit yet.",
        flags={
            "chunking": "context_chunking_policy",
            "chunk_unit": "chunk unit",
            "max_num_seqs": "max_batch_size",
            "max_num_batched_tokens": "max_num_tokens",
            "block_size": "tokens_per_block",
            "enable_chunked_prefill": "enable_chunked_context",
            "enable_prefix_caching": "enable_block_reuse",
        },
        limits="Large max_tokens leave memory unused; in return nobody is ever computed twice.",
        not_modelled="Beams, draft tokens, adapters, attention windows, the look-ahead of overlapped execution, "
        "priorities.",
        source="cpp/tensorrt_llm/batch_manager/{capacityScheduler,microBatchScheduler}.cpp",
        date="2024-2025",
    )


@dataclass(frozen=True, kw_only=True)
class TrtMaxUtilization(TrtNoEvict):
    """Memory for one step is enough; the last started request is paused where it is missing."""

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a unit that no pass can hold."""
        return self._policy(config, WholePrompt(watermark=0.0, spare_per_running=0), Newest())

    card: ClassVar[Card] = Card(
        system="TensorRT-LLM, MAX_UTILIZATION",
        aliases=("in-flight batching", "continuous batching", "iteration-level batching"),
        joins="In any step in which nobody had to be paused, in order, if blocks for its prompt are free.",
        prefill=TrtNoEvict.card.prefill,
        memory="What the next step needs, nothing more.",
        eviction="The last started request is paused and recomputes.",
        short_waits="It waits for memory for its prompt, and while running requests outgrow the pool nobody "
        "starts: the last to start are paused, which may be the request itself.",
        flags=TrtNoEvict.card.flags,
        limits="Packs the most, and computes again when it has packed too much; the last to come pay for it.",
        not_modelled=TrtNoEvict.card.not_modelled,
        source=TrtNoEvict.card.source,
        date=TrtNoEvict.card.date,
    )


@dataclass(frozen=True, kw_only=True)
class TrtStatic(TrtNoEvict):
    """No-evict, in batches: nobody starts before all are finished.

    Args:
        delivery: "batch" answers when the whole batch is finished, "stream" sends tokens as they come.
    """

    delivery: Delivery = "batch"

    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_delivery(self.delivery)

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a unit that no pass can hold."""
        return self._policy(config, ReserveMaxTokens(), Never(), self.delivery)

    card: ClassVar[Card] = Card(
        system="TensorRT-LLM, STATIC_BATCH",
        aliases=("static batching", "request-level batching"),
        joins="When nobody runs any more: as many as fit with their whole possible output.",
        prefill="All prompts of the batch in its first passes, as max_num_tokens allows; those that are done decode "
        "meanwhile, and nobody joins.",
        memory="Prompt + max_tokens are set aside at the start.",
        eviction="Never: a started request is not paused.",
        short_waits="It waits for the longest answer of the running batch, and then for the longest of its own, "
        "because all answers are told together.",
        flags={**TrtNoEvict.card.flags, "delivery": ""},
        limits="As static-impatient, with the same capacity rule as the default.",
        not_modelled=TrtNoEvict.card.not_modelled,
        source=TrtNoEvict.card.source,
        date=TrtNoEvict.card.date,
    )


class FirstComeFirstServed:
    """Whole prompts in order; the one that does not fit gets what is left, rounded down to units."""

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def size(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """Tokens of a piece."""
        return remaining if remaining <= budget else budget // self._unit * self._unit

    def share(self, step: Step) -> Iterator[Action]:
        """There is nothing left to share out."""
        return iter(())


class EqualProgress:
    """A unit for everybody in order, then one more for everybody, until the pass is full."""

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def size(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """The first unit, or what there is of it."""
        unit = min(self._unit, remaining)
        return unit if unit <= budget else 0

    def share(self, step: Step) -> Iterator[Action]:
        """Further units for those who have got one."""
        left = [(sequence, sequence.num_remaining - chunk.count) for sequence, chunk in step.chunks.values()]
        left.sort(key=lambda pair: pair[0].rank)
        budget = step.budget
        more: dict[int, int] = {}
        while left:
            still = []
            for sequence, remaining in left:
                unit = min(self._unit, remaining)
                if 0 < unit <= budget:
                    budget -= unit
                    more[sequence.number] = more.get(sequence.number, 0) + unit
                    still.append((sequence, remaining - unit))
            left = still
        if more:
            yield Continue(extend=True, size=lambda sequence, remaining, budget: more.get(sequence.number, 0))


class InFlight:
    """Generating requests, then prompts that have started, then those that can start."""

    def __init__(self, pieces: FirstComeFirstServed | EqualProgress, *, static: bool) -> None:
        self._pieces = pieces
        self._static = static

    def compose(self, step: Step) -> Iterator[Action]:
        """Nobody starts in a step that had to pause somebody, nor in a static batch that runs."""
        yield Continue(which=Which.DECODE, strict=True)
        yield Continue(which=Which.PREFILL, size=self._pieces.size)
        if not step.evicted and not (self._static and step.num_running):
            yield from one_by_one(step, Admit(max_seqs=None if self._static else 1, size=self._pieces.size))
        yield from self._pieces.share(step)


class PassOverShared:
    """Passes over a request whose first new block another prompt is about to offer; ``inner`` decides on the others."""

    def __init__(self, inner: Admission) -> None:
        self._inner = inner
        self._step: Step | None = None
        self._coming: set[bytes] = set()  # keys of the first new blocks of prompts at work in this step

    def claim(self, sequence: Sequence) -> int:
        """As inside."""
        return self._inner.claim(sequence)

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """SKIP, or as inside."""
        size = step.config.block_size
        if step is not self._step:
            self._step = step
            self._coming = {key for other in step.running if (key := self._first_new(other, 0, size)) is not None}
        key = self._first_new(sequence, offer.num_cached // size, size)
        if key is not None and key in self._coming and sequence.request.params.prompt_logprobs is None:
            return Verdict.SKIP
        verdict = self._inner.decide(sequence, offer, step)
        if verdict is Verdict.START and key is not None:
            self._coming.add(key)
        return verdict

    def _first_new(self, sequence: Sequence, num_cached: int, size: int) -> bytes | None:
        """Key of the first full block of its prompt that is not in the prefix cache yet."""
        index = max(num_cached, sequence.num_published, sequence.num_cached // size)
        if sequence.content is None or (index + 1) * size > sequence.num_prompt:
            return None
        return sequence.keys(index + 1, size)[index]
