"""hopon's own policy, the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import DecodeFirst
from hopon.core.policy.eviction import Newest
from hopon.core.policy.order import Fcfs
from hopon.core.policy.preset import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopon:
    """Decode first with prefill chunks, whole-prompt admission, recompute preemption of the newest.

    Args:
        watermark: share of the pool that an admission leaves free while others run.
    """

    watermark: float = 0.01

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Nothing but the general defaults."""
        return {}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        return Policy(
            order=Fcfs(),
            admission=WholePrompt(watermark=self.watermark),
            composition=DecodeFirst(),
            eviction=Newest(),
        )
