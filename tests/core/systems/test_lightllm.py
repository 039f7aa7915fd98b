"""LightLLM: the foreseen peak, three kinds of steps, pausing, and what prediction may and may not know."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.lightllm import LightLlm, LightLlmMixed, LightLlmSplitFuse, OutputLength, peak_tokens
from hopon.core.sequence import Sequence
from hopon.core.types import FinishReason
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces

PRESETS = (LightLlm, LightLlmMixed, LightLlmSplitFuse)


def test_the_documented_example_peaks_at_31() -> None:
    """The moments before each of five ends hold 9, 15, 23, 25 and 31 tokens, in whatever order they are given."""
    demands = [(5, 4), (4, 3), (5, 3), (3, 2), (4, 2)]
    assert [peak_tokens(demands[:n]) for n in range(1, 6)] == [9, 15, 23, 25, 31]
    assert peak_tokens(reversed(demands)) == 31
    assert peak_tokens([]) == 0


def test_an_oracle_starts_whoever_fits_at_the_worst_moment() -> None:
    """Two of (5 tokens, 4 to come) and a third of (3, 2) peak at 8 + 10 = 18 just before the long ones end, or at
    2 * 3 + 13 = 19 before the short one does: it starts in a pool of 20 and not in one of 19."""
    for num_blocks, third in ((20, ["a", "b", "c"]), (19, ["a", "b"])):
        asked = [request("a", 5, max_tokens=5), request("b", 5, max_tokens=5), request("c", 3, max_tokens=3)]
        h = harness(LightLlm(oracle=True), num_blocks, enable_prefix_caching=False)
        h.add(*asked)
        table = Table(h, *asked)
        assert [name for name, _, _ in table.step()] == third
        h.run()
        assert h.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            LightLlm(),
            [
                [("a", 0, 3)],
                [("b", 0, 4)],  # a prompt that comes while a decodes goes first, alone, in pieces of half a budget
                [("b", 4, 2)],
                [("a", 3, 1), ("b", 6, 1)],
                [("a", 4, 1)],
            ],
        ),
        (
            LightLlm(aggressive=False),
            [
                [("a", 0, 3)],
                [("a", 3, 1)],  # one decode step after each prefill step
                [("b", 0, 4)],
                [("a", 4, 1)],
                [("b", 4, 2)],
                [("b", 6, 1)],
            ],
        ),
        (
            LightLlmMixed(),
            [
                [("a", 0, 3)],
                [("a", 3, 1), ("b", 0, 4)],
                [("a", 4, 1), ("b", 4, 2)],
                [("b", 6, 1)],
            ],
        ),
        (
            LightLlmSplitFuse(splitfuse_block_size=2),
            [
                [("a", 0, 2)],
                [("b", 0, 2), ("a", 2, 1)],
                [("a", 3, 1), ("b", 2, 2)],
                [("a", 4, 1), ("b", 4, 2)],
                [("b", 6, 1)],
            ],
        ),
    ],
)
def test_steps(preset: LightLlm, expected: list[list[tuple[str, int, int]]]) -> None:
    """Worked by hand: budget 8; a (3 tokens, 3 to generate) comes first, b (6, 2) a step later."""
    a, b = request("a", 3, max_tokens=3), request("b", 6, max_tokens=2)
    h = harness(preset, 100, max_num_batched_tokens=8)
    table = Table(h, a, b)
    h.add(a)
    first = table.step()
    h.add(b)
    assert [sorted(rows) for rows in [first, *table.finish()]] == [sorted(rows) for rows in expected]


def test_an_output_that_outgrows_its_prediction_pauses() -> None:
    """Worked by hand: a pool of 160, two requests of 10 + 140 tokens that are believed to come to 64.

    With t tokens out, a holds 11 + t and is believed to need 81 - t more (64 - t - 1, 2 steps for the next piece, 16
    to be safe), b 11 and 81: the peak 184 - t is below 160 from t = 25 on, after step 25. From step 27 on both decode;
    step 84 takes the last two tokens. In step 85 neither finds one and both pause; a's 93 tokens fit, b's 69 do not
    fit beside them. b tries again in step 100 (54 tokens are free) and once a has ended, after step 142.
    """
    a, b = request("a", 10, max_tokens=140), request("b", 10, max_tokens=140)
    h = harness(
        LightLlm(router_token_ratio=1.0, initial_output_len=64),
        160,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    h.add(a, b)
    steps = [[], *Table(h, a, b).finish()]
    assert steps[1] == [("a", 0, 10)]
    assert steps[25] == [("a", 33, 1)]
    assert steps[26] == [("b", 0, 10)]
    assert steps[27] == [("a", 34, 1), ("b", 10, 1)]
    assert steps[84] == [("a", 91, 1), ("b", 67, 1)]
    assert steps[85] == [("a", 0, 64)]
    assert steps[86] == [("a", 64, 29)]
    assert steps[100] == [("a", 106, 1)]
    assert steps[142] == [("a", 148, 1)]
    assert steps[143] == [("b", 0, 64)]
    assert steps[144] == [("b", 64, 5)]
    assert len(steps) == 1 + 144 + 80
    assert h.scheduler.counters.num_preemptions == 2
    assert h.scheduler.counters.num_recomputed_tokens == 160


def test_busy_believes_in_max_tokens() -> None:
    """With the ratio at 0 the same two run one after the other."""
    a, b = request("a", 10, max_tokens=140), request("b", 10, max_tokens=140)
    h = harness(LightLlm(initial_output_len=64), 160, max_num_batched_tokens=128)
    h.add(a, b)
    h.run()
    assert h.scheduler.counters.num_preemptions == 0


def test_the_average_settles() -> None:
    """It starts at 2048, takes half of the first surprise, ever less of later ones, and never falls below 64."""
    lengths = OutputLength(2048)
    assert lengths.value == 2048
    sequence = Sequence(request("a", 5), 0, 8)
    lengths.finished(sequence)
    assert lengths.value == 2048, "one that never ran teaches nothing"
    sequence.admitted = 0.0
    sequence.tokens += [1] * 100
    lengths.finished(sequence)
    assert lengths.value == 1074  # (2048 + 100) / 2
    lengths.finished(sequence)
    assert lengths.value == 684  # 1074 - 0.4 * 974
    del sequence.tokens[5:]
    for _ in range(200):
        lengths.finished(sequence)
    assert lengths.value == 64


def test_alone_it_may_fill_the_pool() -> None:
    """A request whose max_tokens exceeds the pool starts when nobody else runs, and ends with what fits."""
    h = harness(LightLlm(), 20)
    h.add(request("a", 5, max_tokens=100), request("b", 5, max_tokens=2))
    h.run()
    assert h.reason("a") is FinishReason.LENGTH
    assert len(h.outputs["a"]) == 20 - 5 + 1
    assert len(h.outputs["b"]) == 2


def test_oracles_never_pause() -> None:
    """With true lengths, whole prompts and nothing in flight nobody ever pauses."""
    changes = {"block_size": 1, "max_num_batched_tokens": 200}
    run = run_traces(
        60, lambda seed: LightLlm(oracle=True, chunked_prefill_size=200), changes=changes, depths=(1,), aborts=False
    )
    assert sum(h.scheduler.counters.num_preemptions for h in run) == 0


@pytest.mark.parametrize("kind", PRESETS)
def test_random_traces(kind: type[LightLlm]) -> None:
    """Everybody ends once and everything comes back; the paused resume in every hundredth step, or when nobody runs."""

    def watch(h: Harness, plan: StepPlan) -> None:
        resumed = [opened.row for opened in plan.opened if opened.output]
        if resumed and len(h.plans) % 100:
            opened = {one.row for one in plan.opened}
            assert {chunk.row for chunk in plan.chunks} <= opened
            assert set(h.rows) - opened <= set(h.scheduler._closing)

    run_traces(60, lambda seed: kind(router_token_ratio=seed % 3 / 2))
    changes = {
        "max_model_len": 300,
        "num_blocks": 150,
        "block_size": 1,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 40,
    }
    run = run_traces(
        15,
        lambda seed: kind(router_token_ratio=1.0, initial_output_len=64),
        changes=changes,
        watch=watch,
        depths=(1,),
    )
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 0


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match=r"router_token_ratio must be in \[0, 1\], got 1.5"):
        LightLlm(router_token_ratio=1.5)
    with pytest.raises(ValueError, match="splitfuse_block_size must be at least 1, got 0"):
        LightLlmSplitFuse(splitfuse_block_size=0)
