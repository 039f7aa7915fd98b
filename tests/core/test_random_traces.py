"""Random traces through the pure scheduler: nothing stalls, leaks or ends twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.scheduler import Scheduler
from hopon.core.sequence import Sequence
from hopon.core.types import FinishReason, Request, SamplingParams
from tests.core.harness import STOP_TOKEN, Harness


def random_config(rng: random.Random) -> SchedulerConfig:
    seats = rng.choice([1, 2, 5, 16])
    max_model_len = rng.choice([24, 80, 300])
    chunked = rng.random() < 0.8
    return SchedulerConfig(
        num_blocks=rng.choice([2, 5, 12, 40, 200]),
        block_size=rng.choice([1, 2, 4, 16, 32]),
        max_model_len=max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice([1, 7, 32, 200]))
        if chunked
        else max_model_len + rng.randrange(50),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 9]),
        enable_prefix_caching=rng.random() < 0.6,
        enable_chunked_prefill=chunked,
    )


def random_request(rng: random.Random, name: str, settings: SchedulerConfig) -> Request:
    length = rng.choice([1, rng.randint(1, 20), rng.randint(1, settings.max_model_len + 5)])
    prompt = tuple(rng.randrange(2) for _ in range(length))  # few tokens, so that prefixes are shared
    max_tokens = rng.choice([None, 1, rng.randint(1, 60)])
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=rng.choice([None, None, None, 0]))
    stops = (STOP_TOKEN,) if rng.random() < 0.7 else ()
    return Request(
        request_id=name, prompt=prompt, params=params, seed=1, priority=rng.choice([0, 0, 1, 9]), stop_token_ids=stops
    )


def run_trace(seed: int) -> Harness:
    rng = random.Random(seed)
    h = Harness.make(random_config(rng), depth=rng.choice([1, 1, 2, 3]), seed=seed)
    names = [str(i) for i in range(rng.randint(1, 25))]
    upcoming = list(names)
    while upcoming or h.scheduler.has_work:
        while upcoming and (rng.random() < 0.4 or not h.scheduler.has_work):
            h.add(random_request(rng, upcoming.pop(0), h.scheduler.config))
        if rng.random() < 0.05:
            h.abort(rng.choice(names))
        h.step()
        assert len(h.plans) < 20_000, "this trace does not end"
    assert sorted(h.finished, key=int) == names, "a request was lost"
    assert h.scheduler.pool.num_free == h.scheduler.pool.num_blocks, "blocks were lost"
    assert len(h.scheduler._free_rows) == h.scheduler.config.max_num_seqs, "seats were lost"
    assert not h.rows, "rows are open after the end"
    for name, delta in h.finished.items():
        if delta.finish is FinishReason.REFUSED:
            assert not h.outputs[name]
        else:
            assert delta.finish is FinishReason.ABORT or h.outputs[name], "an empty success"
    return h


def run_traces(count: int) -> tuple[int, int]:
    """Preemptions and prefix hits of all traces together."""
    preemptions = hits = 0
    for seed in range(count):
        try:
            h = run_trace(seed)
        except AssertionError as error:
            raise AssertionError(f"trace {seed}: {error}") from error
        preemptions += h.scheduler.counters.num_preemptions
        hits += h.scheduler.counters.prefix_cache_hits
    return preemptions, hits


def test_v004_v013_random_traces(effort: Callable[[int, int], int]) -> None:
    """Every step makes progress, budgets hold, blocks and seats are conserved, every request ends exactly once."""
    preemptions, hits = run_traces(effort(1500, 10_000))
    assert preemptions > 500, "traces must be tight enough to preempt"
    assert hits > 1000, "traces must share prefixes"


@pytest.mark.parametrize("mutant", ["leak", "late sample", "double release"])
def test_the_harness_catches_mutants(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above fail on a scheduler that leaks, samples early or releases twice."""
    if mutant == "leak":
        release = Scheduler._release

        def leaky(self: Scheduler, sequence: Sequence) -> None:
            sequence.blocks = sequence.blocks[:-1]
            release(self, sequence)

        monkeypatch.setattr(Scheduler, "_release", leaky)
    elif mutant == "late sample":
        monkeypatch.setattr(
            Sequence, "num_tokens", property(lambda s: len(s.tokens) + s.num_pending - (len(s.tokens) > 9))
        )
    else:
        vacate = Scheduler._vacate

        def twice(self: Scheduler, sequence: Sequence) -> None:
            self.pool.release(sequence.blocks)
            vacate(self, sequence)

        monkeypatch.setattr(Scheduler, "_vacate", twice)
    with pytest.raises((AssertionError, IndexError)):
        run_traces(50)
