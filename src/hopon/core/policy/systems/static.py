"""Static, request-level batching: a group goes in together, and nobody joins until all of it is finished.

``static`` waits for a full group ("collect N requests, run until all are done, answer together, take the next N"), the
baseline of most articles on continuous batching. ``static-impatient`` takes what waits whenever the batch is empty, as
FasterTransformer is driven in the schedulers of Sarathi-Serve (``faster_transformer_scheduler.py``, OSDI'24) and Vidur
(MLSys'24), and as TensorRT-LLM's static batch does. ``hf-pipeline`` is the baseline of Anyscale's comparison of June
2023: a Hugging Face ``pipeline`` whose ``min_length = max_length`` is the maximum over all requests of the run. Every
prompt is padded to the longest of its batch, and every batch generates as many tokens as the longest output of the run.

Not modelled: FasterTransformer's first iteration at the shortest prompt of the batch, its one reservation of 2,048
tokens per request, and beam search; KV memory that a padded pipeline spends on padded positions (their computation is
paid for). Where the token budget of a pass is smaller than a group's prompts, they take several passes; the originals
have no such budget.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isinf
from typing import ClassVar, Literal

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, ReserveMaxTokens
from hopon.core.policy.composition import Action, Continue, Pad, Refuse, RequestLevel, WaitUntil
from hopon.core.policy.eviction import Never
from hopon.core.policy.order import Arrival
from hopon.core.policy.preset import Card, Policy
from hopon.core.sequence import Sequence
from hopon.core.step import Step

Delivery = Literal["batch", "stream"]


@dataclass(frozen=True, kw_only=True)
class Static:
    """A full group; a partial one when its oldest member has waited long enough or no more requests will come.

    A group is full, too, when the next request's reservation does not fit beside the others'.

    Args:
        group_size: requests of a full group; 0 for ``max_num_seqs``.
        max_wait: seconds after which a partial group goes; by default it waits for ever.
        delivery: "batch" answers when the whole batch is finished, "stream" sends tokens as they come.
    """

    group_size: int = 0
    max_wait: float = inf
    delivery: Delivery = "batch"

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ValueError(f"group_size must be at least 0 (0 = max_num_seqs), got {self.group_size}")
        if not self.max_wait >= 0:
            raise ValueError(f"max_wait must be at least 0 seconds, got {self.max_wait}")
        check_delivery(self.delivery)

    @property
    def why_not_serve(self) -> str:
        """Without a limit a server with few clients would never answer."""
        if isinf(self.max_wait):
            return "it waits for a full group for ever, and a server's input never ends: give max_wait in seconds"
        return ""

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """No prefix cache."""
        return {"enable_prefix_caching": False}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a group larger than ``max_num_seqs``."""
        admission = ReserveMaxTokens()
        group = Group(admission, group_limit("group_size", self.group_size, config), self.max_wait)
        return Policy(order=Arrival(), admission=admission, composition=group, eviction=Never(), delivery=self.delivery)

    card: ClassVar[Card] = Card(
        system="Static batching, the baseline of most articles on continuous batching",
        aliases=("request-level batching", "fixed batch", "naive batching"),
        joins="Only when a full group of group_size is there and the batch before is finished; a partial group "
        "goes after max_wait seconds, or when no more requests will come.",
        prefill="All prompts of the group first, together; nobody decodes before they are done.",
        memory="Prompt and max_tokens of every member are reserved when the group starts; a group is also full "
        "when the next reservation does not fit.",
        eviction="Never: what is reserved suffices.",
        short_waits="It waits for the group to fill, for the longest answer of the batch before it, and then, "
        "though its own answer is ready, for the longest of its own batch, because all answers are told together.",
        flags={"group_size": "batch size", "max_wait": "", "delivery": ""},
        limits="The rows of those that have finished are computed on until the longest has; the larger the batch, "
        "the larger the share that is wasted.",
        not_modelled="Padding of prompts to the longest (see hf-pipeline). Prompts beyond the token budget of a "
        "pass take several passes.",
        source="the textbook rule: collect N requests, run until all are done, answer, take the next N",
        date="before 2022",
    )


@dataclass(frozen=True, kw_only=True)
class StaticImpatient:
    """Whenever the batch is empty, as many of the waiting as fit.

    Args:
        group_size: most requests of a batch (FasterTransformer's batch size); 0 for ``max_num_seqs``.
        delivery: "batch" answers when the whole batch is finished, "stream" sends tokens as they come.
    """

    group_size: int = 0
    delivery: Delivery = "batch"

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """No prefix cache."""
        return {"enable_prefix_caching": False}

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError for a batch larger than ``max_num_seqs``."""
        return Static(group_size=self.group_size, max_wait=0.0, delivery=self.delivery).policy(config)

    card: ClassVar[Card] = Card(
        system="FasterTransformer, as Sarathi-Serve and Vidur drive it",
        aliases=("request-level batching", "static batching", "opportunistic static batching"),
        joins="When the batch is empty: as many of the waiting as fit, without waiting for more.",
        prefill="All prompts of the batch first, together; nobody decodes before they are done.",
        memory="Prompt and max_tokens of every member are reserved when the batch starts.",
        eviction="Never: what is reserved suffices.",
        short_waits="It waits for the longest answer of the running batch, and then for the longest of its own, "
        "because all answers are told together; an idle machine takes it at once.",
        flags={"group_size": "max_batch_size", "delivery": ""},
        limits="A request that comes just after a batch has started waits for all of it, even when seats are empty.",
        not_modelled="A first iteration at the shortest prompt of the batch, one reservation of 2,048 tokens per "
        "request, beam search.",
        source="faster_transformer_scheduler.py in Sarathi-Serve (OSDI'24) and Vidur (MLSys'24)",
        date="2024",
    )


@dataclass(frozen=True, kw_only=True)
class HfPipeline(Static):
    """Padded static batching that generates up to the run's maximum, whatever the batch needs.

    Args:
        run_max_tokens: the largest ``max_tokens`` of the run (the pipeline's ``max_length`` without the prompt). Must
            be given; a request that asks for more is refused.
    """

    run_max_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_max_tokens < 0:
            raise ValueError(f"run_max_tokens must be at least 1, got {self.run_max_tokens}")

    @property
    def why_not_serve(self) -> str:
        """A run's maximum is known when the run is."""
        return (
            "every batch of a padded pipeline generates the maximum of all requests of the run, "
            "which a server cannot know: use it in comparisons and simulations"
        )

    def policy(self, config: SchedulerConfig) -> Policy:
        """See the class. Raises ValueError without ``run_max_tokens``."""
        if not self.run_max_tokens:
            raise ValueError("hf-pipeline needs run_max_tokens, the largest max_tokens of all requests of the run")
        admission = RunMaximum(run_max_tokens=self.run_max_tokens, max_model_len=config.max_model_len)
        size = group_limit("group_size", self.group_size, config)
        return Policy(
            order=Arrival(),
            admission=admission,
            composition=PaddedGroup(admission, size, self.max_wait, self.run_max_tokens),
            eviction=Never(),
            delivery=self.delivery,
        )

    card: ClassVar[Card] = Card(
        system="Hugging Face pipeline, the naive baseline of Anyscale's comparison",
        aliases=("static batching", "padded batching", "naive batching"),
        joins="Only when a full group is there and the batch before is finished; a partial group goes after "
        "max_wait seconds, or when no more requests will come.",
        prefill="All prompts of the batch first, each padded to the longest; nobody decodes before they are done.",
        memory="Every row reserves its prompt and the longest output of the whole run.",
        eviction="Never: what is reserved suffices.",
        short_waits="It waits for the group to fill and for the batch before it, and every batch runs to the "
        "longest output of the whole run: a request for one token takes as long as the longest request there is.",
        flags={
            "run_max_tokens": "min_length = max_length",
            "group_size": "batch_size",
            "max_wait": "",
            "delivery": "",
        },
        limits="The run's longest output must be known before it begins, so it is for comparisons and simulations, "
        "not for a server.",
        not_modelled="Memory for padded positions; their computation is paid for.",
        source="Anyscale's article of June 2023 and its benchmark scripts",
        date="June 2023",
    )


def check_delivery(delivery: str) -> None:
    """Raise ValueError unless it is one of the two."""
    if delivery not in ("batch", "stream"):
        raise ValueError(f"delivery must be 'batch' or 'stream', got {delivery!r}")


def group_limit(name: str, size: int, config: SchedulerConfig) -> int:
    """Requests of a group; 0 stands for all seats. Raises ValueError when there are not as many."""
    if not 0 <= size <= config.max_num_seqs:
        raise ValueError(f"{name} must be in [0, max_num_seqs {config.max_num_seqs}], got {size}")
    return size or config.max_num_seqs


class Group(RequestLevel):
    """Waits for ``size`` requests, or until the oldest has waited ``max_wait`` seconds, or the input is closed."""

    def __init__(self, admission: Admission, size: int, max_wait: float) -> None:
        super().__init__()
        self._admission = admission
        self._size = size
        self._max_wait = max_wait

    def choose(self, step: Step) -> Generator[Action, None, list[Sequence]]:
        """The first of the waiting, as many as fit."""
        group: list[Sequence] = []
        free = step.num_blocks
        full = False
        for sequence in step.waiting:
            free -= -(-self._admission.claim(sequence) // step.config.block_size)
            full = free < 0 or len(group) == self._size
            if full:
                break
            group.append(sequence)
        if not group or full or len(group) == self._size or step.input_closed:
            return group
        deadline = min(sequence.request.arrival for sequence in group) + self._max_wait
        if step.now >= deadline:
            return group
        yield WaitUntil(deadline)
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMaximum(ReserveMaxTokens):
    """Every row takes memory for its prompt and the run's longest output."""

    run_max_tokens: int
    max_model_len: int

    def claim(self, sequence: Sequence) -> int:
        """Prompt and the run's maximum, within the model's length."""
        return min(sequence.num_tokens + self.run_max_tokens, self.max_model_len)


class PaddedGroup(Group):
    """A rectangle: as many rows as the batch has members, the longest prompt plus the run's maximum wide."""

    def __init__(self, admission: Admission, size: int, max_wait: float, run_max_tokens: int) -> None:
        super().__init__(admission, size, max_wait)
        self._run_max_tokens = run_max_tokens
        self._longest = 0  # prompt of the batch
        self._num_rows = 0  # members that have started
        self._num_passes = 0  # decode passes that the batch has still to pay for

    def compose(self, step: Step) -> Iterator[Action]:
        """As any group, and whatever is computed in vain."""
        if not step.num_running and not self.starting() and not (self._num_rows and self._num_passes):
            self._num_rows, self._num_passes = 0, self._run_max_tokens - 1
            for sequence in [s for s in step.waiting if s.max_output > self._run_max_tokens]:
                yield Refuse(
                    sequence,
                    f"up to {sequence.max_output} output tokens are asked for, but every batch of this run generates "
                    f"run_max_tokens {self._run_max_tokens}",
                )
            self._chosen = yield from self.choose(step)
            self._longest = max((sequence.num_tokens for sequence in self._chosen), default=0)
        yield from self.prompts(step)
        self._num_rows += len(step.admitted)
        padding = sum(self._longest - sequence.num_tokens for sequence in step.admitted)
        if self._num_rows and self._num_passes and not step.chunks and not self.starting():
            self._num_passes -= 1
            yield Continue()
            padding = self._num_rows - len(step.chunks)
        if self._num_rows:
            yield Pad(padding, more=self._num_passes > 0)
