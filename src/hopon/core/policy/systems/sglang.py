"""SGLang: prompts first, each step prompts or decodes, memory by a decaying guess, longest cached prefix first.

A newcomer starts when its prompt and its whole possible output fit beside what the running are guessed to need yet: a
ratio of what they may still generate. The ratio falls with every decode step. When the guess was too low and a decode
finds no memory, those with the fewest output tokens go back to the queue ("retract"), and the ratio rises again to
what would have been right. The waiting are sorted by how much of them lies in the prefix cache; of several that share
a prefix which is not cached yet, one goes and the others wait until it is.

Source: SGLang's ``schedule_policy`` and ``scheduler``, public code of 2025 and 2026. Longest prefix match was the
default until 2025, first come first served is since. Not modelled: the exact release-order check for requests that
ignore the end token while the prefix cache is off, depth-first order of the prefix tree, priorities, the prefill
delayer. When nothing else runs, a newcomer starts if its prompt fits; SGLang has cut its max_tokens before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Offer, Verdict
from hopon.core.policy.composition import Action, Admit, Continue, Size, Sort, Which
from hopon.core.policy.eviction import Requeue, Victim
from hopon.core.policy.order import Key
from hopon.core.policy.preset import Card, Observer, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step

_CLIP_OUTPUT = 4096  # more is not believed in a guess
_LONGEST_SORTED_QUEUE = 128
_SHORT_MATCH = 32  # tokens: who has no more in the cache is compared with others who wait
_RETRACT_STEPS = 20  # decode steps that a retraction shall make room for


class InLine:
    """Order of arrival; who is retracted stands at the back."""

    dynamic = False

    def key(self, sequence: Sequence, now: float) -> Key:
        """As long as the keys by prefix."""
        return (0, 0, sequence.rank)


class NewTokenRatio:
    """The share of what the running may still generate that they are guessed to generate.

    Args:
        initial: before the first step.
        least: after many.
        steps: decode steps from one to the other.
    """

    def __init__(self, *, initial: float, least: float, steps: int) -> None:
        self.value = initial
        self._least = least
        self._decay = (initial - least) / steps

    def decay(self) -> None:
        """A decode step found memory for everybody."""
        self.value = max(self._least, self.value - self._decay)

    def raise_for(self, running: list[Sequence]) -> None:
        """Somebody was retracted: what these have generated, and room for some steps, was the right guess."""
        allowed = sum(sequence.max_output for sequence in running)
        if allowed:
            done = sum(sequence.num_output + _RETRACT_STEPS for sequence in running)
            self.value = min(1.0, done / allowed)


class GuessedOutputs(Observer):
    """Admission by the ratio. After a refusal for want of memory nobody is tried until somebody leaves."""

    def __init__(self, ratio: NewTokenRatio) -> None:
        self._ratio = ratio
        self.full = False

    def claim(self, sequence: Sequence) -> int:
        """What it knows."""
        return sequence.num_tokens

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        """START or STOP, in order."""
        size = step.config.block_size
        total = sequence.num_tokens - offer.num_cached + _may_generate(sequence) + size
        fits = not offer.num_running or total < offer.num_free * size - self._promised(step)
        if fits and offer.num_needed <= offer.num_free:
            return Verdict.START
        self.full = True
        return Verdict.STOP

    def finished(self, sequence: Sequence) -> None:
        """Somebody left."""
        self.full = False

    def _promised(self, step: Step) -> float:
        """What the running will take: those of this step's prompts all they may, once their prompt is done."""
        promised = 0.0
        for sequence in step.running:
            _, chunk = step.chunks.get(sequence.number, (sequence, None))
            if chunk is None:
                promised += _may_generate(sequence) * self._ratio.value
            elif chunk.sample:
                promised += _may_generate(sequence)
        return promised


class FewestOutputs:
    """Who has generated least goes back to the end of the queue; of equals, who has the longest prompt."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim:
        """One victim; a half-computed prompt is none as long as there is another."""
        running = step.running
        decoding = [one for one in running if one.num_computed >= one.num_prompt] or running
        victim = min(decoding, key=lambda one: (one.num_output, -one.num_prompt, -one.rank))
        return Victim(sequence=victim, requeue=Requeue.BACK)


class PromptsFirst:
    """A step of prompts if any can be computed, of decodes otherwise.

    Args:
        admission: knows whether memory is full.
        ratio: learns from decode steps.
        chunk: tokens of prompts in one step.
        by_prefix: sort the waiting by their longest cached prefix.
        mixed: decodes run along with prompts.
    """

    def __init__(
        self, *, admission: GuessedOutputs, ratio: NewTokenRatio, chunk: int, by_prefix: bool, mixed: bool
    ) -> None:
        self._admission = admission
        self._ratio = ratio
        self._chunk = chunk
        self._by_prefix = by_prefix
        self._mixed = mixed
        self._cut: Sequence | None = None  # the one prompt that is computed in parts

    def compose(self, step: Step) -> Iterator[Action]:
        """The prompt that was cut, then newcomers; or decodes."""
        cut, self._cut = self._cut, None
        if cut is not None and (cut.row is None or cut.finished):
            cut = None
        if not step.num_running:
            self._admission.full = False
        if cut is not None or not self._admission.full:
            yield from self._prompts(step, cut)
        prompts = bool(step.chunks)
        if prompts and not self._mixed:
            return
        yield Continue(which=Which.DECODE, accepts=lambda sequence: sequence is not cut)
        if step.evicted:
            self._admission.full = False
            self._ratio.raise_for(step.running)
        elif step.chunks and not prompts:
            self._ratio.decay()

    def _prompts(self, step: Step, cut: Sequence | None) -> Iterator[Action]:
        room = self._chunk
        if self._mixed:
            room -= sum(one.num_remaining == 1 for one in step.running if one is not cut)
        least = step.budget - room
        if cut is not None:
            yield Continue(max_tokens=step.budget - least, accepts=lambda one: one is cut, size=_pages(step))
            if not _is_done(step, cut):
                self._cut = cut
                return
        if self._by_prefix and step.num_waiting:
            yield Sort(_by_longest_prefix(step))
        count = -1
        while count < len(step.admitted) and step.budget > least:
            count = len(step.admitted)
            yield Admit(max_seqs=1, max_tokens=step.budget - least, size=_pages(step))
            if len(step.admitted) > count and not _is_done(step, step.admitted[-1]):
                self._cut = step.admitted[-1]
                return


def _may_generate(sequence: Sequence) -> int:
    return min(_CLIP_OUTPUT, sequence.max_output - (sequence.num_tokens - sequence.num_prompt))


def _is_done(step: Step, sequence: Sequence) -> bool:
    """Whether its prompt ends in this step."""
    entry = step.chunks.get(sequence.number)
    return entry is not None and entry[1].sample


def _pages(step: Step) -> Size:
    """A prompt is cut between pages."""
    page = step.config.block_size
    return lambda sequence, remaining, room: remaining if remaining <= room else room // page * page


def _by_longest_prefix(step: Step) -> Callable[[Sequence], Key]:
    """Longest cached prefix first; last, those that share an uncached one with somebody before them."""
    if step.num_waiting > _LONGEST_SORTED_QUEUE:
        return lambda sequence: (0, 0, sequence.rank)
    page = step.config.block_size
    length = -(-_SHORT_MATCH // page) * page
    keys: dict[int, Key] = {}
    beginnings: set[tuple[bytes, tuple[int, ...]]] = set()
    for sequence in step.waiting:
        cached = step.cached_tokens(sequence)
        beginning = (sequence.salt, tuple(sequence.tokens[:length]))
        late = cached <= _SHORT_MATCH and beginning in beginnings
        if cached <= _SHORT_MATCH and len(sequence.tokens) >= length:
            beginnings.add(beginning)
        keys[sequence.number] = (late, 0 if late else -cached, sequence.rank)
    return lambda sequence: keys[sequence.number]


@dataclass(frozen=True, kw_only=True, slots=True)
class SgLang:
    """Prompts first under a decaying guess of outputs.

    Args:
        schedule_policy: "lpm", longest prefix match, or "fcfs" (``--schedule-policy``).
        schedule_conservativeness: factor of the initial ratio (``--schedule-conservativeness``).
        init_new_token_ratio: ratio at the beginning, before that factor (``SGLANG_INIT_NEW_TOKEN_RATIO``).
        min_new_token_ratio_factor: least ratio as a share of the initial one.
        new_token_ratio_decay_steps: decode steps from one to the other.
        chunked_prefill_size: tokens of prompts in one step (``--chunked-prefill-size``); without chunked prefill only
            the budget limits them.
        max_prefill_tokens: budget of one step (``--max-prefill-tokens``).
        page_size: tokens per block (``--page-size``).
        enable_mixed_chunk: decodes run along with prompts (``--enable-mixed-chunk``).

    Raises:
        ValueError: a knob out of range.
    """

    schedule_policy: Literal["lpm", "fcfs"] = "lpm"
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    page_size: int = 1
    enable_mixed_chunk: bool = False

    def __post_init__(self) -> None:
        if self.schedule_policy not in ("lpm", "fcfs"):
            raise ValueError(f"schedule_policy must be 'lpm' or 'fcfs', got {self.schedule_policy!r}")
        for name in ("schedule_conservativeness", "init_new_token_ratio"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.min_new_token_ratio_factor <= 1:
            raise ValueError(f"min_new_token_ratio_factor must be in [0, 1], got {self.min_new_token_ratio_factor}")
        for name in ("new_token_ratio_decay_steps", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """Memory by the page; the number of seats follows from memory there and is left open here."""
        return {
            "block_size": self.page_size,
            "max_num_batched_tokens": self.max_prefill_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module. Raises ValueError where prompts could never be computed."""
        chunk = config.max_num_batched_tokens
        if config.enable_chunked_prefill:
            chunk = min(chunk, self.chunked_prefill_size)
        if chunk < config.block_size:
            raise ValueError(
                f"prompts are cut between blocks of {config.block_size} tokens, but only {chunk} are computed in a "
                f"step: chunked_prefill_size {self.chunked_prefill_size}, max_num_batched_tokens "
                f"{config.max_num_batched_tokens}"
            )
        initial = min(1.0, self.init_new_token_ratio * self.schedule_conservativeness)
        ratio = NewTokenRatio(
            initial=initial, least=initial * self.min_new_token_ratio_factor, steps=self.new_token_ratio_decay_steps
        )
        admission = GuessedOutputs(ratio)
        return Policy(
            order=InLine(),
            admission=admission,
            composition=PromptsFirst(
                admission=admission,
                ratio=ratio,
                chunk=chunk,
                by_prefix=self.schedule_policy == "lpm" and config.enable_prefix_caching,
                mixed=self.enable_mixed_chunk,
            ),
            eviction=FewestOutputs(),
            observers=(admission,),
        )

    card: ClassVar[Card] = Card(
        system="SGLang",
        aliases=("continuous batching", "RadixAttention", "cache-aware scheduling", "longest prefix match"),
        joins="Before any decode, longest cached prefix first, if prompt and possible output fit beside what the "
        "running are guessed to need: a ratio, falling with every decode step, of what they may still generate. "
        "After a refusal nobody is tried until somebody leaves.",
        prefill="In passes of prompts only, cut to chunked_prefill_size; with enable_mixed_chunk decodes run along.",
        memory="Pages as tokens come; the rest is a guess.",
        eviction="When a decode finds no memory, those with the fewest output tokens are retracted to the back of "
        "the queue, and the ratio rises.",
        short_waits="It waits for those who share more of their prompt with the cache, for somebody to leave once "
        "memory was found short, or because somebody with the same prefix is just computing it; its stream stops "
        "while others' prompts run.",
        flags={
            "schedule_policy": "--schedule-policy",
            "schedule_conservativeness": "--schedule-conservativeness",
            "init_new_token_ratio": "SGLANG_INIT_NEW_TOKEN_RATIO",
            "min_new_token_ratio_factor": "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
            "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
            "chunked_prefill_size": "--chunked-prefill-size",
            "max_prefill_tokens": "--max-prefill-tokens",
            "page_size": "--page-size",
            "enable_mixed_chunk": "--enable-mixed-chunk",
            "max_num_seqs": "--max-running-requests",
            "num_blocks": "--mem-fraction-static",
        },
        limits="Longest prefix match can keep a request with a new prompt waiting behind those with known ones. "
        "First come first served is the default in newer versions.",
        not_modelled="Depth-first order of the prefix tree, the exact check without prefix cache, priorities, the "
        "prefill delayer.",
        source="SGLang's schedule_policy and scheduler, public code; Zheng et al., SGLang, 2024",
        date="2025-2026",
    )
