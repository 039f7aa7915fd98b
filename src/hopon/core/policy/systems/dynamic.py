"""Triton's dynamic batcher: request-level batching with preferred sizes, a queueing delay, priorities and timeouts.

When the model is free, requests are taken in order into a pending batch. The largest preferred size reached goes at
once. Otherwise everything goes when the batch cannot grow, when its oldest member has waited as long as it may, or when
no delay is set; else the batcher sleeps until that moment or the nearest timeout. The batch then has the model for
itself until all of its requests are finished. Source: Triton's ``batcher.md`` and ``ModelDynamicBatching`` in
``model_config.proto``; normalisation of the settings as in its server (2024).

Not modelled: several model instances, ``preserve_ordering`` (one instance answers in order), timeouts that a request
brings itself (``allow_timeout_override``), and requests of different shapes. What Triton checks when a request arrives
(a full queue) is checked when the next step is planned. Memory has no place in Triton's rule: here a request whose
reservation does not fit keeps a batch from growing, as a different shape does there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, ReserveMaxTokens
from hopon.core.policy.composition import Action, Refuse, RequestLevel, WaitUntil
from hopon.core.policy.eviction import Never
from hopon.core.policy.order import Key
from hopon.core.policy.preset import Card, Policy
from hopon.core.policy.systems.static import Delivery, check_delivery, group_limit
from hopon.core.sequence import Sequence
from hopon.core.step import Step

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Batches of preferred sizes, or of whatever is there when the delay is over.

    Knobs that say "per level" take one value for all levels or one for each, the first level first.

    Args:
        max_batch_size: most requests of a batch; 0 for ``max_num_seqs``.
        preferred_batch_size: sizes that go at once; without any, ``max_batch_size`` alone.
        max_queue_delay_microseconds: how long the oldest request may wait for others. 0 sends what is there.
        priority_levels: number of levels, 1 the most urgent; a request's priority is its level. 0: no priorities.
        default_priority_level: level of requests whose priority is no level; must be given with ``priority_levels``.
        timeout_action: per level, separated by commas: what happens to a request after its timeout. "reject" ends it;
            "delay" puts it behind all others of its level.
        default_timeout_microseconds: per level; 0 for no timeout.
        max_queue_size: per level: most requests that wait; those beyond are refused. 0: no limit.
        delivery: "batch" answers when the whole batch is finished, "stream" sends tokens as they come.
    """

    max_batch_size: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0
    timeout_action: str = "reject"
    default_timeout_microseconds: tuple[int, ...] = (0,)
    max_queue_size: tuple[int, ...] = (0,)
    delivery: Delivery = "batch"

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_queue_delay_microseconds", "priority_levels"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.priority_levels and not 1 <= self.default_priority_level <= self.priority_levels:
            raise ValueError(
                f"default_priority_level must be in [1, priority_levels {self.priority_levels}], "
                f"got {self.default_priority_level}"
            )
        check_delivery(self.delivery)
        self.levels()

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """No prefix cache."""
        return {"enable_prefix_caching": False}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for batches larger than ``max_num_seqs``."""
        size = group_limit("max_batch_size", self.max_batch_size, config)
        preferred = self.preferred_batch_size or (size,)
        for one in preferred:
            if not 1 <= one <= size:
                raise ValueError(f"preferred_batch_size must be in [1, max_batch_size {size}], got {one}")
        admission = ReserveMaxTokens()
        order = LevelOrder(self.levels(), self.default_priority_level or 1)
        delay = self.max_queue_delay_microseconds / 1e6
        return Policy(
            order=order,
            admission=admission,
            composition=DynamicBatcher(order, admission, size, preferred, delay),
            eviction=Never(),
            delivery=self.delivery,
        )

    def levels(self) -> tuple[Level, ...]:
        """The queue of every level. Raises ValueError for values that are none or too many."""
        actions = tuple(self.timeout_action.split(","))
        for action in actions:
            if action not in ("reject", "delay"):
                raise ValueError(f"timeout_action must be 'reject' or 'delay', got {action!r}")
        timeouts, sizes = self.default_timeout_microseconds, self.max_queue_size
        for name, values in (("default_timeout_microseconds", timeouts), ("max_queue_size", sizes)):
            if any(value < 0 for value in values):
                raise ValueError(f"{name} must be at least 0, got {','.join(map(str, values))}")
        count = max(1, self.priority_levels)
        return tuple(
            Level(rejects=action == "reject", timeout=timeout / 1e6, max_size=size)
            for action, timeout, size in zip(
                _per_level("timeout_action", actions, count),
                _per_level("default_timeout_microseconds", timeouts, count),
                _per_level("max_queue_size", sizes, count),
                strict=True,
            )
        )

    card: ClassVar[Card] = Card(
        system="Triton Inference Server, dynamic batcher",
        aliases=("dynamic batching", "request-level batching with a queueing delay"),
        joins="When the model is free: the largest preferred size reached goes at once, else everything goes when "
        "the batch cannot grow, when its oldest has waited the queueing delay, or at once where no delay is set.",
        prefill="All prompts of the batch first, together; nobody decodes before they are done.",
        memory="Prompt and max_tokens of every member are reserved when the batch starts.",
        eviction="Never; but a request can be refused when its timeout is over or its level's queue is full.",
        short_waits="It waits for the running batch to end, the longest answer in it included, then up to the "
        "queueing delay for others to make the batch worthwhile, and, with priority levels, for all of a more "
        "urgent level.",
        flags={
            "max_batch_size": "max_batch_size",
            "preferred_batch_size": "dynamic_batching.preferred_batch_size",
            "max_queue_delay_microseconds": "dynamic_batching.max_queue_delay_microseconds",
            "priority_levels": "dynamic_batching.priority_levels",
            "default_priority_level": "dynamic_batching.default_priority_level",
            "timeout_action": "queue_policy.timeout_action",
            "default_timeout_microseconds": "queue_policy.default_timeout_microseconds",
            "max_queue_size": "queue_policy.max_queue_size",
            "delivery": "",
        },
        limits="Made for models whose call is one pass; for generation a call is a whole answer. Several articles "
        "call continuous batching dynamic, too: ask when a request can join, not what it is called.",
        not_modelled="Several model instances, preserve_ordering, timeouts that a request brings itself, requests "
        "of different shapes.",
        source="Triton's batcher.md and ModelDynamicBatching in model_config.proto",
        date="2024",
    )


def _per_level(name: str, values: tuple[T, ...], count: int) -> tuple[T, ...]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(f"{name} must have one value or one for each of the {count} levels, got {len(values)}")
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Triton's queue policy of a priority level; the timeout is in seconds, 0 means none."""

    rejects: bool
    timeout: float
    max_size: int


class LevelOrder:
    """By level; within one, those past a delaying timeout behind the others; then by arrival."""

    def __init__(self, levels: tuple[Level, ...], default: int) -> None:
        self.levels = levels
        self.dynamic = any(level.timeout and not level.rejects for level in levels)
        self._default = default

    def key(self, sequence: Sequence, now: float) -> Key:
        """(level, delayed, order of arrival)."""
        level = self.number(sequence)
        delayed = not self.levels[level - 1].rejects and self.expired(sequence, now)
        return (level, delayed, sequence.rank)

    def number(self, sequence: Sequence) -> int:
        """Its level, counted from 1."""
        priority = sequence.request.priority
        return priority if 1 <= priority <= len(self.levels) else self._default

    def deadline(self, sequence: Sequence) -> float | None:
        """When its timeout is over, in seconds; None for no timeout."""
        timeout = self.levels[self.number(sequence) - 1].timeout
        return sequence.request.arrival + timeout if timeout else None

    def expired(self, sequence: Sequence, now: float) -> bool:
        """Whether its timeout is over."""
        deadline = self.deadline(sequence)
        return deadline is not None and now >= deadline


class DynamicBatcher(RequestLevel):
    """Fills a pending batch and decides when it goes."""

    def __init__(
        self, order: LevelOrder, admission: Admission, size: int, preferred: tuple[int, ...], delay: float
    ) -> None:
        super().__init__()
        self._order = order
        self._admission = admission
        self._size = size
        self._preferred = preferred
        self._delay = delay

    def compose(self, step: Step) -> Iterator[Action]:
        """Keep the queues within their sizes, then as any request-level system."""
        if any(level.max_size for level in self._order.levels):
            yield from self._refuse_excess(step)
        yield from super().compose(step)

    def choose(self, step: Step) -> Generator[Action, None, list[Sequence]]:
        """Triton's rule; see the module."""
        batch: list[Sequence] = []
        rejected: list[Sequence] = []
        best = 0  # largest preferred size reached
        full = False
        free = step.num_blocks
        for sequence in step.waiting:
            if self._order.levels[self._order.number(sequence) - 1].rejects and self._order.expired(sequence, step.now):
                rejected.append(sequence)
                continue
            free -= -(-self._admission.claim(sequence) // step.config.block_size)
            full = free < 0 or len(batch) == self._size
            if full:
                break
            batch.append(sequence)
            if len(batch) in self._preferred:
                best = len(batch)
        for sequence in rejected:
            waited = step.now - sequence.request.arrival
            yield Refuse(sequence, f"it has waited {waited:g} s, longer than the timeout of its priority level")
        if not batch:
            return []
        oldest = min(sequence.request.arrival for sequence in batch)
        late = self._delay > 0 and step.now >= oldest + self._delay
        if best and not late:
            return batch[:best]
        if full or late or not self._delay or len(batch) >= max(self._preferred):
            return batch
        deadlines = (self._order.deadline(s) for s in batch if not self._order.expired(s, step.now))
        yield WaitUntil(min([oldest + self._delay, *(moment for moment in deadlines if moment is not None)]))
        return []

    def _refuse_excess(self, step: Step) -> Iterator[Action]:
        starting = {sequence.number for sequence in self.starting()}
        queues: list[list[Sequence]] = [[] for _ in self._order.levels]
        for sequence in step.waiting:
            if sequence.number not in starting:
                queues[self._order.number(sequence) - 1].append(sequence)
        for level, queue in zip(self._order.levels, queues, strict=True):
            if level.max_size:
                for sequence in sorted(queue, key=lambda one: one.rank)[level.max_size :]:
                    yield Refuse(
                        sequence, f"{level.max_size} requests of its priority level wait already (max_queue_size)"
                    )
