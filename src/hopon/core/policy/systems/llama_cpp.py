"""llama.cpp's server: slots, each with a memory of its own last prompt.

A request goes to the idle slot whose last tokens begin most like it, if they are alike enough, otherwise to the idle
slot that has rested longest; without an idle slot it waits. A slot reuses the common beginning and nothing else: no
slot sees another's prefix, and none remembers more than its last request. A step takes one token per generating slot,
then fills up with prompt tokens, slot by slot. Nobody is preempted: a request that finds no room ends with an error.

Source: llama.cpp's ``tools/server``, public code and README of 2025. Not modelled: a slot asked for by number,
``--cache-reuse`` of pieces in the middle, shifting of contexts, micro-batches. The slots share one pool of memory
(``--kv-unified``); what idle slots remember is given away token by token, not slot by slot. The halving of a batch that
finds no room ends in an error of the request whose tokens do not fit, which is what is done here at once; the newest
server fails the others of that batch, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Offer, Verdict
from hopon.core.policy.composition import Action, Admit, Continue, Refuse, Scope, Which
from hopon.core.policy.eviction import Failure, Victim
from hopon.core.policy.order import Key
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step
from hopon.core.types import FinishReason


@dataclass(slots=True)
class Slot:
    """One place to work in."""

    number: int
    occupant: Sequence | None = None
    last: Sequence | None = None  # whose tokens lie in it
    common: int = 0  # of those, how many the occupant begins with
    last_used: int = -1

    def holds(self, sequence: Sequence) -> bool:
        """Whether that is the occupant."""
        return sequence is self.occupant

    def scope(self, sequence: Sequence) -> Scope:
        """What the occupant may find."""
        return Scope(f"slot {self.number}", self.common)


class Slots:
    """Who sits where; as an order, the slots' numbers, and first come, first served among those without one.

    Args:
        count: of slots.
        similarity: share of a prompt that a slot must remember to be preferred.
        reuse: slots remember anything at all.
    """

    dynamic = False

    def __init__(self, *, count: int, similarity: float, reuse: bool) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._similarity = similarity
        self._reuse = reuse
        self._numbers: dict[int, int] = {}  # sequence -> slot
        self._clock = 0

    def key(self, sequence: Sequence, now: float) -> Key:
        """(slot, order of arrival)."""
        return (self._numbers.get(sequence.number, len(self.slots)), sequence.rank)

    def update(self, step: Step) -> None:
        """Slots of finished requests become idle, and the waiting take idle ones."""
        self._clock += 1
        for slot in self.slots:
            one = slot.occupant
            if one is not None and one.finished:
                del self._numbers[one.number]
                slot.occupant = None
                slot.last_used = self._clock
                if one.num_computed:
                    slot.last = one
        idle = [slot for slot in self.slots if slot.occupant is None]
        for sequence in step.waiting:
            if not idle:
                return
            if sequence.number not in self._numbers:
                slot = self._choose(idle, sequence)
                slot.occupant = sequence
                self._numbers[sequence.number] = slot.number
                idle.remove(slot)

    def _choose(self, idle: list[Slot], sequence: Sequence) -> Slot:
        for slot in idle:
            slot.common = _common(sequence, slot.last) if self._reuse and slot.last else 0
        best = max(idle, key=lambda slot: slot.common)
        if best.common and best.common >= self._similarity * sequence.num_tokens:
            return best
        return min(idle, key=lambda slot: slot.last_used)


class SlotBySlot:
    """A token per generating slot, then prompts slot by slot.

    Args:
        slots: who sits where.
        admission: knows who found no room.
        cont_batching: prompts run along with generation; otherwise only when nobody generates.
    """

    def __init__(self, *, slots: Slots, admission: FirstChunk, cont_batching: bool) -> None:
        self._slots = slots
        self._admission = admission
        self._cont_batching = cont_batching

    def compose(self, step: Step) -> Iterator[Action]:
        """One batch."""
        self._slots.update(step)
        yield Continue(which=Which.DECODE)
        if step.chunks and not self._cont_batching:
            return
        for slot in self._slots.slots:
            one = slot.occupant
            if one is None or one.finished:
                continue
            if step.budget <= 0:
                return
            if one.row is not None:
                yield Continue(which=Which.PREFILL, accepts=slot.holds)
                continue
            self._admission.refused = None
            yield Admit(max_seqs=1, accepts=slot.holds, scope=slot.scope)
            if self._admission.refused is one:
                yield Refuse(one, _no_room(step, self._admission.missing), FinishReason.ERROR)


class FirstChunk:
    """Memory is taken as prompts are filled in; who does not find enough for its first tokens is remembered."""

    def __init__(self) -> None:
        self.refused: Sequence | None = None
        self.missing = 0  # blocks that it lacked

    def claim(self, sequence: Sequence) -> int:
        """Nothing beforehand."""
        return 0

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP."""
        self.missing = max(0, offer.num_needed - offer.num_free)
        self.refused = sequence if self.missing else None
        return Verdict.STOP if self.missing else Verdict.START


class NoRoom:
    """Who finds no room ends with an error; alone, with what it has."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Failure | Victim:
        """A failure with the numbers."""
        return Victim(sequence=sequence) if step.num_running == 1 else Failure(_no_room(step, missing))


def _common(sequence: Sequence, last: Sequence) -> int:
    """Leading tokens of a new sequence that a finished one has left in its slot."""
    pairs = zip(sequence.tokens, last.tokens[: last.num_computed], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _no_room(step: Step, missing: int) -> str:
    return (
        f"no room in the context: {missing} KV blocks of {step.config.block_size} tokens are missing, "
        f"{step.num_free} of {step.num_blocks} are free"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaCpp:
    """Slots with private prefixes.

    Args:
        parallel: slots (``--parallel``).
        batch_size: tokens of one batch (``--batch-size``).
        cont_batching: prompts run along with generation (``--cont-batching``).
        cache_prompt: slots remember their last request (``--cache-prompt``).
        slot_prompt_similarity: share of a prompt that a slot must remember to be preferred
            (``--slot-prompt-similarity``; 0.1 in newer servers).

    Raises:
        ValueError: a knob out of range.
    """

    parallel: int = 4
    batch_size: int = 2048
    cont_batching: bool = True
    cache_prompt: bool = True
    slot_prompt_similarity: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.slot_prompt_similarity <= 1:
            raise ValueError(f"slot_prompt_similarity must be in [0, 1], got {self.slot_prompt_similarity}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Memory by the token."""
        return {
            "block_size": 1,
            "max_num_seqs": self.parallel,
            "max_num_batched_tokens": self.batch_size,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.cache_prompt,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module. The slots are the config's seats."""
        slots = Slots(
            count=config.max_num_seqs, similarity=self.slot_prompt_similarity, reuse=config.enable_prefix_caching
        )
        admission = FirstChunk()
        return Policy(
            order=slots,
            admission=admission,
            composition=SlotBySlot(slots=slots, admission=admission, cont_batching=self.cont_batching),
            eviction=NoRoom(),
        )

    card: ClassVar[Card] = Card(
        system="llama.cpp server",
        aliases=("slots", "continuous batching", "parallel decoding"),
        joins="When a slot is idle: the one whose last request began most like it, else the one that has rested "
        "longest.",
        prefill="Slot by slot into what decodes leave of the batch; without --cont-batching only when nobody "
        "generates.",
        memory="Tokens as they come, from one pool.",
        eviction="None: a request that finds no room ends with an error.",
        short_waits="It waits for one of few slots, each taken until its answer has ended; and then for prompts in "
        "slots of lower numbers, which fill the batch first.",
        flags={
            "parallel": "--parallel",
            "batch_size": "--batch-size",
            "cont_batching": "--cont-batching",
            "cache_prompt": "--cache-prompt",
            "slot_prompt_similarity": "--slot-prompt-similarity",
        },
        limits="A prefix is found only in a slot that computed it last. A full context is an error, not a pause.",
        not_modelled="Slots asked for by number, --cache-reuse, context shift, micro-batches.",
        source="llama.cpp's tools/server, public code and README",
        date="2025",
    )
