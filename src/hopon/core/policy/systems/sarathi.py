"""Sarathi-Serve (OSDI'24): chunked prefill without stalls, within a fixed number of tokens per pass.

A pass serves (1) every running decode with one token, preempting the last in order of arrival while no block is free;
(2) running prompts that are not finished, in order, with what is left of the chunk size; (3) the waiting, in order:
one starts with what is left of the chunk size if its whole prompt fits into memory beside the watermark. The chunk
size counts all tokens of the pass, decodes too. Victims recompute, from the front of the queue. With a chunk schedule
the size depends on how far the prompt at hand has come: larger pieces first, since later ones read more context.
Source: the paper's Algorithm 3 and ``sarathi_scheduler.py`` of its repository (2024).

Not modelled: pipeline stages, and the baseline ``simple_chunking``. The watermark does not hold back a prompt that is
alone. A prompt longer than the schedule provides for stays at its last size, where the original ends with an assertion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue, Which
from hopon.core.policy.eviction import Newest
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.policy.systems.vllm import check_watermark
from hopon.core.sequence import Sequence
from hopon.core.step import Step

ROUNDING = 32
"""Sizes of a schedule are multiples of this many tokens (or of the lowest size where that is smaller)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sarathi:
    """Decodes, then pieces of running prompts, then newcomers, up to a chunk size.

    Args:
        chunk_size: tokens of a pass (``--chunk_size``).
        watermark: share of the pool that an admission leaves free while others run.
        chunk_schedule_stages: sizes of a schedule; 0 for the one ``chunk_size``
            (``--enable_dynamic_chunking_schedule``).
        low_chunk_size: last size of the schedule.
        high_chunk_size: first size of the schedule.
        chunk_schedule_max_tokens: prompt tokens after which the schedule has come to its end.
    """

    chunk_size: int = 512
    watermark: float = 0.01
    chunk_schedule_stages: int = 0
    low_chunk_size: int = 0
    high_chunk_size: int = 0
    chunk_schedule_max_tokens: int = 0

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        check_watermark(self.watermark)
        if self.chunk_schedule_stages < 0:
            raise ValueError(f"chunk_schedule_stages must be at least 0, got {self.chunk_schedule_stages}")
        if self.chunk_schedule_stages:
            if not 1 <= self.low_chunk_size <= self.high_chunk_size:
                raise ValueError(
                    "a chunk schedule needs 1 <= low_chunk_size <= high_chunk_size, got "
                    f"{self.low_chunk_size} and {self.high_chunk_size}"
                )
            if self.chunk_schedule_max_tokens < self.chunk_schedule_stages:
                raise ValueError(
                    f"chunk_schedule_max_tokens must be at least chunk_schedule_stages {self.chunk_schedule_stages}, "
                    f"got {self.chunk_schedule_max_tokens}"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Chunk size per stage: evenly spaced from the highest down to the lowest, rounded."""
        stages = self.chunk_schedule_stages
        if not stages:
            return (self.chunk_size,)
        low, span = self.low_chunk_size, self.high_chunk_size - self.low_chunk_size
        rounding = min(ROUNDING, low)
        even = [low + int(span * stage / max(1, stages - 1)) for stage in reversed(range(stages))]
        return tuple(round(size / rounding) * rounding for size in even)

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """128 seats, and a budget that the chunk size fits into."""
        return {
            "max_num_seqs": 128,
            "max_num_batched_tokens": max(*self.sizes, 128),
            "block_size": 16,
            "enable_prefix_caching": False,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        stages = max(1, self.chunk_schedule_stages)
        return Policy(
            order=Arrival(),
            admission=WholePrompt(watermark=self.watermark, spare_per_running=0),
            composition=StallFree(self.sizes, -(-self.chunk_schedule_max_tokens // stages) or 1),
            eviction=Newest(),
        )

    card: ClassVar[Card] = Card(
        system="Sarathi-Serve",
        aliases=("stall-free batching", "chunked prefill", "piggybacking decodes"),
        joins="In any pass with tokens left of the chunk size, in order, if the whole prompt fits into memory "
        "beside the watermark and a seat is free.",
        prefill="In chunks with what decodes leave of the chunk size, which counts all tokens of the pass.",
        memory="Blocks for the whole prompt at the start, one more whenever the last is full.",
        eviction="The last to arrive of the running recomputes, from the front of the queue.",
        short_waits="It waits for its turn in the chunk size, behind all decodes and behind the prompts that came "
        "before it: a long prompt ahead of it takes many passes; and for memory for its whole prompt.",
        flags={
            "chunk_size": "--chunk_size",
            "watermark": "watermark of the block manager",
            "chunk_schedule_stages": "--enable_dynamic_chunking_schedule, chunk_schedule_stages",
            "low_chunk_size": "low_chunk_size",
            "high_chunk_size": "high_chunk_size",
            "chunk_schedule_max_tokens": "chunk_schedule_max_tokens",
            "max_num_seqs": "--max_num_seqs",
            "block_size": "--block_size",
        },
        limits="A chunk reads the keys of all chunks before it again; small chunks make prompts slower. The chunk "
        "size has to be found for each machine and limit.",
        not_modelled="Pipeline stages; the baseline simple_chunking.",
        source="Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI'24, "
        "Algorithm 3, and its repository",
        date="2024",
    )


class StallFree:
    """No decode waits for a prompt."""

    def __init__(self, sizes: tuple[int, ...], tokens_per_stage: int) -> None:
        self._sizes = sizes
        self._tokens_per_stage = tokens_per_stage

    def compose(self, step: Step) -> Iterator[Action]:
        """Decodes, running prompts, newcomers."""
        limit = step.config.max_num_batched_tokens

        def size(sequence: Sequence, remaining: int, budget: int) -> int:
            stage = min((sequence.num_tokens - remaining) // self._tokens_per_stage, len(self._sizes) - 1)
            return max(0, self._sizes[stage] - (limit - budget))

        yield Continue(which=Which.DECODE)
        yield Continue(which=Which.PREFILL, size=size)
        yield Admit(size=size)
