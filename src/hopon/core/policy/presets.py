"""Named policies: a preset is a small class that turns knobs into parts.

The fields of a preset are its knobs, with the published defaults. Anybody can write one: a frozen dataclass with a
``policy`` method, named as ``module:Class`` where a preset's name is expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, WholePrompt
from hopon.core.policy.composition import Composition, DecodeFirst
from hopon.core.policy.eviction import Eviction, Newest
from hopon.core.policy.order import Fcfs, Order
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class Observer:
    """Hears what happens; for parts that learn (estimates, ratios). The methods do nothing here."""

    def stepped(self, step: Step) -> None:
        """A step was planned."""

    def finished(self, sequence: Sequence) -> None:
        """A request ended, for whatever reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One choice of each part.

    ``delivery`` "batch" holds all news back until nothing runs any more, as a request-level system answers.
    """

    order: Order
    admission: Admission
    composition: Composition
    eviction: Eviction
    observers: tuple[Observer, ...] = ()
    delivery: Literal["stream", "batch"] = "stream"


class Preset(Protocol):
    """Turns knobs into a policy."""

    def policy(self, config: SchedulerConfig) -> Policy:
        """Fresh parts for one scheduler; they may keep state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopon:
    """The default: decode first with prefill chunks, whole-prompt admission, recompute preemption of the newest."""

    watermark: float = 0.01

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class."""
        return Policy(
            order=Fcfs(),
            admission=WholePrompt(watermark=self.watermark),
            composition=DecodeFirst(),
            eviction=Newest(),
        )
