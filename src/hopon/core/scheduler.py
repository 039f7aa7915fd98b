"""The scheduler: a state machine with four verbs, told what time it is.

It has no clock, no I/O and no randomness. ``plan`` decides what the next step computes, ``commit`` takes in what came
of it. There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and a plan gives
it some more to compute. Chunked prefill, recompute after preemption and prefix hits are the same arithmetic. What is
decided when is the policy's; that blocks, seats and tokens are conserved whatever it decides is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopon.core.blocks import BlockPool, Content, HostPool, root_key
from hopon.core.config import SchedulerConfig
from hopon.core.plan import Chunk, Move, OpenRow, RowResult, StepPlan, StepResult
from hopon.core.policy.admission import Offer, Verdict
from hopon.core.policy.composition import Admit, Continue, Evict, Pad, Refuse, Scope, Sort, WaitUntil, Which
from hopon.core.policy.eviction import Failure, Freed, Requeue, Victim
from hopon.core.policy.preset import Policy
from hopon.core.policy.systems.hopon import Hopon
from hopon.core.queue import Queue
from hopon.core.sequence import Sequence
from hopon.core.step import Obstacle, Step
from hopon.core.types import Delta, FinishReason, Logprob, Request

NOTHING = Chunk(row=-1, start=0, count=0, num_logits=0, sample=False)
"""What a sequence computes that computes nothing."""


@dataclass(slots=True)
class Counters:
    """Monotonic totals, for metrics and tests."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padding_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_moved_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Scheduler:
    """Who computes what, with which memory, in the next step.

    Args:
        config: limits; see there.
        policy: the parts that make up the batching system; hopon's own by default.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = policy or Hopon().policy(config)
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.host_pool = HostPool(config.num_host_blocks)
        self.counters = Counters()
        self.input_closed = False
        self._sequences: dict[str, Sequence] = {}  # every unfinished request
        self._waiting = Queue()
        self._running = Queue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._closing: list[int] = []  # rows that the next plan closes
        self._in_flight: dict[int, list[tuple[Sequence, Chunk]]] = {}
        self._planned_at: dict[int, float] = {}  # when the steps in flight were planned
        self._outbox: list[Delta] = []
        self._held: list[Delta] = []  # news that waits for the end of its batch
        self._padding_follows = False  # passes that nobody needs belong to the batch still
        self._step = 0
        self._arrivals = 0

    # ---- what a driver wants to know ----

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no row: not yet started, or evicted."""
        return len(self._sequences) - len(self._running)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of running sequences that have been computed and lie in the pool; shared ones count for each."""
        return sum(sequence.num_computed for sequence in self._running)

    @property
    def has_work(self) -> bool:
        """Whether planning can be of use: unfinished requests, rows to close, or news to deliver."""
        return bool(self._sequences or self._closing or self._in_flight or self._outbox or self._padding_follows)

    # ---- the four verbs ----

    def add(self, request: Request, now: float) -> None:
        """Take a request in. One that can never run ends at once with REFUSED and the numbers.

        One with an unfinished leader queues when the leader's prompt has been planned, so that it finds it computed.
        (Not in a request-level system, where both belong to the same batch.)
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        leader = self._leader(request)
        room = self.config.max_model_len - len(request.prompt)
        max_output = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        sequence = Sequence(request, self._arrivals, max_output)
        self._arrivals += 1
        refusal = self._refusal(sequence)
        if refusal:
            self._tell(sequence, now, FinishReason.REFUSED, refusal)
            return
        self._sequences[request.request_id] = sequence
        if leader is None or not self._is_behind(leader) or self.policy.delivery == "batch":
            self._waiting.add(sequence, self.policy.order.key(sequence, now))
        else:
            leader.followers.append(sequence)

    def abort(self, request_id: str, now: float) -> None:
        """End a request in whatever phase it is. Unknown and finished ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT, now)

    def abort_all(self, now: float) -> None:
        """End every request, in order of arrival."""
        for request_id in list(self._sequences):
            self.abort(request_id, now)

    def close_input(self) -> None:
        """No more requests will come: policies that wait for a full group need not wait any more."""
        self.input_closed = True

    def plan(self, now: float) -> StepPlan:
        """Decide on the next step. May be called again before the step is committed (pipelining)."""
        closed, self._closing = self._closing, []
        self._free_rows += closed
        step = Step(
            now=now,
            config=self.config,
            pool=self.pool,
            waiting=self._waiting,
            running=self._running,
            input_closed=self.input_closed,
            match=self._match,
        )
        step.closed += closed
        self._padding_follows = False
        if self.policy.order.dynamic:
            self._waiting.sort(lambda sequence: self.policy.order.key(sequence, now))
        for action in self.policy.composition.compose(step):
            match action:
                case Continue():
                    self._continue(step, action)
                case Admit():
                    self._admit(step, action)
                case Evict(victim=victim):
                    self._evict(step, victim)
                case Refuse(sequence=sequence, message=message, reason=reason):
                    self._finish(sequence, reason, now, message=message)
                case Pad(num_rows=num_rows, more=more):
                    step.padding += num_rows
                    self._padding_follows = more
                case WaitUntil(moment=moment):
                    step.wake_at = moment if step.wake_at is None else min(step.wake_at, moment)
                case Sort(key=key):
                    self._waiting.sort(key)
        plan = self._close(step)
        for observer in self.policy.observers:
            observer.stepped(step)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Delta]:
        """Take in a step's result; an empty plan is committed with an empty result. Returns all news since the last."""
        entries = self._in_flight.pop(plan.step, [])
        outlet = self._outbox if self.policy.delivery == "stream" else self._held
        assert len(entries) == len(result.rows), f"{len(result.rows)} results for {len(entries)} chunks"
        for (sequence, chunk), row in zip(entries, result.rows, strict=True):
            assert row.row == chunk.row, f"result of row {row.row} where row {chunk.row} was planned"
            sequence.num_in_flight -= 1
            sequence.num_pending -= chunk.sample
            if sequence.finished:
                self._vacate(sequence)
            else:
                self._take(sequence, chunk, row, now, outlet)
        if self._held and not (self._running or self._in_flight or self._padding_follows):
            self._outbox += [replace(delta, time=now) for delta in self._held]
            self._held = []
        planned_at = self._planned_at.pop(plan.step, None)
        if planned_at is not None:
            for observer in self.policy.observers:
                observer.committed(plan, now - planned_at)
        news, self._outbox = self._outbox, []
        return news

    # ---- planning ----

    def _refusal(self, sequence: Sequence) -> str:
        """Why a new request can never run; empty when it can."""
        config = self.config
        if sequence.num_tokens >= config.max_model_len:
            return (
                f"the prompt has {sequence.num_tokens} tokens, but at most {config.max_model_len - 1} fit beside one "
                f"output token: max_model_len is {config.max_model_len}"
            )
        claim = max(self.policy.admission.claim(sequence), sequence.num_tokens)
        needed = self._blocks_for(claim)
        if needed > config.num_blocks:
            what = f"and reserves {claim} tokens of memory, " if claim > sequence.num_tokens else "and "
            return (
                f"the prompt has {sequence.num_tokens} tokens {what}needs {needed} KV blocks of {config.block_size}, "
                f"but the whole pool has {config.num_blocks}"
            )
        return ""

    def _leader(self, request: Request) -> Sequence | None:
        """The unfinished request whose prompt it shares."""
        leader = self._sequences.get(request.leader)
        if leader is not None and (leader.request.prompt, leader.request.cache_salt) != (
            request.prompt,
            request.cache_salt,
        ):
            raise ValueError(f"request {request.request_id!r} has another prompt or salt than {request.leader!r}")
        return leader

    def _is_behind(self, leader: Sequence) -> bool:
        """Whether blocks that its followers will share are still to be planned."""
        size = self.config.block_size
        return leader.num_computed < (leader.num_prompt - 1) // size * size

    def _shared_blocks(self, leader: Sequence, sequence: Sequence) -> list[int]:
        """The leader's blocks that are full of prompt and computed by steps planned before this one."""
        if leader.salt != sequence.salt:
            return []  # they live in different scopes
        usable = min(leader.num_computed, sequence.num_prompt, len(sequence.tokens) - 1)
        return leader.blocks[: usable // self.config.block_size]

    def _release_followers(self, leader: Sequence, now: float) -> None:
        for sequence in leader.followers:
            self._waiting.add(sequence, self.policy.order.key(sequence, now))
        leader.followers = []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _continue(self, step: Step, action: Continue) -> None:
        """Give running sequences tokens, in order, growing their memory."""
        if not action.extend and len(step.chunks) == len(self._running):
            return  # all are served
        left = action.max_tokens
        seats = len(self._running) if action.max_seqs is None else action.max_seqs
        chunks, block_size = step.chunks, self.config.block_size
        accepts, extend = action.accepts, action.extend
        # who is passed over: those with one token left (True), those with more (False), nobody (None)
        unwanted = None if action.which is Which.ALL else action.which is Which.PREFILL
        steady = action.size is None and not extend  # who has one token left gets it
        for sequence in self._running.sequences():
            budget = step.budget if left is None else min(left, step.budget)
            if budget <= 0 or seats <= 0:
                return
            if sequence.row is None or (sequence.number in chunks) != extend:
                continue  # evicted in this step, or served already
            served = chunks[sequence.number][1] if extend else NOTHING
            remaining = len(sequence.tokens) + sequence.num_pending - sequence.num_computed - served.count
            if remaining == 0:
                continue  # all in flight
            if (remaining == 1) is unwanted:
                continue
            if accepts is not None and not accepts(sequence):
                continue
            start = sequence.num_computed
            count = 1
            if remaining > 1 or not steady:
                count = self._chunk_size(sequence, remaining, budget, action, served.count)
                if count == 0:
                    continue
            total = served.count + count
            blocks: tuple[int, ...] = ()
            if start + total > len(sequence.blocks) * block_size:
                grown = self._grow(step, sequence, start + total)
                if grown is None:
                    if action.strict:
                        return
                    continue
                blocks = grown
            if remaining == 1 and steady and start >= sequence.num_prompt:  # what _chunk would say, sooner
                chunk = Chunk(row=sequence.row, start=start, count=1, num_logits=1, sample=True, new_blocks=blocks)
            else:
                chunk = self._chunk(sequence, total, served.new_blocks + blocks)
            chunks[sequence.number] = (sequence, chunk)
            step.budget -= count
            seats -= 1
            if left is not None:
                left -= count

    def _admit(self, step: Step, action: Admit) -> None:
        """Start waiting sequences in order until one cannot; all of them are chosen before the first one starts."""
        left = step.budget if action.max_tokens is None else min(action.max_tokens, step.budget)
        seats = len(self._free_rows)
        if action.max_seqs is not None:
            seats = min(seats, action.max_seqs)
        free = self.pool.num_free
        chosen: list[tuple[Sequence, list[int], int, int]] = []
        taken: set[int] = set()  # free blocks that those chosen before will acquire from the prefix cache
        for sequence in self._waiting:
            if left <= 0:
                step.obstacle = Obstacle.TOKENS
                break
            if len(chosen) >= seats:
                step.obstacle = Obstacle.SEATS if seats == len(self._free_rows) else None
                break
            if action.accepts is not None and not action.accepts(sequence):
                continue
            if action.scope is not None:
                self._enter_scope(sequence, action.scope(sequence))
            cached = self._match(sequence)
            kept = max(len(cached), len(sequence.blocks))
            computed = sequence.num_computed or len(cached) * self.config.block_size
            count = self._chunk_size(sequence, sequence.num_tokens - computed, left, action)
            if count == 0:
                step.obstacle = Obstacle.TOKENS
                break
            revived = {block for block in cached if self.pool.is_free(block)} - taken
            claim = max(self.policy.admission.claim(sequence), computed + count)
            offer = Offer(
                num_needed=max(0, self._blocks_for(claim) - kept),
                num_free=free - len(revived),
                num_running=len(self._running) + len(chosen),
                num_tokens=count,
                num_cached=len(cached) * self.config.block_size,
            )
            verdict = self.policy.admission.decide(sequence, offer, step)
            if verdict is Verdict.SKIP:
                continue
            if verdict is Verdict.STOP:
                step.obstacle = Obstacle.BLOCKS
                break
            assert offer.num_needed <= offer.num_free, f"admission starts a sequence without memory: {offer}"
            chosen.append((sequence, cached, offer.num_needed, count))
            taken |= revived
            free = offer.num_free - offer.num_needed
            left -= count
        if len(chosen) < action.min_seqs:
            return
        for _, cached, _, _ in chosen:
            self.pool.acquire(cached)
        for sequence, cached, needed, count in chosen:
            self._start(step, sequence, cached, needed, count)

    def _start(self, step: Step, sequence: Sequence, cached: list[int], needed: int, count: int) -> None:
        """A waiting sequence takes a row and memory, and computes its first chunk."""
        self._waiting.remove(sequence)
        if sequence.admitted is None:
            self._enter(sequence, len(cached) * self.config.block_size, step.now)
        sequence.blocks += cached + self.pool.allocate(needed)
        sequence.num_computed = sequence.num_computed or len(cached) * self.config.block_size
        self._restore(step, sequence)
        sequence.row = self._free_rows.pop()
        sequence.resumes = True
        self._running.add(sequence, self.policy.order.key(sequence, step.now))
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
        step.admitted.append(sequence)
        step.chunks[sequence.number] = (sequence, self._chunk(sequence, count, tuple(sequence.blocks)))
        step.budget -= count

    def _restore(self, step: Step, sequence: Sequence) -> None:
        """Bring what was moved to the host tier back, into the first blocks."""
        pairs = zip(sequence.host_blocks, sequence.blocks, strict=False)
        step.moves += [Move("from_host", source, target) for source, target in pairs]
        self.counters.num_moved_blocks += len(sequence.host_blocks)
        self.host_pool.release(sequence.host_blocks)
        sequence.host_blocks = []

    def _close(self, step: Step) -> StepPlan:
        """The finished plan; from here on its tokens count as computed and what it samples as known to exist."""
        counters = self.counters
        for sequence, chunk in step.chunks.values():
            start, end = chunk.start, chunk.start + chunk.count
            sequence.num_in_flight += 1
            sequence.num_computed = end
            sequence.num_pending += chunk.sample
            if start < sequence.peak_computed:
                counters.num_recomputed_tokens += min(end, sequence.peak_computed) - start
            if end > sequence.peak_computed:
                sequence.peak_computed = end
            if sequence.followers and not self._is_behind(sequence):
                self._release_followers(sequence, step.now)
        plan = StepPlan(
            step=self._step,
            closed=tuple(step.closed),
            opened=tuple(step.opened),
            chunks=tuple([chunk for _, chunk in step.chunks.values()]),
            moves=tuple(step.moves),
            padding=step.padding,
            wake_at=None if step.chunks or step.padding else step.wake_at,
        )
        self._step += 1
        if plan.chunks or plan.padding:
            self._in_flight[plan.step] = list(step.chunks.values())
            self._planned_at[plan.step] = step.now
            counters.num_steps += 1
            counters.num_scheduled_tokens += self.config.max_num_batched_tokens - step.budget
            counters.num_padding_tokens += plan.padding
        elif plan.wake_at is None:
            progress = self._in_flight or self._outbox or step.evicted or not self._sequences
            assert progress, f"{len(self._sequences)} unfinished requests, and none can ever be planned"
        return plan

    def _chunk_size(
        self, sequence: Sequence, remaining: int, budget: int, action: Continue | Admit, served: int = 0
    ) -> int:
        """Tokens to compute now, beside those served; 0 when what must stay whole does not fit any more."""
        if action.whole or not self.config.enable_chunked_prefill:
            return remaining if remaining <= budget else 0
        count = min(remaining, budget)
        for limit in (self.config.long_prefill_token_threshold, action.max_chunk):
            if limit:
                count = min(count, max(0, limit - served))
        return count if action.size is None else min(count, action.size(sequence, remaining, budget))

    def _chunk(self, sequence: Sequence, count: int, blocks: tuple[int, ...]) -> Chunk:
        assert sequence.row is not None, "only a sequence with a row computes"
        start = sequence.num_computed
        end = start + count
        sample = end == len(sequence.tokens) + sequence.num_pending
        num_logits = 1 if sample else 0
        if start < sequence.num_prompt - 1 and sequence.request.params.prompt_logprobs is not None:
            first = max(start, sequence.num_scored)
            if first < min(end, sequence.num_prompt - 1):
                num_logits = end - first
        return Chunk(
            row=sequence.row, start=start, count=count, num_logits=num_logits, sample=sample, new_blocks=blocks
        )

    def _match(self, sequence: Sequence) -> list[int]:
        """Its leader's or cached blocks that it can start from: whole ones, never all of its tokens."""
        config = self.config
        if sequence.request.params.prompt_logprobs is not None:
            return []
        if sequence.blocks or sequence.host_blocks:
            return []  # it has kept what it computed
        leader = self._sequences.get(sequence.request.leader)
        if leader is not None and (shared := self._shared_blocks(leader, sequence)):
            return shared
        if not config.enable_prefix_caching:
            return []
        usable = min(len(sequence.tokens) - 1, sequence.max_cached) // config.block_size
        return self.pool.match(sequence.keys(usable, config.block_size), sequence.tokens, sequence.salt)

    def _enter_scope(self, sequence: Sequence, scope: Scope) -> None:
        """From now on it shares content with those under the same name only; what it has computed stays as it is."""
        if sequence.blocks or sequence.host_blocks:
            return
        salt = root_key(f"{sequence.request.cache_salt}/{scope.name}")
        if salt != sequence.salt:
            sequence.salt = sequence.content = salt
            sequence.chain = []
        sequence.max_cached = scope.max_tokens

    def _enter(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """First admission. What a sequence finds of itself after a preemption is no hit and no second entry.

        A prompt that several requests share counts once.
        """
        sequence.admitted = now
        sequence.num_cached = min(num_cached, sequence.num_prompt - 1)
        if sequence.request.leader:
            return
        self.counters.num_prompt_tokens += sequence.num_prompt
        self.counters.prefix_cache_queries += sequence.num_prompt
        self.counters.prefix_cache_hits += sequence.num_cached

    def _grow(self, step: Step, sequence: Sequence, length: int) -> tuple[int, ...] | None:
        """Blocks to append so that ``length`` tokens fit; the policy finds some when none are free. None: not now."""
        needed = self._blocks_for(length) - len(sequence.blocks)
        while needed > self.pool.num_free:
            relief = self.policy.eviction.relieve(step, sequence, needed - self.pool.num_free)
            if relief is None:
                return None
            if isinstance(relief, Failure):
                self._finish(sequence, FinishReason.ERROR, step.now, message=relief.message)
                return None
            if relief.sequence.num_in_flight:
                return None  # in-flight rule: blocks that a submitted step refers to stay where they are
            if relief.sequence is sequence and len(self._running) == 1:
                if self.pool.num_used == len(sequence.blocks):
                    self._finish(sequence, FinishReason.LENGTH, step.now)  # it has the whole pool already
                    return None
                if not self._reclaim(step):
                    return None  # a finished sequence's last step is in flight; its blocks come back with it
            elif not self._evict(step, relief) or relief.sequence is sequence:
                return None
        if needed <= 0:
            return ()
        blocks = self.pool.allocate(needed)
        sequence.blocks += blocks
        return tuple(blocks)

    def _reclaim(self, step: Step) -> bool:
        """Take what the last of the waiting has kept."""
        keepers = [sequence for sequence in self._waiting if sequence.blocks]
        return bool(keepers) and self._evict(step, Victim(sequence=keepers[-1]))

    def _evict(self, step: Step, victim: Victim) -> bool:
        """Take memory from a sequence, which goes on waiting. False where a submitted step refers to it."""
        sequence = victim.sequence
        if sequence.num_in_flight or sequence.finished:
            return False
        if sequence.row is not None:
            step.remove(sequence)
            step.closed.append(sequence.row)
            self._free_rows.append(sequence.row)
            sequence.row = None
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        freed = victim.freed
        if freed is Freed.HOST and len(sequence.blocks) <= self.host_pool.num_free:
            self._move_out(step, sequence)
        elif freed is Freed.TAIL and victim.num_blocks < len(sequence.blocks):
            self._cut(sequence, len(sequence.blocks) - victim.num_blocks)
        else:
            self._release(sequence)
            sequence.num_computed = 0
        if victim.requeue is Requeue.BACK:
            sequence.rank = self._arrivals
            self._arrivals += 1
            sequence.resumes = False
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        step.evicted.append(sequence)
        self._waiting.add(sequence, self.policy.order.key(sequence, step.now))
        return True

    def _move_out(self, step: Step, sequence: Sequence) -> None:
        """Copy computed blocks to the host tier; the copies run before anything of this step computes."""
        used = self._blocks_for(sequence.num_computed)
        sequence.host_blocks = self.host_pool.allocate(used)
        pairs = zip(sequence.blocks, sequence.host_blocks, strict=False)
        step.moves += [Move("to_host", source, target) for source, target in pairs]
        self.counters.num_moved_blocks += used
        self._release(sequence)

    def _cut(self, sequence: Sequence, num_blocks: int) -> None:
        """Keep the first blocks only."""
        self.pool.release(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]
        sequence.num_computed = min(sequence.num_computed, num_blocks * self.config.block_size)
        while sequence.num_published > num_blocks:
            sequence.num_published -= 1
            if isinstance(sequence.content, Content):
                sequence.content = sequence.content.parent

    # ---- taking results in ----

    def _take(self, sequence: Sequence, chunk: Chunk, row: RowResult, now: float, outlet: list[Delta]) -> None:
        """Append new tokens, publish full blocks, find out whether it ends, tell the news."""
        end = chunk.start + chunk.count
        tokens, logprobs = row.tokens, row.logprobs
        index = output = len(sequence.tokens) - sequence.num_prompt
        finish = None
        for token in tokens:
            sequence.tokens.append(token)
            output += 1
            if token in sequence.stop_ids and output > sequence.request.params.min_tokens:
                finish = FinishReason.STOP
                break
            if output >= sequence.max_output:
                finish = FinishReason.LENGTH
                break
        if row.finish is not None and output - index == len(tokens):
            finish = row.finish
        if finish is not None:  # what comes behind the end does not count
            tokens, logprobs = tokens[: output - index], logprobs[: output - index]
        self.counters.num_generated_tokens += output - index
        if end >= (sequence.num_published + 1) * self.config.block_size and self.config.enable_prefix_caching:
            self._publish(sequence, end)
        scores = self._new_scores(sequence, chunk, row) if row.prompt_logprobs else ()
        if tokens or scores or finish is not None:
            outlet.append(
                Delta(
                    request_id=sequence.request.request_id,
                    time=now,
                    index=index,
                    tokens=tokens,
                    logprobs=logprobs,
                    prompt_logprobs=scores,
                    finish=finish,
                    message=row.message,
                    cached_tokens=sequence.num_cached,
                    admitted=sequence.admitted,
                )
            )
        if finish is not None:
            self._leave(sequence, now)

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Offer blocks that are full of computed tokens to the prefix cache."""
        size = self.config.block_size
        full = end // size
        if sequence.content is None or full <= sequence.num_published:
            return
        for key in sequence.keys(full, size, sequence.num_published):
            i = sequence.num_published
            tokens = tuple(sequence.tokens[i * size : (i + 1) * size])
            sequence.content = self.pool.publish(sequence.blocks[i], sequence.content, key, tokens)
            sequence.num_published += 1
            if sequence.content is None:
                return

    def _new_scores(self, sequence: Sequence, chunk: Chunk, row: RowResult) -> tuple[Logprob, ...]:
        """Log-probabilities of prompt tokens that were not delivered before (a recompute yields them again)."""
        first = chunk.start + chunk.count - chunk.num_logits
        scores = row.prompt_logprobs[sequence.num_scored - first : sequence.num_prompt - 1 - first]
        sequence.num_scored += len(scores)
        return scores

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float, *, message: str = "") -> None:
        """End a request from outside a result."""
        self._tell(sequence, now, reason, message)
        self._leave(sequence, now)

    def _leave(self, sequence: Sequence, now: float) -> None:
        """It has ended: its memory comes back as soon as no submitted step refers to it."""
        sequence.finished = True
        del self._sequences[sequence.request.request_id]
        leader = self._sequences.get(sequence.request.leader)
        if leader is not None and sequence in leader.followers:
            leader.followers.remove(sequence)
        else:
            (self._waiting if sequence.row is None else self._running).remove(sequence)
        self._release_followers(sequence, now)
        self._vacate(sequence)
        for observer in self.policy.observers:
            observer.finished(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self._release(sequence)
        self.host_pool.release(sequence.host_blocks)
        sequence.host_blocks = []
        if sequence.row is not None:
            self._closing.append(sequence.row)
            sequence.row = None

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_published = 0
        sequence.content = sequence.salt

    def _tell(self, sequence: Sequence, now: float, finish: FinishReason, message: str) -> None:
        """The end of a request from outside a result."""
        held = self.policy.delivery == "batch" and sequence.admitted is not None
        (self._held if held else self._outbox).append(
            Delta(
                request_id=sequence.request.request_id,
                time=now,
                index=sequence.num_output,
                finish=finish,
                message=message,
                cached_tokens=sequence.num_cached,
                admitted=sequence.admitted,
            )
        )
