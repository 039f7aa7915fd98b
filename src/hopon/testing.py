"""Fakes that ship with the package: an executor made of integers, and scripted arrivals on a virtual clock.

They let the scheduler, the engine and everything above them be tested without a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hopon.core.clock import VirtualClock
from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import Command
from hopon.core.plan import Chunk, Deployment, OpenRow, Report, RowResult, StepPlan, StepResult
from hopon.core.types import Logprob


class Finished:
    """The handle of a step that was computed when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """The result, at once."""
        return self._result


@dataclass(slots=True)
class _Row:
    opened: OpenRow
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    written: int = 0


class LedgerExecutor:
    """A device made of integers: it stores (token, position) in block slots and reads contexts back through them.

    The next token is a hash of everything that the block table yields, so a token that was written into somebody
    else's block, never written, or read from the wrong place changes the output. Blocks start out poisoned.

    Args:
        num_blocks: pool size.
        block_size: tokens per block.
        num_host_blocks: size of the host tier.
        vocab_size: tokens are in [0, vocab_size).
        stop_token: emitted where the hash says so, about once in ``stop_every`` tokens; None for never.
        stop_every: mean distance between stop tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        vocab_size: int = 1000,
        stop_token: int | None = None,
        stop_every: int = 20,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.stop_token = stop_token
        self.stop_every = stop_every
        self.num_steps = 0
        self._slots: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self._rows: dict[int, _Row] = {}

    def submit(self, plan: StepPlan) -> Finished:
        """Compute a step."""
        self.num_steps += 1
        for row in plan.closed:
            del self._rows[row]
        for move in plan.moves:
            source = self._host if move.kind == "from_host" else self._slots
            target = self._host if move.kind == "to_host" else self._slots
            target[move.target] = list(source[move.source])
        for opened in plan.opened:
            assert opened.row not in self._rows, f"row {opened.row} is opened twice"
            self._rows[opened.row] = _Row(opened, [*opened.prompt, *opened.output])
        # Everybody writes before anybody reads, as rows of one batch do.
        for chunk in plan.chunks:
            self._write(chunk)
        return Finished(StepResult(tuple(self._read(chunk) for chunk in plan.chunks)))

    def close(self) -> None:
        """Nothing to release."""

    def _write(self, chunk: Chunk) -> None:
        row = self._rows[chunk.row]
        row.blocks.extend(chunk.new_blocks)
        if row.written == 0:
            row.written = chunk.start  # a prefix hit: somebody else wrote what lies before
        assert chunk.start == row.written, f"row {chunk.row} computes from {chunk.start}, but {row.written} are written"
        assert chunk.count >= 1, "a chunk has at least one token"
        for position in range(chunk.start, chunk.start + chunk.count):
            block = row.blocks[position // self.block_size]
            self._slots[block][position % self.block_size] = (row.tokens[position], position)
        row.written = chunk.start + chunk.count

    def _read(self, chunk: Chunk) -> RowResult:
        row = self._rows[chunk.row]
        end = chunk.start + chunk.count
        scores = []
        for position in range(end - chunk.num_logits, end - chunk.sample):
            target = row.tokens[position + 1]
            scores.append(Logprob(target, self._score(row, position, target)))
        if not chunk.sample:
            return RowResult(chunk.row, prompt_logprobs=tuple(scores))
        assert end == len(row.tokens), f"row {chunk.row} samples behind {end} of its {len(row.tokens)} tokens"
        opened = row.opened
        index = end - len(opened.prompt)
        number = self._hash(row, end, (opened.seed, opened.choice, index) if opened.params.temperature > 0 else ())
        if self.stop_token is not None and (number >> 32) % self.stop_every == 0:
            token = self.stop_token
        else:
            token = number % self.vocab_size
        if index < opened.params.min_tokens and token in opened.stop_token_ids:
            token = next(t for t in range(self.vocab_size) if t not in opened.stop_token_ids)
        row.tokens.append(token)
        wanted = opened.params.logprobs is not None
        logprobs = (Logprob(token, self._score(row, end - 1, token)),) if wanted else ()
        return RowResult(chunk.row, (token,), logprobs, tuple(scores))

    def _hash(self, row: _Row, length: int, extra: tuple[int, ...] = ()) -> int:
        digest = hashlib.blake2b(digest_size=8)
        for position in range(length):
            entry = self._slots[row.blocks[position // self.block_size]][position % self.block_size]
            digest.update(repr(entry).encode())
        digest.update(repr(extra).encode())
        return int.from_bytes(digest.digest(), "little")

    def _score(self, row: _Row, position: int, token: int) -> float:
        return -(self._hash(row, position + 1, (token,)) % 1000) / 100


def load_ledger(options: EngineOptions, report: Report) -> Deployment:
    """Executor factory of a :class:`LedgerExecutor`; its "model" is a vocabulary size."""
    report("building a ledger", 1.0)
    num_blocks = options.num_kv_blocks or 1024
    vocab_size = int(options.model) if options.model.isdigit() else 1000
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or min(2048, num_blocks * options.block_size),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
    )
    executor = LedgerExecutor(num_blocks, options.block_size, vocab_size=vocab_size)
    return Deployment(executor=executor, config=config, summary={"dtype": "ledger"})


class ScriptedInbox:
    """Commands at given times on a virtual clock; waiting moves the clock."""

    def __init__(self, clock: VirtualClock, events: Sequence[tuple[float, Command]]) -> None:
        self._clock = clock
        self._events = sorted(events, key=lambda event: event[0])
        self._next = 0

    def drain(self, timeout: float | None) -> list[Command]:
        """Everything due by now, after waiting for the next event where allowed."""
        now = self._clock.now()
        due = self._due(now)
        if due or timeout == 0.0:
            return due
        upcoming = self._events[self._next][0] if self._next < len(self._events) else None
        moments = [m for m in (upcoming, None if timeout is None else now + timeout) if m is not None]
        assert moments, "the script is over, the engine has nothing to do, and no Shutdown is in it"
        self._clock.advance_to(min(moments))
        return self._due(self._clock.now())

    def _due(self, now: float) -> list[Command]:
        first = self._next
        while self._next < len(self._events) and self._events[self._next][0] <= now:
            self._next += 1
        return [command for _, command in self._events[first : self._next]]
