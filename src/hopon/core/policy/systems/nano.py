"""nano-vllm (the public repository, ``scheduler.py``; read in 2025): prefill first, in about a hundred lines.

As long as somebody waits and fits, a pass has prompts only; only the first sequence of such a pass may be cut to the
budget, others must fit whole. Otherwise all running sequences decode, and one that cannot grow preempts the last, which
recomputes and goes to the front of the queue.

Not modelled: nano-vllm counts seats per pass, so that more sequences than ``max_num_seqs`` can be alive; here they are
the rows of the engine. Its tensor parallelism and CUDA graphs are no matter of scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue
from hopon.core.policy.eviction import Newest
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Nano:
    """Prefill first; no knobs beside the limits that :meth:`settings` publishes."""

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """``max_num_seqs``, ``max_num_batched_tokens``, ``kvcache_block_size`` of nano-vllm's ``Config``."""
        return {"max_num_seqs": 512, "max_num_batched_tokens": 16384, "block_size": 256}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        return Policy(
            order=Arrival(),
            admission=WholePrompt(watermark=0.0, spare_per_running=0),
            composition=PrefillFirst(),
            eviction=Newest(),
        )

    card: ClassVar[Card] = Card(
        system="nano-vllm",
        aliases=("continuous batching", "prefill first"),
        joins="At any pass, ahead of all decodes, in order, if its prompt fits into memory and, but for the first "
        "of the pass, whole into the budget.",
        prefill="Passes of prompts only; the first of a pass may be cut.",
        memory="Blocks for the prompt at the start, one more whenever the last is full.",
        eviction="The last running request recomputes, from the front of the queue.",
        short_waits="It waits for a seat and for memory; after its first token its stream stops whenever prompts "
        "run, which is as long as anybody waits and fits.",
        flags={
            "max_num_seqs": "max_num_seqs",
            "max_num_batched_tokens": "max_num_batched_tokens",
            "block_size": "kvcache_block_size",
        },
        limits="Under a steady stream of prompts nobody decodes.",
        not_modelled="More sequences alive than max_num_seqs.",
        source="nano-vllm's scheduler.py, public code",
        date="2025",
    )


class PrefillFirst:
    """A pass of prompts where anybody can start, else a pass of decodes."""

    def __init__(self) -> None:
        self._cut: Sequence | None = None  # whose prompt did not fit into its pass

    def compose(self, step: Step) -> Iterator[Action]:
        """The cut one or the first of the waiting; whole prompts beside it; decodes if nobody came."""
        if self._cut is not None:
            yield Continue(accepts=lambda sequence: sequence is self._cut)
        if not step.chunks:
            yield Admit(max_seqs=1)
        if not step.chunks:
            yield Continue()
            return
        first, chunk = next(iter(step.chunks.values()))
        self._cut = None if chunk.sample else first
        if chunk.sample:
            yield Admit(whole=True)
