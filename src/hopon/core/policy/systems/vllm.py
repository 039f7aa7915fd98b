"""vLLM: ``vllm-v0``, the engine of 2023 and 2024, and ``vllm``, the V1 engine of 2025.

V0. A pass has prompts only or decodes only, prompts first: all of the waiting that fit, whole, as long as nobody is
swapped out and a share of the pool (the watermark) stays free. If nobody starts, all running sequences decode; one
that finds no block preempts the last in order of arrival, itself if it is the last. The victim recomputes, at the
front of the queue, or is swapped to the host; swapped ones come back before any new prompt, in a pass in which nobody
was preempted. Source: the SOSP'23 paper and ``vllm/core/scheduler.py`` up to 0.6, also as ported in Sarathi-Serve
(``vllm_scheduler.py``, OSDI'24) and Vidur (MLSys'24); swapping and the delay factor from general knowledge.

V1. There are no phases. Running sequences take what they have left, in the order in which they were admitted; then the
waiting start, unless somebody was preempted in this pass. A sequence that finds no block preempts the last of the
running, or the one of the lowest priority wherever it stands; that one's tokens are free again if it was served in
this pass. When the sequence at hand is itself the victim, nobody behind it runs. Memory grows with the chunks, but a
sequence starts only where all of it would fit beside what the running prompts have still to take. Source:
``vllm/v1/core/sched/scheduler.py`` (2025).

Not modelled. V0: several sequences of one request (gang scheduling; for those it swaps by default, for single ones it
recomputes); that a prompt which alone would break into the watermark is never run; the abort when the host tier is
full (such a victim recomputes here). V1: the queue of blocked requests (grammars, remote KV, adapters),
``prefill_schedule_interval``, asynchronous scheduling, speculation, and the limits of the front door.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import ByChunk, Offer, Verdict, WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue, Refuse, one_by_one
from hopon.core.policy.eviction import Freed, Newest, Victim
from hopon.core.policy.order import Arrival, Key
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmV0:
    """Prompts first, else decodes; the newest is preempted.

    Args:
        preemption: "recompute" or "swap" (``--preemption-mode``). "swap" needs a host tier (``--swap-space``).
        watermark: share of the pool that an admission leaves free while others run.
        delay_factor: ``--scheduler-delay-factor``: new prompts wait until the first of them has waited longer than
            this many times the last prompt pass took.
    """

    preemption: Literal["recompute", "swap"] = "recompute"
    watermark: float = 0.01
    delay_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption must be 'recompute' or 'swap', got {self.preemption!r}")
        check_watermark(self.watermark)
        if not self.delay_factor >= 0:
            raise ValueError(f"delay_factor must be at least 0, got {self.delay_factor}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """The defaults without chunked prefill; the swap space depends on the model's block and is left to the user."""
        return {
            "max_num_seqs": 256,
            "max_num_batched_tokens": max(max_model_len, 2048),
            "block_size": 16,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for swapping without a host tier."""
        if self.preemption == "swap" and not config.num_host_blocks:
            raise ValueError("preemption=swap needs a host tier to move blocks to, but num_host_blocks is 0")
        return Policy(
            order=Arrival(),
            admission=WholePrompt(watermark=self.watermark, spare_per_running=0),
            composition=PromptsOrDecodes(self.delay_factor),
            eviction=Newest(Freed.HOST if self.preemption == "swap" else Freed.ALL),
        )

    card: ClassVar[Card] = Card(
        system="vLLM, the engine of 2023 and 2024 (V0)",
        aliases=("continuous batching", "PagedAttention", "prefill-prioritising"),
        joins="At any pass, ahead of all decodes: all waiting prompts that fit whole, in order, unless somebody is "
        "swapped out; 1 % of the pool stays free.",
        prefill="Passes of whole prompts only; while one runs, nobody decodes.",
        memory="Blocks for the prompt at the start, one more whenever the last is full.",
        eviction="The last to arrive of the running recomputes from the front of the queue, or is swapped to the "
        "host; nobody starts while anybody is swapped out.",
        short_waits="Before its first token it waits for memory and for swapped-out requests to come back; after "
        "it, its stream stops whenever a pass of other people's prompts runs.",
        flags={
            "preemption": "--preemption-mode",
            "watermark": "BlockSpaceManager watermark",
            "delay_factor": "--scheduler-delay-factor",
            "max_num_seqs": "--max-num-seqs",
            "max_num_batched_tokens": "--max-num-batched-tokens",
            "block_size": "--block-size",
            "enable_chunked_prefill": "--enable-chunked-prefill",
            "enable_prefix_caching": "--enable-prefix-caching",
        },
        limits="Long prompts stall every stream (generation stalls). Under memory pressure, requests are computed "
        "again.",
        not_modelled="Several sequences of one request, the abort when the host tier is full.",
        source="Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, "
        "SOSP'23; vllm/core/scheduler.py up to 0.6",
        date="2023-2024",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """The running in order of admission, whatever they have left; then the waiting.

    Args:
        scheduling_policy: ``--scheduling-policy``: "fcfs" or "priority".
        long_prefill_token_threshold: most tokens of one sequence in a pass; 0 for no such limit.
        scheduler_reserve_full_isl: a sequence starts only where all of it would fit; without, its first chunk.
        watermark: share of the pool that an admission leaves free while others run.
    """

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be 'fcfs' or 'priority', got {self.scheduling_policy!r}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        check_watermark(self.watermark)

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """A server's defaults on a device of less than 80 GB."""
        return {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        by_priority = self.scheduling_policy == "priority"
        return Policy(
            order=Admitted(by_priority=by_priority),
            admission=BesidePrompts(whole_fits=self.scheduler_reserve_full_isl, watermark=self.watermark),
            composition=RunningFirst(self.long_prefill_token_threshold or None),
            eviction=LowestPriority() if by_priority else Newest(),
        )

    card: ClassVar[Card] = Card(
        system="vLLM V1",
        aliases=("continuous batching", "chunked prefill", "no phases"),
        joins="In any step in which nobody was preempted, behind the running, in order, while a seat and tokens of "
        "the budget are left and all of it would fit beside what running prompts have still to take.",
        prefill="In chunks, in the same pass as decodes: running requests take what they have left in the order in "
        "which they were admitted, the waiting take the rest of the budget.",
        memory="Blocks as the chunks come; nothing is reserved.",
        eviction="The last admitted (or the lowest priority) gives everything back and recomputes, often from the "
        "prefix cache.",
        short_waits="It waits behind running prompts for tokens of the budget, for a seat, and for memory for its "
        "prompt; in a step that had to preempt somebody nobody starts at all.",
        flags={
            "scheduling_policy": "--scheduling-policy",
            "long_prefill_token_threshold": "--long-prefill-token-threshold",
            "scheduler_reserve_full_isl": "scheduler_reserve_full_isl",
            "watermark": "watermark",
            "max_num_seqs": "--max-num-seqs",
            "max_num_batched_tokens": "--max-num-batched-tokens",
            "block_size": "--block-size",
            "enable_chunked_prefill": "--enable-chunked-prefill",
            "enable_prefix_caching": "--enable-prefix-caching",
        },
        limits="A running prompt admitted before a decode takes its chunk before that decode's token; with a small "
        "budget a decode can miss a step. Memory pressure means preemption.",
        not_modelled="Queues of blocked requests (grammars, remote KV, adapters), prefill_schedule_interval, "
        "asynchronous scheduling, speculation, limits of the front door.",
        source="vllm/v1/core/sched/scheduler.py",
        date="2025",
    )


def check_watermark(watermark: float) -> None:
    """Raise ValueError unless it is a share of a pool."""
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark must be in [0, 1), got {watermark}")


class PromptsOrDecodes:
    """A pass of whole prompts where anybody can start, else a pass of decodes."""

    def __init__(self, delay_factor: float) -> None:
        self._delay_factor = delay_factor
        self._latency = 0.0  # seconds from the last pass of prompts to the one after it
        self._last: tuple[float, bool] = (0.0, False)  # time of the pass before, and whether it had prompts

    def compose(self, step: Step) -> Iterator[Action]:
        """Prompts if nobody is swapped out; decodes if nobody started; then the swapped ones."""
        time, had_prompts = self._last
        if had_prompts:
            self._latency = step.now - time
        self._last = (step.now, False)
        swapped = self._any_swapped(step)
        if not swapped and self._is_due(step):
            yield from self._prompts(step)
            if step.admitted:
                self._last = (step.now, True)
                return
        yield Continue()
        if swapped and not step.evicted:
            yield Admit(accepts=lambda sequence: bool(sequence.host_blocks))

    def _any_swapped(self, step: Step) -> bool:
        """They stand ahead of those that never ran."""
        for sequence in step.waiting:
            if sequence.host_blocks:
                return True
            if not sequence.resumes:
                break
        return False

    def _is_due(self, step: Step) -> bool:
        """Whether new prompts have waited long enough."""
        head = next(iter(step.waiting), None)
        if head is None or not step.num_running:
            return True
        return not self._delay_factor or step.now - head.request.arrival > self._delay_factor * self._latency

    def _prompts(self, step: Step) -> Iterator[Action]:
        """One prompt after the other: what stands behind one that starts may be too long for any pass."""
        started = -1
        while started < len(step.admitted):
            started = len(step.admitted)
            yield from self._refuse_long(step)
            yield Admit(whole=True, max_seqs=1)

    def _refuse_long(self, step: Step) -> Iterator[Action]:
        """What can outgrow a pass cannot be recomputed in one; vLLM's own limit (>= max_model_len) rules it out."""
        limit = step.config.max_num_batched_tokens
        while (head := next(iter(step.waiting), None)) is not None and not head.resumes:
            length = head.num_prompt + head.max_output - 1
            if length <= limit:
                return
            yield Refuse(
                head,
                f"{head.num_prompt} prompt tokens and up to {head.max_output} output tokens can make a pass of "
                f"{length} tokens, but max_num_batched_tokens is {limit}",
            )


class RunningFirst:
    """Everybody takes what is left of it; newcomers only where nobody had to go."""

    def __init__(self, max_chunk: int | None) -> None:
        self._max_chunk = max_chunk

    def compose(self, step: Step) -> Iterator[Action]:
        """The running, then the waiting."""
        yield Continue(max_chunk=self._max_chunk, strict=True)
        if not step.evicted:
            yield from one_by_one(step, Admit(max_seqs=1, max_chunk=self._max_chunk))


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The waiting by (priority, arrival), the running by the time of their last admission."""

    by_priority: bool
    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """(time of admission if it runs, priority if it counts, order of arrival)."""
        running = sequence.row is not None
        return (now if running else 0.0, sequence.request.priority if self.by_priority else 0, sequence.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class BesidePrompts(ByChunk):
    """By chunk, but what the running prompts have still to take is not there for newcomers."""

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP."""
        if not self.whole_fits:
            return ByChunk.decide(self, sequence, offer, step)
        size = step.config.block_size
        needed = -(-sequence.num_tokens // size) - offer.num_cached // size
        needed += sum(
            max(0, -(-other.num_tokens // size) - len(other.blocks))
            for other in step.running
            if other.num_remaining > 1
        )
        if offer.num_running:
            needed += int(self.watermark * step.num_blocks)
        return Verdict.START if needed <= offer.num_free else Verdict.STOP


class LowestPriority:
    """The running sequence of the largest (priority, arrival) gives everything back, wherever it stands."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim:
        """Among equals, the one that came last."""
        return Victim(sequence=max(step.running, key=lambda other: (other.request.priority, other.number)))
