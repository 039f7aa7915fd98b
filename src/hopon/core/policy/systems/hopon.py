"""hopon's own policy, the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import DecodeFirst
from hopon.core.policy.eviction import Newest
from hopon.core.policy.fairness import FairShare, Resorted
from hopon.core.policy.order import Aging, Fcfs, Order
from hopon.core.policy.preset import Card, Policy
from hopon.core.policy.step_time import StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopon:
    """Decode first with prefill chunks, whole-prompt admission, recompute preemption of the newest.

    Args:
        watermark: share of the pool that an admission leaves free while others run.
        aging: seconds of waiting that are worth one level of priority; 0: priorities are strict, and low ones may
            starve.
        fair_share: users get equal shares while they wait; priorities then count within a user.
        step_time_target: seconds that a step with prompts should take at most; chunks are sized to that. 0: no target.
    """

    watermark: float = 0.01
    aging: float = 60.0
    fair_share: bool = False
    step_time_target: float = 0.0

    def __post_init__(self) -> None:
        if not self.aging >= 0:
            raise ValueError(f"aging must be at least 0, got {self.aging}")
        if not self.step_time_target >= 0:
            raise ValueError(f"step_time_target must be at least 0 seconds, got {self.step_time_target}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Nothing but the general defaults."""
        return {}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        order: Order = Aging(self.aging) if self.aging else Fcfs()
        policy = Policy(
            order=order,
            admission=WholePrompt(watermark=self.watermark),
            composition=DecodeFirst(),
            eviction=Newest(),
        )
        if self.step_time_target:
            timed = StepTime(policy.composition, self.step_time_target)
            policy = replace(policy, composition=timed, observers=(timed,))
        if self.fair_share:
            shares = FairShare(policy.composition)
            policy = replace(policy, order=Resorted(order), composition=shares, observers=(*policy.observers, shares))
        return policy

    card: ClassVar[Card] = Card(
        system="hopon, the default",
        aliases=("continuous batching", "iteration-level scheduling", "chunked prefill", "decode first"),
        joins="In any step, in order of priority and arrival (a minute of waiting is worth a level of priority), or in "
        "fair shares between users, while a seat is free and the whole prompt fits into "
        "KV memory beside a watermark; the first that does not fit ends the admissions of the step.",
        prefill="In chunks, in the same pass as decodes: every decode takes its token first, prompts share what is "
        "left of the step's budget.",
        memory="Blocks for the whole prompt at the start, then one more whenever the last is full. While others "
        "run, 1 % of the pool, and at least a block for each of them, stays free.",
        eviction="A decode that finds no block takes those of the newest running request, which computes again "
        "later, ahead of those that never ran.",
        short_waits="It waits for a free seat, for memory for its prompt and for those ahead of it, a few steps as "
        "a rule; only when seats or memory are all taken does it wait for somebody's last token.",
        flags={
            "watermark": "",
            "aging": "",
            "fair_share": "",
            "step_time_target": "--step-time-target",
            "max_num_seqs": "--max-num-seqs",
            "max_num_batched_tokens": "--max-num-batched-tokens",
            "block_size": "--block-size",
        },
        limits="A short prompt does not overtake a long one: their order is that of arrival. A small budget makes "
        "streams steady and prompts slow.",
        not_modelled="Nothing: it is its own original.",
        source="this project",
        date="2026",
    )
