"""Named policies: a table from a name to its parts."""

from __future__ import annotations

from dataclasses import dataclass

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, WholePrompt
from hopon.core.policy.composition import DECODE_FIRST, Phase
from hopon.core.policy.eviction import Eviction, Newest
from hopon.core.policy.order import Fcfs, Order


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One choice of each part."""

    order: Order
    admission: Admission
    composition: tuple[Phase, ...]
    eviction: Eviction


def default_policy(config: SchedulerConfig) -> Policy:
    """Decode first with prefill chunks, whole-prompt admission, recompute preemption of the newest."""
    return Policy(
        order=Fcfs(),
        admission=WholePrompt(watermark=config.watermark),
        composition=DECODE_FIRST,
        eviction=Newest(),
    )
