"""OpenVINO GenAI's continuous batching in its split-fuse mode (``dynamic_split_fuse``), with partial preemption.

Requests stand in one list in order of arrival. A pass serves first those that generate: each takes what it has left
(more than a token after a preemption), and where memory is missing the lowest in the list that holds any, below the one
at hand, gives back the tail blocks that are needed and no more. It goes on in a later pass, from what it has kept.
Never is half a prompt left over: one that would lose a part of its prompt gives everything back. Who finds nobody below
waits. Then prompts, in order, take what tokens of the pass and free blocks there are; nobody is preempted for them.
Source: ``src/cpp/src/continuous_batching/scheduler.hpp`` and ``scheduler_config.hpp`` (2024/2025). In the newest
version only the other mode (``dynamic_split_fuse = false``) forbids half a prompt: ``never_half_a_prompt=false``.

Not modelled: that other mode (``vllm-v0`` is like it), beam search, growth of the cache, cache eviction within a
sequence. ``max_num_seqs``, which has no effect in split-fuse mode, is the number of seats here. When prompts alone have
filled the pool and nothing can go on, OpenVINO ends all requests as out of memory; here the lowest gives everything
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import ByChunk
from hopon.core.policy.composition import Action, Admit, Continue, Evict, is_stuck, one_by_one
from hopon.core.policy.eviction import Freed, Victim
from hopon.core.policy.order import Age
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVino:
    """Decodes, then prompts, within a pass; the lowest in the list gives back the tail that is needed.

    Args:
        never_half_a_prompt: a victim that would lose a part of its prompt loses everything.
    """

    never_half_a_prompt: bool = True

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """The fields of ``SchedulerConfig``; blocks of the CPU plugin."""
        return {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 256,
            "block_size": 32,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        tail = TailOfLowest(never_half_a_prompt=self.never_half_a_prompt)
        return Policy(
            order=Age(), admission=ByChunk(whole_fits=False), composition=DecodesThenPrompts(tail), eviction=tail
        )

    card: ClassVar[Card] = Card(
        system="OpenVINO GenAI, continuous batching in split-fuse mode",
        aliases=("dynamic_split_fuse", "continuous batching", "partial preemption"),
        joins="In any pass, behind decodes and running prompts, in order, with as many tokens as the pass and the "
        "free blocks have.",
        prefill="In pieces that fill the pass behind the decodes.",
        memory="Blocks as the pieces come; nothing beforehand.",
        eviction="The lowest in the list gives back only the tail blocks that are needed, and everything if it "
        "would keep half a prompt; nobody is preempted for a prompt.",
        short_waits="It waits for tokens and free blocks that decodes and earlier prompts leave; as the lowest in "
        "the list it is the first to give memory back.",
        flags={
            "never_half_a_prompt": "behaviour of versions before the newest",
            "max_num_seqs": "max_num_seqs",
            "max_num_batched_tokens": "max_num_batched_tokens",
            "block_size": "block size of the device",
            "enable_prefix_caching": "enable_prefix_caching",
        },
        limits="Prompts can fill the pool until nothing goes on; OpenVINO then ends them as out of memory.",
        not_modelled="The other mode (vllm-v0 is like it), beam search, growth of the cache, eviction within a "
        "sequence.",
        source="src/cpp/src/continuous_batching/scheduler.hpp and scheduler_config.hpp",
        date="2024-2025",
    )


def generates(sequence: Sequence) -> bool:
    """Whether its prompt has been computed once, whatever it has lost since."""
    return sequence.peak_computed >= sequence.num_prompt


def lowest(step: Step) -> Sequence | None:
    """The last in the list that holds memory, whether it runs or was preempted in part."""
    kept = [sequence for sequence in takewhile(lambda sequence: sequence.resumes, step.waiting) if sequence.blocks]
    return max((*kept[-1:], *step.running[-1:]), key=lambda sequence: sequence.rank, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TailOfLowest:
    """See the module. Alone, the one at hand is its own victim, and ends with what it has."""

    never_half_a_prompt: bool

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim | None:
        """The lowest below the one at hand, with as many tail blocks as are missing; nobody if there is none."""
        victim = lowest(step)
        if victim is not None and victim.rank > sequence.rank:
            return self.tail(victim, missing, step.config.block_size)
        return Victim(sequence=sequence) if step.num_running == 1 else None

    def tail(self, victim: Sequence, num_blocks: int, size: int) -> Victim:
        """Its last blocks, or everything."""
        kept = min(victim.num_computed, (len(victim.blocks) - num_blocks) * size)
        if kept <= 0 or (self.never_half_a_prompt and kept < victim.num_prompt):
            return Victim(sequence=victim)
        return Victim(sequence=victim, freed=Freed.TAIL, num_blocks=num_blocks)


class DecodesThenPrompts:
    """Those that generate in the order of the list, then prompts into what is left."""

    def __init__(self, tail: TailOfLowest) -> None:
        self._tail = tail

    def compose(self, step: Step) -> Iterator[Action]:
        """Running and preempted ones that generate; running and new prompts; a way out when all is full of prompts."""
        yield Continue(accepts=generates)
        yield from self._resume(step)
        yield from self._prompts(step)
        if is_stuck(step) and (victim := lowest(step)) is not None:
            yield Evict(Victim(sequence=victim))
            yield from self._prompts(step)  # they take what is free before the victim, which may generate, comes back

    def _resume(self, step: Step) -> Iterator[Action]:
        """Preempted ones go on in the pass after the one that preempted them; they, too, preempt whoever is below."""
        size = step.config.block_size
        while (head := next(iter(step.waiting), None)) is not None and generates(head) and head not in step.evicted:
            computed = step.cached_tokens(head)
            end = computed + min(head.num_tokens - computed, step.budget)
            missing = -(-end // size) - max(len(head.blocks), computed // size) - step.num_free
            victim = lowest(step)
            if step.budget and missing > 0 and victim is not None and victim.rank > head.rank:
                before = len(step.evicted)
                yield Evict(self._tail.tail(victim, missing, size))
                if len(step.evicted) > before:
                    continue
            before = len(step.admitted)
            yield Admit(max_seqs=1)
            if len(step.admitted) == before:
                return

    def _prompts(self, step: Step) -> Iterator[Action]:
        """Running and new ones, as far as tokens and free blocks go; nobody who was preempted in this pass."""
        size = step.config.block_size

        def slots(sequence: Sequence, remaining: int, budget: int) -> int:
            """Tokens that fit into its last block and the free ones."""
            computed = sequence.num_tokens - remaining
            return max(len(sequence.blocks), computed // size) * size - computed + step.num_free * size

        yield Continue(accepts=lambda sequence: not generates(sequence), size=slots)
        newcomer = Admit(
            max_seqs=1,
            size=slots,
            accepts=lambda sequence: not generates(sequence) and sequence not in step.evicted,
        )
        yield from one_by_one(step, newcomer)
