"""Orca (Yu et al., OSDI'22): iteration-level scheduling with reservations.

After every iteration the requests are walked in order of arrival. Those that run get their next token; one that has
not run yet reserves memory for its prompt and ``max_tokens`` and computes its whole prompt in the same pass, and the
first whose reservation does not fit ends the walk. Nobody is ever preempted. Source: the paper's Algorithm 1 and
section 4.2. The ports in Sarathi-Serve (``orca_block_space_manager.py``, OSDI'24) and Vidur
(``orca_replica_scheduler.py``, MLSys'24) reserve the model's maximum length for every request instead, which is
``reserve=max_model_len`` here.

Not modelled: several batches in flight over pipeline stages (``n_workers``, 1 here). A reservation is rounded up to
whole blocks where Orca counts single slots. The paper has no limit on the tokens of a pass; here whole prompts share
``max_num_batched_tokens``, a prompt that does not fit beside the others ends the walk, too, and one that never can is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import ReserveMaxTokens
from hopon.core.policy.composition import Action, Admit, Continue, Refuse
from hopon.core.policy.eviction import Never
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Orca:
    """Whole prompts join the running at every iteration, with their memory reserved to the end.

    Args:
        max_bs: most requests of an iteration (the paper's ``max_bs``; 128 in Sarathi-Serve and Vidur).
        reserve: "max_tokens" as in the paper, or "max_model_len" as in the two ports.
    """

    max_bs: int = 128
    reserve: Literal["max_tokens", "max_model_len"] = "max_tokens"

    def __post_init__(self) -> None:
        if self.max_bs < 1:
            raise ValueError(f"max_bs must be at least 1, got {self.max_bs}")
        if self.reserve not in ("max_tokens", "max_model_len"):
            raise ValueError(f"reserve must be 'max_tokens' or 'max_model_len', got {self.reserve!r}")

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """As many seats as ``max_bs``, and room for the longest prompt beside one token of everybody."""
        return {
            "max_num_seqs": self.max_bs,
            "max_num_batched_tokens": max_model_len + self.max_bs,
            "enable_prefix_caching": False,
        }

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a pool that cannot hold the model's maximum where that is reserved."""
        admission = ReserveMaxTokens()
        if self.reserve == "max_model_len":
            if config.capacity_tokens < config.max_model_len:
                raise ValueError(
                    f"reserve=max_model_len needs a KV pool of {config.max_model_len} tokens for a single request, but "
                    f"num_blocks {config.num_blocks} of {config.block_size} hold {config.capacity_tokens}"
                )
            admission = ReserveModelLength(max_model_len=config.max_model_len)
        return Policy(order=Arrival(), admission=admission, composition=Iteration(self.max_bs), eviction=Never())

    card: ClassVar[Card] = Card(
        system="Orca",
        aliases=("iteration-level scheduling", "iteration batching", "selective batching"),
        joins="After every iteration, in order of arrival, while fewer than max_bs run and prompt + max_tokens can "
        "be reserved; the first that cannot ends the walk.",
        prefill="The whole prompt in one pass, together with the others' decodes.",
        memory="Prompt + max_tokens (or the model's longest context, as two ports have it) are reserved at the "
        "start and kept to the end.",
        eviction="Never: what is reserved suffices.",
        short_waits="It waits until seats and memory for its whole possible answer are free, because others hold "
        "memory for words they may never say; and it never overtakes a larger request that does not fit.",
        flags={
            "max_bs": "max_bs",
            "reserve": "max_tokens in the paper; max_model_len in the ports",
            "max_num_batched_tokens": "",
        },
        limits="A long prompt makes the pass long for everybody who decodes in it. Memory is reserved for answers "
        "that end early.",
        not_modelled="Several batches in flight over pipeline stages (n_workers). Reservations are whole blocks; a "
        "budget of tokens per pass exists, which the paper does not have.",
        source="Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI'22, "
        "Algorithm 1 and section 4.2",
        date="July 2022",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReserveModelLength(ReserveMaxTokens):
    """Every sequence takes memory for the longest one that the model allows."""

    max_model_len: int

    def claim(self, sequence: Sequence) -> int:
        """The model's length."""
        return self.max_model_len


class Iteration:
    """The running, one token each, and whole prompts of newcomers beside them."""

    def __init__(self, max_bs: int) -> None:
        self._max_bs = max_bs

    def compose(self, step: Step) -> Iterator[Action]:
        """Continue all, admit until one cannot start."""
        yield Continue()
        limit = step.config.max_num_batched_tokens
        while (head := next(iter(step.waiting), None)) is not None and head.num_tokens > limit:
            yield Refuse(
                head,
                f"{head.num_tokens} tokens have to be computed in one pass, but max_num_batched_tokens is {limit}",
            )
        if step.num_running < self._max_bs:
            yield Admit(max_seqs=self._max_bs - step.num_running, whole=True)
