"""TurboMind, LMDeploy's C++ engine: persistent slots, and age decides.

Every accepted request is a candidate in every step, the oldest first. Each takes the memory it needs for all its
tokens, from those younger than itself if it must, from the youngest first and no more than it needs, and never from an
older one. The first that finds none ends the pass: it and everybody younger is inactive in this step. Inactive
sequences keep what they have until somebody takes it, and compute only what was taken again.

Prompts that are to be computed within ``max_prefill_iters`` steps share them evenly.

Source: LMDeploy's ``turbomind`` batch and sequence manager, public code of 2025. There, age is a stamp on each block
and victims are found as blocks older than a cut-off, least recently used first; the walk touches blocks from the
youngest request to the oldest and from tail to head, which is the order of victims here. Not modelled: conversations
that go on in their slot (the prefix cache, off by default, stands for that).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue
from hopon.core.policy.eviction import Freed, Victim, keepers
from hopon.core.policy.order import Age
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class TailOfYoungest:
    """The youngest gives back the end of what it has; when that is the one who needs it, it becomes inactive."""

    def __init__(self) -> None:
        self.failed = False  # somebody became inactive for want of memory since this was last reset

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim:
        """From the inactive first: they are younger than all that are active."""
        kept = keepers(step)
        youngest = kept[-1] if kept else step.running[-1]
        if youngest is not sequence:
            return Victim(sequence=youngest, freed=Freed.TAIL, num_blocks=missing)
        self.failed = True
        return Victim(sequence=sequence, freed=Freed.TAIL, num_blocks=0)


class ByAge:
    """The active in order of age, then the inactive and the new ones.

    Args:
        eviction: knows whether somebody found no memory.
        num_tokens: tokens of a step at least, if there are as many; 0: no such floor.
        num_iters: steps over which prompts are spread.
    """

    def __init__(self, *, eviction: TailOfYoungest, num_tokens: int, num_iters: int) -> None:
        self._eviction = eviction
        self._num_tokens = num_tokens
        self._shares = deque([0] * num_iters)

    def compose(self, step: Step) -> Iterator[Action]:
        """One pass over the candidates; it ends with the first that finds no memory."""
        least = step.budget - min(step.budget, self._tokens(step))
        self._eviction.failed = False
        yield Continue(max_tokens=step.budget - least, strict=True)
        if not self._eviction.failed:
            yield Admit(max_tokens=step.budget - least)

    def _tokens(self, step: Step) -> int:
        """Tokens of this step, so that the prompts end in time."""
        candidates = [*step.running, *islice(step.waiting, step.config.max_num_seqs - step.num_running)]
        beyond_one = sum(max(0, one.num_remaining - 1) for one in candidates)
        share = -(-beyond_one // len(self._shares))
        self._shares.popleft()
        self._shares = deque(max(before, share) for before in (*self._shares, share))
        return max(self._shares[0] + len(candidates), self._num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurboMind:
    """Persistent slots, in order of age.

    Args:
        max_batch_size: slots (``max_batch_size``; 128 on most devices).
        max_prefill_token_num: most tokens of a step (``max_prefill_token_num``).
        num_tokens_per_iter: tokens that a step computes in any case, if there are as many (``num_tokens_per_iter``).
        max_prefill_iters: steps over which prompts are spread (``max_prefill_iters``).
        cache_block_seq_len: tokens per block (``cache_block_seq_len``).
        prefix_caching: reuse blocks of equal prefixes (``enable_prefix_caching``).

    Raises:
        ValueError: a knob out of range.
    """

    max_batch_size: int = 128
    max_prefill_token_num: int = 8192
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    cache_block_seq_len: int = 64
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.max_prefill_iters < 1:
            raise ValueError(f"max_prefill_iters must be at least 1, got {self.max_prefill_iters}")
        if self.num_tokens_per_iter < 0:
            raise ValueError(f"num_tokens_per_iter must be at least 0, got {self.num_tokens_per_iter}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """See the class."""
        return {
            "block_size": self.cache_block_seq_len,
            "max_num_seqs": self.max_batch_size,
            "max_num_batched_tokens": self.max_prefill_token_num,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.prefix_caching,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module. Raises ValueError where prompts are to be spread and must not be cut."""
        if self.max_prefill_iters > 1 and not config.enable_chunked_prefill:
            raise ValueError(f"max_prefill_iters {self.max_prefill_iters} cuts prompts: it needs chunked prefill")
        eviction = TailOfYoungest()
        return Policy(
            order=Age(),
            admission=WholePrompt(watermark=0.0, spare_per_running=0),
            composition=ByAge(
                eviction=eviction,
                num_tokens=self.num_tokens_per_iter,
                num_iters=self.max_prefill_iters,
            ),
            eviction=eviction,
        )

    card: ClassVar[Card] = Card(
        system="LMDeploy, TurboMind engine",
        aliases=("persistent batching", "slots", "continuous batching"),
        joins="In any step, the oldest first, as soon as one of the slots is free and memory can be had, if need "
        "be from those younger than itself.",
        prefill="In the same pass as decodes; spread evenly over max_prefill_iters steps where that is set.",
        memory="Blocks for all of its tokens, when it takes part in a step.",
        eviction="The youngest gives back the end of what it has, no more than is needed; whoever finds nothing is "
        "inactive in this step and keeps the rest.",
        short_waits="It waits for a slot; and as the youngest it is the first to lose memory and to be left out of "
        "a step.",
        flags={
            "max_batch_size": "max_batch_size",
            "max_prefill_token_num": "max_prefill_token_num",
            "num_tokens_per_iter": "num_tokens_per_iter",
            "max_prefill_iters": "max_prefill_iters",
            "cache_block_seq_len": "cache_block_seq_len",
            "prefix_caching": "enable_prefix_caching",
        },
        limits="Age is everything: a short young request yields to a long old one.",
        not_modelled="Conversations that go on in their slot.",
        source="LMDeploy's turbomind batch and sequence manager, public code, and its turbomind.md",
        date="2025",
    )
