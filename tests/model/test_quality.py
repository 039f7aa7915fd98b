"""What each precision costs on SmolLM2, and that the file's own precision is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import compare, score, texts
from hopon.serve.tokenizer import Tokenizer

BOUNDS = {"bf16": (0.001, 0.015), "auto": (0.005, 0.06), "q8": (0.005, 0.06), "q4": (0.005, 0.06)}


def test_every_precision_stays_within_its_bounds(smollm2: Path) -> None:
    """Perplexity and log-probabilities of 2048 tokens of text change by no more than each precision may.

    Fewer tokens would test chance: the perplexity of 512 of them moves by 0.08 % where each log-probability moves by
    0.014.
    """
    sample = Tokenizer.load(smollm2).encode(texts()["sonnet"])[:2048]
    (exact,) = score(smollm2, [sample], dtype="f32")
    assert compare(exact, exact).perplexity == pytest.approx(58.8, rel=0.3)
    for dtype, (perplexity, logprob) in BOUNDS.items():
        (found,) = score(smollm2, [sample], dtype=dtype)
        cost = compare(exact, found)
        assert abs(cost.perplexity_change) < perplexity, (dtype, cost)
        assert 0 < cost.logprob_change < logprob, (dtype, cost)
