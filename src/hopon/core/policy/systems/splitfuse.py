"""DeepSpeed-FastGen's Dynamic SplitFuse (DeepSpeed-MII): passes of a fixed number of tokens.

A pass serves (1) everybody who generates with one token, if its last block has room or a block is free; others wait
in silence, nobody is preempted for them. (2) Prompts in order fill the pass up to its tokens: a prompt is served only
where all that is left of it would fit into memory, else it and those behind it wait; if it is cut, the rest goes to the
front. Memory grows with the pieces. When nothing can be served although somebody waits, the last request that holds
memory gives everything back and goes to the back of the queue as prompt plus output.
Source: the FastGen blog (2023) and ``mii/batching/ragged_batching.py`` (2024); its first versions flush all requests
when stuck instead of the last.

Not modelled: ``max_tracked_sequences`` (2048) above the number of seats, which cannot exceed the tokens of a pass
here; ``max_context``, the model's length here; and that decodes which were served queue behind those which were not
(here the order is that of arrival). The only request alive ends when it fills the pool; the original would start it
again for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import ByChunk
from hopon.core.policy.composition import Action, Admit, Continue, Evict, Which, is_stuck, one_by_one
from hopon.core.policy.eviction import Requeue, Victim
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFuse:
    """Decodes, then pieces of prompts, up to the tokens of a pass.

    Args:
        max_ragged_sequence_count: most sequences of a pass.
    """

    max_ragged_sequence_count: int = 512

    def __post_init__(self) -> None:
        if self.max_ragged_sequence_count < 1:
            raise ValueError(f"max_ragged_sequence_count must be at least 1, got {self.max_ragged_sequence_count}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """``max_ragged_batch_size`` tokens, as many seats, blocks of 128 tokens."""
        return {
            "max_num_seqs": 768,
            "max_num_batched_tokens": 768,
            "block_size": 128,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        return Policy(
            order=Arrival(),
            admission=ByChunk(),
            composition=FixedPasses(self.max_ragged_sequence_count),
            eviction=InSilence(),
        )

    card: ClassVar[Card] = Card(
        system="DeepSpeed-FastGen (DeepSpeed-MII)",
        aliases=("Dynamic SplitFuse", "chunked prefill", "ragged batching"),
        joins="In any pass with tokens left, in order, if all of its prompt would fit into memory.",
        prefill="Long prompts are split, short ones fused, so that every pass has the same number of tokens; "
        "decodes come first.",
        memory="Blocks as the pieces come.",
        eviction="Nobody is preempted for a decode that finds no block: it waits in silence. Only when nothing can "
        "go on does the last holder give everything back and go to the back of the queue.",
        short_waits="It waits for the prompts before it to pass through passes of a fixed size, and for memory; "
        "and, once it generates, its stream can stop without notice while others fill the pool.",
        flags={
            "max_ragged_sequence_count": "max_ragged_sequence_count",
            "max_num_batched_tokens": "max_ragged_batch_size",
            "max_num_seqs": "max_tracked_sequences",
            "block_size": "KV block size",
        },
        limits="Which decodes wait in a full pool is a matter of order. A victim loses its place in the queue.",
        not_modelled="max_tracked_sequences above the tokens of a pass; that served decodes queue behind those "
        "which were not.",
        source="DeepSpeed-FastGen blog and mii/batching/ragged_batching.py",
        date="November 2023 to 2024",
    )


class FixedPasses:
    """Decodes, the cut prompt, whole capacity for every prompt; the last holder goes when nothing else does."""

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs

    def compose(self, step: Step) -> Iterator[Action]:
        """A pass; if it is empty for want of memory, one more after an eviction."""
        yield from self._fill(step)
        if step.running and is_stuck(step):
            yield Evict(Victim(sequence=step.running[-1], requeue=Requeue.BACK))
            yield from self._fill(step)

    def _fill(self, step: Step) -> Iterator[Action]:
        yield Continue(which=Which.DECODE, max_seqs=self._max_seqs)
        for sequence in [sequence for sequence in step.running if sequence.num_remaining > 1]:
            missing = -(-sequence.num_tokens // step.config.block_size) - len(sequence.blocks)
            if missing > step.num_free or len(step.chunks) >= self._max_seqs:
                return
            yield Continue(which=Which.PREFILL, max_seqs=1)
        if len(step.chunks) < self._max_seqs:
            yield from self._start(step)

    def _start(self, step: Step) -> Iterator[Action]:
        for action in one_by_one(step, Admit(max_seqs=1)):
            yield action
            if len(step.chunks) >= self._max_seqs:
                return


class InSilence:
    """Whoever cannot grow waits; alone, it is told so by becoming its own victim, and ends with what it has."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim | None:
        """Nobody, or the only one."""
        return Victim(sequence=sequence) if step.num_running == 1 else None
