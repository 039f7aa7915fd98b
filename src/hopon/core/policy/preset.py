"""A policy is one choice of each part; a preset is a small class that turns knobs into a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from hopon.core.config import SchedulerConfig
from hopon.core.plan import StepPlan
from hopon.core.policy.admission import Admission
from hopon.core.policy.composition import Composition
from hopon.core.policy.eviction import Eviction
from hopon.core.policy.order import Order
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class Observer:
    """Hears what happens; for parts that learn (estimates, ratios). The methods do nothing here."""

    def stepped(self, step: Step) -> None:
        """A step was planned."""

    def committed(self, plan: StepPlan, seconds: float) -> None:
        """A step's result came, so long after it was planned (with steps before it in flight, theirs counts too)."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a reader wants to know of a system, in sentences. A preset may have one as its attribute ``card``.

    Args:
        system: whose policy it is.
        aliases: what its makers and others call this way of batching.
        joins: when a newcomer is admitted.
        prefill: how prompts are computed.
        memory: how much KV memory a request takes, and when.
        eviction: what happens when memory is short.
        short_waits: why a short request waits here.
        flags: knobs and settings -> their names in the original; empty for those that it does not have.
        limits: where it falls short.
        not_modelled: what the original does and the preset does not.
        source: where this was read.
        date: of the source.
    """

    system: str
    aliases: tuple[str, ...]
    joins: str
    prefill: str
    memory: str
    eviction: str
    short_waits: str
    flags: Mapping[str, str]
    limits: str
    not_modelled: str
    source: str
    date: str


class Preset(Protocol):
    """Turns knobs into a policy. A preset is a frozen dataclass: its fields are the knobs, with published defaults."""

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Fields of SchedulerConfig that the system publishes a value for; what a user sets explicitly wins."""

    def policy(self, config: SchedulerConfig) -> Policy:
        """Fresh parts for one scheduler; they may keep state. Raises ValueError for a config it cannot work with."""
