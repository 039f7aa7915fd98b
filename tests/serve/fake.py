"""A model for server tests: its outputs are scripted by the prompt, else pseudo-random.

A prompt that contains ``SCRIPT`` makes it say the tokens behind that marker, one by one, and then an end token. Any
other prompt is continued with ids from a hash of the context, and of the seed where the temperature is not 0. More
markers, among the first four tokens of a prompt, cause trouble. The "model" is a folder with a tokenizer and,
optionally, ``fake.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.plan import Chunk, Deployment, OpenRow, Report, RowResult, StepPlan, StepResult
from hopon.core.types import Logprob

VOCAB = 49152
EOS = 2
SCRIPT = 16  # <empty_output>: a control token that nobody writes by accident
SLOW, RAISE, DIE, HANG = 12, 13, 14, 15  # <jupyter_text> and on


@dataclass(frozen=True)
class Done:
    rows: StepResult

    def result(self) -> StepResult:
        return self.rows


class FakeExecutor:
    def __init__(self, step_time: float) -> None:
        self.step_time = step_time
        self.rows: dict[int, tuple[OpenRow, list[int]]] = {}

    def submit(self, plan: StepPlan) -> Done:
        for row in plan.closed:
            del self.rows[row]
        for opened in plan.opened:
            self.rows[opened.row] = opened, [*opened.prompt, *opened.output]
        if plan.chunks:
            prompts = {token for chunk in plan.chunks for token in self.rows[chunk.row][0].prompt[:4]}
            if RAISE in prompts:
                raise RuntimeError("the model broke")
            if DIE in prompts:
                os._exit(7)
            if HANG in prompts:
                time.sleep(1000)
            time.sleep(max(self.step_time, 0.03 if SLOW in prompts else 0))
        return Done(StepResult(tuple(self._compute(chunk) for chunk in plan.chunks)))

    def close(self) -> None:
        self.rows.clear()

    def _compute(self, chunk: Chunk) -> RowResult:
        opened, tokens = self.rows[chunk.row]
        end = chunk.start + chunk.count
        scores = tuple(self._score(tokens, i, opened) for i in range(end - chunk.num_logits, end - chunk.sample))
        if not chunk.sample:
            return RowResult(chunk.row, prompt_logprobs=scores)
        index = len(tokens) - len(opened.prompt)
        token = self._next(opened, tokens, index)
        if index < opened.params.min_tokens and token in opened.stop_token_ids:
            token = 30  # "."
        tokens.append(token)
        logprobs: tuple[Logprob, ...] = ()
        if opened.params.logprobs is not None:
            likely = [self._hash(tokens, k) % VOCAB for k in range(opened.params.logprobs)]
            tops = [(t, -1.0 - k / 4) for k, t in enumerate(dict.fromkeys(likely))]
            logprobs = (Logprob(token, -5.0, tuple(tops)),)
        return RowResult(chunk.row, (token,), logprobs, scores)

    def _score(self, tokens: list[int], position: int, opened: OpenRow) -> Logprob:
        """Of the token behind a position: minus its id modulo 10; the ids after it are said to be likelier."""
        token = tokens[position + 1]
        tops = [(token + 1 + k, -0.5 - k) for k in range(opened.params.prompt_logprobs or 0)]
        return Logprob(token, -float(token % 10), tuple(tops))

    def _next(self, opened: OpenRow, tokens: list[int], index: int) -> int:
        if SCRIPT in opened.prompt:
            script = opened.prompt[opened.prompt.index(SCRIPT) + 1 :]
            return script[index] if index < len(script) else EOS
        params = opened.params
        greedy = params.temperature == 0 or params.top_k == 1
        return 17 + self._hash(tokens, 0 if greedy else opened.choice << 64 | opened.seed) % (VOCAB - 17)

    @staticmethod
    def _hash(tokens: list[int], extra: int) -> int:
        digest = hashlib.blake2b(repr((tokens, extra)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def load(options: EngineOptions, report: Report) -> Deployment:
    """Executor factory. ``fake.json`` may set ``step_time`` and ``load_time`` (seconds) and ``load_error``."""
    path = Path(options.model) / "fake.json"
    setup = json.loads(path.read_text()) if path.exists() else {}
    report("thinking up a model", 0.0)
    time.sleep(setup.get("load_time", 0.0))
    if "load_error" in setup:
        raise ValueError(setup["load_error"])
    report("thinking up a model", 1.0)
    num_blocks = options.num_kv_blocks or 512
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or 1024,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    return Deployment(executor=FakeExecutor(setup.get("step_time", 0.0)), config=config, summary={"dtype": "fake"})
