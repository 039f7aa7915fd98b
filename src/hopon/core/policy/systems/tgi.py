"""Hugging Face Text Generation Inference (backend v3, 2024): a batch that grows when it pays, and never preempts.

The batcher works in rounds. If nothing runs, it takes from the queue in order what fits. Otherwise a round tries to
admit a new batch and then computes one token for everybody. A request takes memory for its prompt and all of its output
when it starts, so that nobody is ever preempted; the first that finds no room ends the admission.

Models with chunking: new requests run in one pass with the old ones; ``max_batch_prefill_tokens`` counts all tokens of
the pass, and the last prompt is cut to fill it. Ratio and waiting are ignored. Without chunking: whole prompts within
``max_batch_prefill_tokens`` run in a pass of their own while the others wait, and only if there are enough of them:
``waiting_served_ratio`` times the running batch, or any number after ``max_waiting_tokens`` rounds without newcomers.
Source: ``backends/v3/src/{backend,queue}.rs`` and ``launcher/src/main.rs`` (2024). In either case the pass of an
admission is followed by one without, and right after a first batch another may be admitted.

Not modelled: padded models, speculation, and the front door's ``max_concurrent_requests``, which is the number of seats
here. A prompt that exceeds what TGI's validation would let pass is refused when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Offer, ReserveMaxTokens, Verdict
from hopon.core.policy.composition import Action, Admit, Continue, Refuse, Which
from hopon.core.policy.eviction import Never
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Tgi:
    """Reservations to the end; with chunking one mixed pass, without it prompts when there are enough of them.

    Args:
        chunking: the model's attention takes prompts in pieces.
        waiting_served_ratio: ``--waiting-served-ratio``: fewest newcomers per running request, without chunking.
        max_waiting_tokens: ``--max-waiting-tokens``: rounds after which any number of newcomers is enough.
        max_batch_prefill_tokens: ``--max-batch-prefill-tokens``; 0 for ``max_num_batched_tokens``.
        max_batch_total_tokens: ``--max-batch-total-tokens``: memory that requests may take; 0 for all of the pool.
        max_batch_size: ``--max-batch-size``, without chunking and for a first batch; 0 for no such limit.
    """

    chunking: bool = True
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_prefill_tokens: int = 0
    max_batch_total_tokens: int = 0
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        for name in (
            "waiting_served_ratio",
            "max_waiting_tokens",
            "max_batch_prefill_tokens",
            "max_batch_total_tokens",
            "max_batch_size",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """The launcher's defaults: 50 tokens more than the longest prompt (and a token for each seat), prefix reuse."""
        return {
            "max_num_seqs": 128,
            "max_num_batched_tokens": max(max_model_len - 1 + 50, 128),
            "block_size": 1,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for more memory than there is, and for less than a block."""
        total = self.max_batch_total_tokens or config.capacity_tokens
        if not config.block_size <= total <= config.capacity_tokens:
            raise ValueError(
                f"max_batch_total_tokens must be at least block_size {config.block_size} and at most "
                f"{config.capacity_tokens} (num_blocks {config.num_blocks} of {config.block_size}), got {total}"
            )
        max_blocks = total // config.block_size
        admission = ReserveComputed(max_blocks=max_blocks)
        return Policy(
            order=Arrival(), admission=admission, composition=Rounds(self, admission, config), eviction=Never()
        )

    card: ClassVar[Card] = Card(
        system="Hugging Face Text Generation Inference (TGI)",
        aliases=("continuous batching", "waiting-served ratio"),
        joins="In order, while memory for prompt + max_tokens is free: with chunking in any round but the one "
        "after an admission; without it only when enough wait: waiting_served_ratio times the running, or any "
        "number after max_waiting_tokens rounds.",
        prefill="With chunking in one pass with decodes; without it whole prompts in a pass of their own while all "
        "others wait.",
        memory="Prompt + max_tokens are taken at the start.",
        eviction="Never: what is taken suffices.",
        short_waits="It waits until memory for its whole possible answer is free, and, without chunking, until "
        "enough others wait with it to make the running batch stop for them, or until max_waiting_tokens rounds "
        "have passed.",
        flags={
            "chunking": "whether the model's attention supports it",
            "waiting_served_ratio": "--waiting-served-ratio",
            "max_waiting_tokens": "--max-waiting-tokens",
            "max_batch_prefill_tokens": "--max-batch-prefill-tokens",
            "max_batch_total_tokens": "--max-batch-total-tokens",
            "max_batch_size": "--max-batch-size",
            "max_num_seqs": "--max-concurrent-requests",
        },
        limits="Large max_tokens leave memory unused. The project is in maintenance; its makers point to other "
        "engines.",
        not_modelled="Padded models, speculation, the front door's own queue.",
        source="backends/v3/src/{backend,queue}.rs and launcher/src/main.rs",
        date="2024",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReserveComputed(ReserveMaxTokens):
    """Memory for all tokens that will be computed; the last output token never is.

    Args:
        max_blocks: most of the pool's blocks that may be in use.
    """

    max_blocks: int

    def claim(self, sequence: Sequence) -> int:
        """Prompt and ``max_tokens`` but one."""
        return max(sequence.num_tokens, sequence.num_prompt + sequence.max_output - 1)

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP: strictly in order."""
        kept_free = step.num_blocks - self.max_blocks
        return Verdict.START if offer.num_needed + kept_free <= offer.num_free else Verdict.STOP


class Rounds:
    """Passes of the batcher's loop; what is left of a round after an admission is the next pass."""

    def __init__(self, knobs: Tgi, admission: ReserveComputed, config: SchedulerConfig) -> None:
        self._knobs = knobs
        self._admission = admission
        self._whole = not (knobs.chunking and config.enable_chunked_prefill)
        self._max_tokens = min(
            knobs.max_batch_prefill_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        self._waiting_tokens = 1  # passes since somebody was admitted, as the batcher counts them
        self._admitted = False  # the pass before admitted somebody: this one is the rest of its round

    def compose(self, step: Step) -> Iterator[Action]:
        """A first batch; the rest of a round; or a new round."""
        yield from self._refuse_long(step)
        fresh = not step.num_running
        if fresh:
            self._admitted = False
        admits = not self._admitted
        self._admitted = False
        if self._knobs.chunking:
            yield Continue(which=Which.DECODE)
            yield Continue(which=Which.PREFILL, max_tokens=self._left(step))
            if admits:
                yield Admit(
                    max_tokens=self._left(step), max_seqs=(self._knobs.max_batch_size or None) if fresh else None
                )
        else:
            if admits:
                yield from self._admit_enough(step)
            if not step.admitted:
                yield Continue()
        if step.admitted:
            self._waiting_tokens = 1
            self._admitted = not fresh
        else:
            self._waiting_tokens += 1

    def _left(self, step: Step) -> int:
        """Tokens of this pass that are not taken yet."""
        return max(0, self._max_tokens - (step.config.max_num_batched_tokens - step.budget))

    def _admit_enough(self, step: Step) -> Iterator[Action]:
        """Whole prompts, if there are as many as it takes to make the others wait."""
        knobs = self._knobs
        fewest = 1
        if step.num_running and self._waiting_tokens < knobs.max_waiting_tokens:
            fewest = max(1, int(step.num_running * knobs.waiting_served_ratio))
        most = knobs.max_batch_size - step.num_running if knobs.max_batch_size else None
        if most is None or most > 0:
            yield Admit(min_seqs=fewest, max_seqs=most, max_tokens=self._max_tokens, whole=True)

    def _refuse_long(self, step: Step) -> Iterator[Action]:
        """What no batch can ever hold."""
        size = step.config.block_size
        while (head := next(iter(step.waiting), None)) is not None:
            claim = self._admission.claim(head)
            if self._whole and head.num_tokens > self._max_tokens:
                yield Refuse(
                    head,
                    f"the prompt has {head.num_tokens} tokens, but max_batch_prefill_tokens is {self._max_tokens}",
                )
            elif -(-claim // size) > self._admission.max_blocks:
                yield Refuse(
                    head,
                    f"the request reserves {claim} tokens of memory, but max_batch_total_tokens allows "
                    f"{self._admission.max_blocks} blocks of {size}",
                )
            else:
                return
