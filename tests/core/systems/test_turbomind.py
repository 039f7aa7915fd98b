"""TurboMind: age decides whose memory is taken; the inactive keep the rest and compute only what was taken."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.turbomind import TurboMind
from tests.core.harness import Harness, config, request
from tests.core.systems.runs import Table, harness, run_traces


def test_the_inactive_lose_their_tail_token_by_token() -> None:
    """Worked by hand: pool 13, two of 4 + 8. In step 4 the last token goes to a, and b is inactive with 6. Each later
    step of a takes one of b's; when a ends, b has 2 left and computes the other 5."""
    a, b = request("a", 4, max_tokens=8), request("b", 4, max_tokens=8)
    h = harness(TurboMind(), 13, enable_prefix_caching=False)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1), ("b", 5, 1)],
        *([("a", start, 1)] for start in range(6, 11)),
        [("b", 2, 5)],
        *([("b", start, 1)] for start in range(7, 11)),
    ]
    assert h.scheduler.counters.num_recomputed_tokens == 4


def test_age_decides() -> None:
    """Pool 14, three of 4 tokens. c, the youngest, is inactive in step 2 and loses 2 tokens in step 3 and the rest in
    step 4. In step 5 nothing is left but b's tail. a ends; b computes its 2 missing tokens, c all of its 5. With 8 + 5
    of 14 tokens taken, step 7 has one for b only."""
    a, b, c = request("a", 4, max_tokens=5), request("b", 4, max_tokens=6), request("c", 4, max_tokens=3)
    h = harness(TurboMind(), 14, enable_prefix_caching=False)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 4), ("b", 0, 4), ("c", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1), ("b", 5, 1)],
        [("a", 6, 1), ("b", 6, 1)],
        [("a", 7, 1)],
        [("b", 6, 2), ("c", 0, 5)],
        [("b", 8, 1)],
        [("c", 5, 1)],
    ]


def test_newcomers_stand_behind_the_inactive() -> None:
    """Pool 21, four of 6 tokens. In steps 3 and 4 a and b take 4 tokens of c; then both have ended, and c computes
    them again before d starts."""
    asked = [request(name, 6, max_tokens=4) for name in "abcd"]
    h = harness(TurboMind(), 21, enable_prefix_caching=False)
    h.add(*asked)
    steps = Table(h, *asked).finish()
    assert steps[0] == [("a", 0, 6), ("b", 0, 6), ("c", 0, 6)]
    assert steps[1] == [("a", 6, 1), ("b", 6, 1), ("c", 6, 1)]
    assert steps[2] == [("a", 7, 1), ("b", 7, 1)]
    assert steps[3] == [("a", 8, 1), ("b", 8, 1)]
    assert steps[4] == [("c", 3, 5), ("d", 0, 6)]
    assert steps[5] == [("c", 8, 1), ("d", 6, 1)]
    assert h.scheduler.counters.num_recomputed_tokens == 4


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (TurboMind(), [[("a", 0, 9)]]),
        (TurboMind(max_prefill_iters=2), [[("a", 0, 5)], [("a", 5, 4)]]),
        (TurboMind(max_prefill_iters=4), [[("a", 0, 3)], [("a", 3, 3)], [("a", 6, 3)]]),
        (TurboMind(max_prefill_iters=4, num_tokens_per_iter=7), [[("a", 0, 7)], [("a", 7, 2)]]),
    ],
)
def test_prompts_are_spread(preset: TurboMind, expected: list[list[tuple[str, int, int]]]) -> None:
    """A prompt of 9: 8 tokens beyond its first are shared out, and every candidate has one more; the largest share of
    the last steps counts."""
    a = request("a", 9, max_tokens=1)
    h = harness(preset, 100)
    h.add(a)
    assert Table(h, a).finish() == expected


def test_random_traces() -> None:
    """The oldest never loses memory, and in every step the sequences with a row are the oldest of those accepted."""
    oldest: dict[str, int] = {}

    def watch(h: Harness, plan: StepPlan) -> None:
        if len(h.plans) == 1:
            oldest.clear()
        sequences = list(h.scheduler._sequences.items())
        for name, sequence in sequences[:1]:
            assert sequence.num_preemptions == oldest.setdefault(name, sequence.num_preemptions)
        active = [sequence.row is not None for _, sequence in sequences if sequence.admitted is not None]
        assert active == sorted(active, reverse=True), "an inactive sequence is older than an active one"

    run = run_traces(100, lambda seed: TurboMind(max_prefill_iters=1 + seed % 3), watch=watch, depths=(1,))
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 100
    run_traces(60, lambda seed: TurboMind())


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="max_prefill_iters must be at least 1, got 0"):
        TurboMind(max_prefill_iters=0)
    with pytest.raises(ValueError, match="max_prefill_iters 2 cuts prompts"):
        TurboMind(max_prefill_iters=2).policy(config(enable_chunked_prefill=False, max_num_batched_tokens=1024))
