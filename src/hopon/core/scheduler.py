"""The scheduler: a state machine with four verbs, told what time it is.

It has no clock, no I/O and no randomness. ``plan`` decides what the next step computes, ``commit`` takes in what came
of it. There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and a plan gives
it some more to compute. Chunked prefill, recompute after preemption and prefix hits are the same arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass

from hopon.core.blocks import BlockPool
from hopon.core.config import SchedulerConfig
from hopon.core.plan import Chunk, OpenRow, RowResult, StepPlan, StepResult
from hopon.core.policy.admission import Verdict
from hopon.core.policy.composition import Phase
from hopon.core.policy.order import Key
from hopon.core.policy.presets import Policy, default_policy
from hopon.core.sequence import Sequence
from hopon.core.types import Delta, FinishReason, Logprob, Request


@dataclass(slots=True)
class Counters:
    """Monotonic totals, for metrics and tests."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class _Queue:
    """Sequences in the policy's order; adding and removing anywhere, first and last at hand."""

    def __init__(self) -> None:
        self._items: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, key: Key, sequence: Sequence) -> None:
        insort(self._items, (key, sequence), key=lambda item: item[0])

    def remove(self, key: Key) -> None:
        i = bisect_left(self._items, key, key=lambda item: item[0])
        found, _ = self._items.pop(i)
        assert found == key, f"no sequence with the key {key} is queued"

    def first(self) -> Sequence:
        return self._items[0][1]

    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self._items]


class Scheduler:
    """Who computes what, with which memory, in the next step.

    Args:
        config: limits; see there.
        policy: the parts that make up the batching system.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = policy or default_policy(config)
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}  # every unfinished request
        self._waiting = _Queue()
        self._running = _Queue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._closing: list[int] = []  # rows that the next plan closes
        self._in_flight: dict[int, list[tuple[Sequence, Chunk]]] = {}
        self._outbox: list[Delta] = []
        self._step = 0
        self._arrivals = 0

    # ---- what a driver wants to know ----

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing: not yet started, or preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether planning can be of use: unfinished requests, rows to close, or news to deliver."""
        return bool(self._sequences or self._closing or self._in_flight or self._outbox)

    # ---- the four verbs ----

    def add(self, request: Request, now: float) -> None:
        """Take a request in. One that can never run ends at once with REFUSED and the numbers."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        config = self.config
        num_tokens = len(request.prompt) + len(request.output)
        needed = -(-num_tokens // config.block_size)
        refusal = ""
        if num_tokens >= config.max_model_len:
            refusal = (
                f"the prompt has {num_tokens} tokens, but at most {config.max_model_len - 1} fit beside one output "
                f"token: max_model_len is {config.max_model_len}"
            )
        elif needed > config.num_blocks:
            refusal = (
                f"the prompt has {num_tokens} tokens and needs {needed} KV blocks of {config.block_size}, but the "
                f"whole pool has {config.num_blocks}"
            )
        if refusal:
            self._outbox.append(
                Delta(request_id=request.request_id, time=now, finish=FinishReason.REFUSED, message=refusal)
            )
            return
        room = config.max_model_len - len(request.prompt)
        max_output = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        sequence = Sequence(request, self._arrivals, max_output)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.add(self.policy.order.key(sequence), sequence)

    def abort(self, request_id: str, now: float) -> None:
        """End a request in whatever phase it is. Unknown and finished ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT, now)

    def abort_all(self, now: float) -> None:
        """End every request, in order of arrival."""
        for request_id in list(self._sequences):
            self.abort(request_id, now)

    def plan(self, now: float) -> StepPlan:
        """Decide on the next step. May be called again before the step is committed (pipelining)."""
        step = _Step(self.config.max_num_batched_tokens)
        closed = self._closing
        self._free_rows += closed
        self._closing = []
        for phase in self.policy.composition:
            if phase is Phase.ADMIT:
                self._admit(step, now)
            else:
                self._continue(step, phase, now)
        for sequence, chunk in step.chunks.values():
            sequence.num_in_flight += 1
            sequence.num_computed += chunk.count
            sequence.num_pending += chunk.sample
            recomputed = min(sequence.num_computed, sequence.peak_computed) - chunk.start
            self.counters.num_recomputed_tokens += max(0, recomputed)
            sequence.peak_computed = max(sequence.peak_computed, sequence.num_computed)
        plan = StepPlan(
            step=self._step,
            closed=(*closed, *step.closed),
            opened=tuple(step.opened),
            chunks=tuple(chunk for _, chunk in step.chunks.values()),
        )
        self._step += 1
        if plan.chunks:
            self._in_flight[plan.step] = list(step.chunks.values())
            self.counters.num_steps += 1
            self.counters.num_scheduled_tokens += plan.num_tokens
        else:
            progress = self._in_flight or self._outbox or not self._sequences
            assert progress, f"{len(self._sequences)} unfinished requests, and none can ever be planned"
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Delta]:
        """Take in a step's result; an empty plan is committed with an empty result. Returns all news since the last."""
        entries = self._in_flight.pop(plan.step, [])
        assert len(entries) == len(result.rows), f"{len(result.rows)} results for {len(entries)} chunks"
        for (sequence, chunk), row in zip(entries, result.rows, strict=True):
            assert row.row == chunk.row, f"result of row {row.row} where row {chunk.row} was planned"
            sequence.num_in_flight -= 1
            sequence.num_pending -= chunk.sample
            if sequence.finished:
                self._vacate(sequence)
            else:
                self._take(sequence, chunk, row, now)
        news, self._outbox = self._outbox, []
        return news

    # ---- planning ----

    def _continue(self, step: _Step, phase: Phase, now: float) -> None:
        """Give running sequences of one phase tokens, in order, growing their memory."""
        for sequence in self._running.sequences():
            if step.budget == 0:
                return
            remaining = sequence.num_remaining
            if sequence.row is None or remaining == 0 or (remaining == 1) != (phase is Phase.DECODE):
                continue  # preempted in this step, all in flight, or of another phase
            count = self._chunk_size(remaining, step.budget)
            if count == 0:
                continue
            blocks = self._grow(sequence, sequence.num_computed + count, step, now)
            if blocks is not None:
                step.add(sequence, self._chunk(sequence, count, blocks))

    def _admit(self, step: _Step, now: float) -> None:
        """Start waiting sequences in order until one cannot; not in a step that had to preempt."""
        config = self.config
        while self._waiting and self._free_rows and step.budget > 0 and not step.preempted:
            sequence = self._waiting.first()
            length = sequence.num_tokens
            cached = self._match(sequence)
            num_cached = len(cached) * config.block_size
            count = self._chunk_size(length - num_cached, step.budget)
            needed = -(-length // config.block_size) - len(cached)
            verdict = self.policy.admission.decide(
                sequence,
                num_needed=needed,
                num_free=self.pool.num_free - self.pool.count_free(cached),
                num_blocks=config.num_blocks,
                num_running=len(self._running),
            )
            if count == 0 or verdict is Verdict.STOP:
                return
            self._waiting.remove(self.policy.order.key(sequence))
            self.pool.acquire(cached)
            sequence.blocks = cached + self.pool.allocate(needed)
            sequence.num_computed = num_cached
            if sequence.admitted is None:
                self._enter(sequence, num_cached, now)
            sequence.row = self._free_rows.pop()
            self._running.add(self.policy.order.key(sequence), sequence)
            request = sequence.request
            step.opened.append(
                OpenRow(
                    row=sequence.row,
                    prompt=request.prompt,
                    output=tuple(sequence.tokens[sequence.num_prompt :]),
                    params=request.params,
                    seed=request.seed,
                    choice=request.choice,
                    stop_token_ids=request.stop_token_ids,
                )
            )
            step.add(sequence, self._chunk(sequence, count, tuple(sequence.blocks)))

    def _chunk_size(self, remaining: int, budget: int) -> int:
        """Tokens to compute now; 0 when a prompt that must stay whole does not fit any more."""
        threshold = self.config.long_prefill_token_threshold
        if not self.config.enable_chunked_prefill:
            return remaining if remaining <= budget else 0
        return min(remaining, budget, threshold) if threshold else min(remaining, budget)

    def _chunk(self, sequence: Sequence, count: int, blocks: tuple[int, ...]) -> Chunk:
        assert sequence.row is not None, "only a sequence with a row computes"
        start = sequence.num_computed
        end = start + count
        sample = end == sequence.num_tokens
        num_logits = int(sample)
        if sequence.request.params.prompt_logprobs is not None:
            first = max(start, sequence.num_scored)
            if first < min(end, sequence.num_prompt - 1):
                num_logits = end - first
        return Chunk(
            row=sequence.row, start=start, count=count, num_logits=num_logits, sample=sample, new_blocks=blocks
        )

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that it can start from: whole ones, never all of its tokens."""
        config = self.config
        if not config.enable_prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        usable = (len(sequence.tokens) - 1) // config.block_size
        return self.pool.match(sequence.keys(usable, config.block_size), sequence.tokens, sequence.salt)

    def _enter(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """First admission. What a sequence finds of itself after a preemption is no hit and no second entry."""
        sequence.admitted = now
        sequence.num_cached = min(num_cached, sequence.num_prompt - 1)
        self.counters.num_prompt_tokens += sequence.num_prompt
        self.counters.prefix_cache_queries += sequence.num_prompt
        self.counters.prefix_cache_hits += sequence.num_cached

    def _grow(self, sequence: Sequence, length: int, step: _Step, now: float) -> tuple[int, ...] | None:
        """Blocks to append so that ``length`` tokens fit; preempts when none are free. None: not in this step."""
        needed = -(-length // self.config.block_size) - len(sequence.blocks)
        while needed > self.pool.num_free:
            victim = self.policy.eviction.victim(self._running.sequences())
            if victim.num_in_flight:
                return None  # in-flight rule: blocks that a submitted step refers to stay where they are
            if victim is sequence and len(self._running) == 1:
                if self.pool.num_used == len(sequence.blocks):
                    self._finish(sequence, FinishReason.LENGTH, now)  # it has the whole pool already
                return None
            self._preempt(victim, step)
            if victim is sequence:
                return None
        if needed <= 0:
            return ()
        blocks = self.pool.allocate(needed)
        sequence.blocks += blocks
        return tuple(blocks)

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take everything from a sequence and put it back in the queue; it will recompute prompt and output."""
        assert sequence.row is not None, "only a running sequence can be preempted"
        step.remove(sequence)
        step.preempted = True
        step.closed.append(sequence.row)
        self._running.remove(self.policy.order.key(sequence))
        self._free_rows.append(sequence.row)
        self._release(sequence)
        sequence.row = None
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.add(self.policy.order.key(sequence), sequence)

    # ---- taking results in ----

    def _take(self, sequence: Sequence, chunk: Chunk, row: RowResult, now: float) -> None:
        """Append new tokens, publish full blocks, find out whether it ends, tell the news."""
        end = chunk.start + chunk.count
        index = sequence.num_output
        finish = None
        accepted = 0
        for token in row.tokens:
            sequence.tokens.append(token)
            accepted += 1
            finish = self._reason_to_stop(sequence, token)
            if finish is not None:
                break
        self.counters.num_generated_tokens += accepted
        if self.config.enable_prefix_caching:
            self._publish(sequence, end)
        scores = self._new_scores(sequence, chunk, row)
        if finish is not None:
            self._finish(sequence, finish, now, index, row, accepted, scores)
        elif accepted or scores:
            self._tell(sequence, now, index, row.tokens[:accepted], row.logprobs[:accepted], scores)

    def _reason_to_stop(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.stop_ids and sequence.num_output > sequence.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_output >= sequence.max_output else None

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Offer blocks that are full of computed tokens to the prefix cache."""
        size = self.config.block_size
        full = end // size
        keys = sequence.keys(full, size) if full > sequence.num_published else []
        while sequence.num_published < full and sequence.content is not None:
            i = sequence.num_published
            tokens = tuple(sequence.tokens[i * size : (i + 1) * size])
            sequence.content = self.pool.publish(sequence.blocks[i], sequence.content, keys[i], tokens)
            sequence.num_published += 1

    def _new_scores(self, sequence: Sequence, chunk: Chunk, row: RowResult) -> tuple[Logprob, ...]:
        """Log-probabilities of prompt tokens that were not delivered before (a recompute yields them again)."""
        if not row.prompt_logprobs:
            return ()
        first = chunk.start + chunk.count - chunk.num_logits
        scores = row.prompt_logprobs[sequence.num_scored - first : sequence.num_prompt - 1 - first]
        sequence.num_scored += len(scores)
        return scores

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        index: int | None = None,
        row: RowResult | None = None,
        accepted: int = 0,
        scores: tuple[Logprob, ...] = (),
    ) -> None:
        """End a request: its last news, and its memory as soon as no submitted step refers to it."""
        tokens = row.tokens[:accepted] if row else ()
        logprobs = row.logprobs[:accepted] if row else ()
        self._tell(sequence, now, sequence.num_output if index is None else index, tokens, logprobs, scores, reason)
        sequence.finished = True
        del self._sequences[sequence.request.request_id]
        queue = self._waiting if sequence.row is None else self._running
        queue.remove(self.policy.order.key(sequence))
        self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.num_in_flight == 0 and sequence.row is not None:
            self._release(sequence)
            self._closing.append(sequence.row)
            sequence.row = None

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_published = 0
        sequence.content = sequence.salt

    def _tell(
        self,
        sequence: Sequence,
        now: float,
        index: int,
        tokens: tuple[int, ...],
        logprobs: tuple[Logprob, ...],
        scores: tuple[Logprob, ...],
        finish: FinishReason | None = None,
    ) -> None:
        self._outbox.append(
            Delta(
                request_id=sequence.request.request_id,
                time=now,
                index=index,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=scores,
                finish=finish,
                cached_tokens=sequence.num_cached,
                admitted=sequence.admitted,
            )
        )


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.opened: list[OpenRow] = []
        self.closed: list[int] = []
        self.chunks: OrderedDict[int, tuple[Sequence, Chunk]] = OrderedDict()
        self.preempted = False

    def add(self, sequence: Sequence, chunk: Chunk) -> None:
        self.chunks[sequence.number] = (sequence, chunk)
        self.budget -= chunk.count

    def remove(self, sequence: Sequence) -> None:
        """A victim that has been served in this step gives its tokens back to the budget."""
        entry = self.chunks.pop(sequence.number, None)
        if entry is not None:
            self.budget += entry[1].count
