"""LMDeploy's PyTorch engine: turns of prompts and turns of decodes.

A turn of prompts comes when there are few running sequences, many waiting tokens, or after some decode turns. Prompts
start in order of arrival, whole; only the first of a turn may be cut, when it is longer than a whole turn, and then the
turn ends with it. In a decode turn whoever needs memory takes it from those that wait and still hold some, the newest
first, then from the last of the running, which computes again later. The last itself waits and keeps what it has.

Source: LMDeploy's ``paging/scheduler`` and ``engine/inputs_maker``, public code of 2025. Not modelled: sessions that
hang (a finished request's memory is just the prefix cache here), the order of prompts by size with turns of short ones,
preallocation of several decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import WholePrompt
from hopon.core.policy.composition import Action, Admit, Continue, Which
from hopon.core.policy.eviction import Freed, Victim, keepers
from hopon.core.policy.order import Age
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


class NewestWaitingThenLast:
    """Memory of those that wait first, then that of the last running one. The last keeps its own and waits with it."""

    def relieve(self, step: Step, sequence: Sequence, missing: int) -> Victim:
        """The newest that has any."""
        kept = keepers(step)
        if kept:
            return Victim(sequence=kept[-1])
        last = step.running[-1]
        return Victim(sequence=last, freed=Freed.TAIL if last is sequence else Freed.ALL)


class Turns:
    """Prompts or decodes.

    Args:
        prefill_interval: decode turns after which waiting prompts get theirs.
    """

    def __init__(self, prefill_interval: int) -> None:
        self._prefill_interval = prefill_interval
        self._num_decodes = 0
        self._cut: Sequence | None = None  # the prompt that is computed over several turns

    def compose(self, step: Step) -> Iterator[Action]:
        """One turn; the other kind where the chosen one has nothing to compute."""
        if self._cut is not None and (self._cut.row is None or self._cut.finished):
            self._cut = None
        if self._is_prefill(step):
            yield from self._prefill(step)
        if not step.chunks:
            yield Continue(which=Which.DECODE, accepts=lambda sequence: sequence is not self._cut)
            self._num_decodes += 1
            if not step.chunks:
                yield from self._prefill(step)

    def _is_prefill(self, step: Step) -> bool:
        if self._cut is None and not step.num_waiting:
            return False
        config = step.config
        if self._num_decodes >= self._prefill_interval or 2 * step.num_running < config.max_num_seqs:
            return True
        tokens = self._cut.num_remaining if self._cut else 0
        for sequence in step.waiting:
            if tokens >= config.max_num_batched_tokens:
                break
            tokens += sequence.num_remaining
        return tokens >= config.max_num_batched_tokens

    def _prefill(self, step: Step) -> Iterator[Action]:
        self._num_decodes = 0
        if self._cut is not None:
            yield Continue(accepts=lambda sequence: sequence is self._cut)
        if not step.chunks:
            yield Admit(max_seqs=1)
        if not self._is_cut(step):
            yield Admit(whole=True)

    def _is_cut(self, step: Step) -> bool:
        """Whether the turn ends with a prompt that does not; that one goes on in the next."""
        unfinished = [sequence for sequence, chunk in step.chunks.values() if not chunk.sample]
        self._cut = unfinished[0] if unfinished else None
        return bool(unfinished)


@dataclass(frozen=True, kw_only=True, slots=True)
class LmDeploy:
    """Turns of prompts and of decodes.

    Args:
        max_batch_size: most running sequences (``max_batch_size``).
        max_prefill_token_num: tokens of a turn of prompts (``max_prefill_token_num``).
        prefill_interval: decode turns after which waiting prompts get theirs (``prefill_interval``).
        block_size: tokens per block (``block_size``).
        prefix_caching: reuse blocks of equal prefixes (``enable_prefix_caching``).

    Raises:
        ValueError: a knob out of range.
    """

    max_batch_size: int = 128
    max_prefill_token_num: int = 8192
    prefill_interval: int = 16
    block_size: int = 64
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.prefill_interval < 1:
            raise ValueError(f"prefill_interval must be at least 1, got {self.prefill_interval}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """See the class."""
        return {
            "block_size": self.block_size,
            "max_num_seqs": self.max_batch_size,
            "max_num_batched_tokens": self.max_prefill_token_num,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.prefix_caching,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the module."""
        return Policy(
            order=Age(),
            admission=WholePrompt(watermark=0.0, spare_per_running=0),
            composition=Turns(self.prefill_interval),
            eviction=NewestWaitingThenLast(),
        )

    card: ClassVar[Card] = Card(
        system="LMDeploy, PyTorch engine",
        aliases=("persistent batching", "continuous batching"),
        joins="In a turn of prompts: when fewer than half of the seats are taken, when a whole turn's worth of "
        "prompt tokens waits, or after prefill_interval turns of decodes; in order, if the whole prompt fits.",
        prefill="In turns of prompts only; whole, but the first of a turn may be cut and then ends it.",
        memory="Blocks for the prompt at the start, more as they are needed.",
        eviction="Memory of those that wait and still hold some, newest first, then of the last running, which "
        "recomputes.",
        short_waits="It waits for the next turn of prompts, up to prefill_interval decode turns when the batch is "
        "more than half full; a long prompt that is cut has a turn to itself.",
        flags={
            "max_batch_size": "max_batch_size",
            "max_prefill_token_num": "max_prefill_token_num",
            "prefill_interval": "prefill_interval",
            "block_size": "block_size",
            "prefix_caching": "enable_prefix_caching",
        },
        limits="In a turn of prompts nobody decodes: streams stop. Sizes of prompts do not change their order.",
        not_modelled="Sessions that hang, the order of prompts by size, preallocation of several decode steps.",
        source="LMDeploy's paging/scheduler and engine/inputs_maker, public code",
        date="2025",
    )
