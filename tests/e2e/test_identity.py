"""On the real engine, a request's tokens and log-probabilities never depend on who shares its batch.

Random schedules (mates, arrivals, aborts, chunk and block sizes, prefix hits, tiny pools, threads) of a small random
model, for every dtype and every instruction level, against each request alone; and of SmolLM2 for every dtype. Mutated
kernels show that the schedules can tell.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hopon import native
from hopon.core.clock import VirtualClock
from hopon.core.config import EngineOptions
from hopon.core.engine import Abort, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import Executor, StepHandle, StepPlan
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Logprob, Request, SamplingParams
from hopon.model.cpu import load
from hopon.native.build import SOURCES, build
from hopon.testing import ScriptedInbox
from tests.model.files import tiny_config, write_folder
from tests.model.reference import random_checkpoint

VOCAB = 130
LENGTH = 700  # beyond two splits of 256
DTYPES = ("f32", "bf16", "q8", "q4")


class SecondPerStep:
    """An executor that takes a second of virtual time per step."""

    def __init__(self, inner: Executor, clock: VirtualClock) -> None:
        self._inner = inner
        self._clock = clock

    def submit(self, plan: StepPlan) -> StepHandle:
        self._clock.advance_to(self._clock.now() + 1.0)
        return self._inner.submit(plan)

    def close(self) -> None:
        self._inner.close()


Answer = tuple[tuple[int, ...], tuple[Logprob, ...], tuple[Logprob, ...], FinishReason]


def serve(options: EngineOptions, events: list[tuple[float, Command]]) -> tuple[dict[str, Answer], EngineStats]:
    """Run the engine over scripted arrivals; the answer of each request, and the last statistics."""
    deployment = load(options, lambda what, share: None)
    clock = VirtualClock()
    engine = Engine(Scheduler(deployment.config), SecondPerStep(deployment.executor, clock), clock=clock)
    heard: dict[str, list[Delta]] = {}

    def emit(news: object, stats: EngineStats) -> None:
        assert isinstance(news, list)
        for delta in news:
            heard.setdefault(delta.request_id, []).append(delta)

    engine.run(ScriptedInbox(clock, [*events, (1e9, Shutdown())]), emit)
    deployment.executor.close()
    assert engine.scheduler.pool.num_free == deployment.config.num_blocks
    answers = {}
    for name, deltas in heard.items():
        reason = deltas[-1].finish
        assert reason is not None, f"{name} did not end"
        answers[name] = (
            tuple(token for d in deltas for token in d.tokens),
            tuple(logprob for d in deltas for logprob in d.logprobs),
            tuple(logprob for d in deltas for logprob in d.prompt_logprobs),
            reason,
        )
    return answers, engine.stats()


def make_requests(
    rng: random.Random, count: int, vocab: int = VOCAB, longest: int = 560, outputs: Sequence[int] = (1, 60, 100, 100)
) -> list[Request]:
    stem = tuple(rng.randrange(3, vocab) for _ in range(300))
    requests = []
    for i in range(count):
        own = rng.choice([1, rng.randint(2, 60), rng.randint(longest // 2, longest) if i % 5 == 0 else 33])
        shared = rng.choice([0, 0, 130, 260]) if own < 100 else 0
        requests.append(
            Request(
                request_id=str(i),
                prompt=(*stem[: min(shared, longest - own)], *(rng.randrange(3, vocab) for _ in range(own))),
                seed=rng.getrandbits(64),
                stop_token_ids=(2,),
                params=SamplingParams(
                    temperature=rng.choice([0.0, 0.7, 1.5]),
                    top_k=rng.choice([0, 0, 20]),
                    top_p=rng.choice([1.0, 0.8]),
                    min_p=rng.choice([0.0, 0.02]),
                    max_tokens=rng.choice(outputs),
                    logprobs=3,
                    prompt_logprobs=rng.choice([None, None, 1]),
                ),
            )
        )
    return requests


def alone(options: EngineOptions, requests: list[Request]) -> dict[str, Answer]:
    """Each request by itself: one at a time, whole prompt, one thread, no prefix cache."""
    single = replace(
        options,
        threads=1,
        max_num_seqs=1,
        max_num_batched_tokens=LENGTH,
        enable_prefix_caching=False,
        num_kv_blocks=None,
    )
    answers: dict[str, Answer] = {}
    far_apart: list[tuple[float, Command]] = [(1000.0 * i, request) for i, request in enumerate(requests)]
    answers, stats = serve(single, far_apart)
    assert stats.num_preemptions == 0
    return answers


def crowd(
    rng: random.Random, options: EngineOptions, requests: list[Request], *, tight: bool
) -> tuple[dict[str, Answer], set[str], EngineStats]:
    """All of them together, in a random deployment: with a pool for one long request that preempts again and again, or
    with prefix hits. Returns answers, the aborted ones, statistics."""
    size = rng.choice([1, 16] if tight else [1, 16, 128])
    deployed = replace(
        options,
        threads=rng.choice([1, 2]),
        block_size=size,
        num_kv_blocks=-(-(LENGTH if tight else 8 * LENGTH) // size),
        max_num_seqs=rng.choice([12, 20]) if tight else rng.choice([3, 12, 20]),
        max_num_batched_tokens=rng.choice([20, 64, 300]),
        long_prefill_token_threshold=rng.choice([0, 0, 7]),
        enable_prefix_caching=not tight,
    )
    gone = {request.request_id for request in requests if rng.random() < 0.1}
    arrivals = [rng.choice([0.0, 0.0, rng.uniform(0, 80)]) for _ in requests]
    events: list[tuple[float, Command]] = list(zip(arrivals, requests, strict=True))
    events += [(rng.uniform(0, 120), Abort(name)) for name in sorted(gone)]
    answers, stats = serve(deployed, events)
    return answers, gone, stats


def differing(expected: dict[str, Answer], answers: dict[str, Answer], gone: set[str]) -> list[str]:
    """Names of requests that got something else than alone; an aborted one may stop early."""
    wrong = []
    for name, answer in answers.items():
        right = expected[name]
        if answer[3] is FinishReason.ABORT:
            assert name in gone, f"{name} was aborted by nobody"
            n, scored = len(answer[0]), len(answer[2])
            answer, right = answer[:3] + right[3:], (right[0][:n], right[1][:n], right[2][:scored], right[3])
        if answer != right:
            wrong.append(name)
    return wrong


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A random llama: GQA groups of 3, inputs that are no multiple of 32, contexts beyond two splits."""
    folder = tmp_path_factory.mktemp("tiny")
    config = tiny_config(
        hidden_size=104, intermediate_size=176, max_position_embeddings=LENGTH, vocab_size=VOCAB, num_hidden_layers=2
    )
    model = write_folder(folder / "model", config, random_checkpoint(config, seed=3))
    return EngineOptions(model=str(model), max_model_len=LENGTH, cache_dir=str(folder / "cache"))


@pytest.mark.parametrize("level", native.available_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_or_in_any_crowd(tiny: EngineOptions, dtype: str, level: str, effort: Callable[[int, int], int]) -> None:
    """Every dtype on every level: bit-identical tokens, log-probabilities and prompt scores in random schedules."""
    options = replace(tiny, dtype=dtype, level=level)
    preemptions = hits = 0
    for seed in range(effort(2, 40)):
        rng = random.Random(f"{seed} {dtype} {level}")
        requests = make_requests(rng, 24)
        expected = alone(options, requests)
        answers, gone, stats = crowd(rng, options, requests, tight=seed % 2 == 0)
        assert set(answers) | gone == set(expected)
        assert differing(expected, answers, gone) == [], f"schedule {seed} of {dtype} on {level}"
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
    assert preemptions > 0
    assert hits > 0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "auto"])
def test_smollm2_alone_or_in_a_crowd(
    smollm2: Path, dtype: str, tmp_path: Path, effort: Callable[[int, int], int]
) -> None:
    """The real model, one schedule per dtype (``auto`` is the file's own 4-bit precision)."""
    options = EngineOptions(model=str(smollm2), dtype=dtype, max_model_len=LENGTH, cache_dir=str(tmp_path))
    for seed in range(effort(1, 5)):
        rng = random.Random(f"{seed} {dtype}")
        requests = make_requests(rng, 6, vocab=49152, longest=280, outputs=(8, 16))
        expected = alone(options, requests)
        answers, gone, _ = crowd(rng, options, requests, tight=seed % 2 == 0)
        assert differing(expected, answers, gone) == []


MUTANTS = {
    # One chain over k becomes two where a tile has several rows, added at the end: split-K by the number of rows.
    "split K by rows": (
        "linear.h",
        "    for (int k = 0; k < cols; k++, w += BLOCK) {",
        "    f32x16 first_half[R][V];\n"
        "    for (int k = 0; k < cols; k++, w += BLOCK) {\n"
        "      if (R > 1 && k == cols / 2)\n"
        "        unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA {\n"
        "          first_half[r][v] = t[r][v]; t[r][v] = zero(); }); });\n"
        "      if (R > 1 && k == cols - 1)\n"
        "        unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA {\n"
        "          t[r][v] = t[r][v] + first_half[r][v]; }); });",
    ),
    # A row's sum over V is split where the chunk's first row in the same register block ends.
    "split the context at chunk borders": (
        "attention.h",
        "          if (own > common) "
        "output_columns<1>(weight_of + v + q, values, width_, common, own, fresh_of + v + q);",
        "          if (own > common) {\n"
        "            float rest[512] = {}, *to[1] = {rest};\n"
        "            output_columns<1>(weight_of + v + q, values, width_, common, own, to);\n"
        "            for (int i = 0; i < width_; ++i) fresh_of[v + q][i] += rest[i];\n"
        "          }",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, tiny: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose sums depend on the number of rows, or on chunk borders, do not pass the comparison above."""
    file, old, new = MUTANTS[mutant]
    sources = tmp_path / "src"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1, "the mutated line is no longer there: update the mutant"
    (sources / file).write_text(text.replace(old, new))
    level = native.available_levels()[0]
    build(levels=[level], sources=sources, folder=tmp_path)
    monkeypatch.setattr(native, "library_path", lambda level: tmp_path / f"hopon-{level}.so")
    options = replace(tiny, dtype="f32", level=level)
    wrong: list[str] = []
    for seed in range(4):
        rng = random.Random(seed)
        requests = make_requests(rng, 12)
        expected = alone(options, requests)
        answers, gone, _ = crowd(rng, options, requests, tight=seed % 2 == 0)
        wrong += differing(expected, answers, gone)
    assert wrong
