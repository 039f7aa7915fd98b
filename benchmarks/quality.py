"""What each precision costs: perplexity and log-probabilities of real text, against float32 on the same weights.

``python -m benchmarks.quality MODEL`` prints a table for the first tokens of two texts: Shakespeare's sonnets and the
questions of MT-bench (licences beside them in ``data``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hopon.core.config import EngineOptions
from hopon.core.plan import Chunk, OpenRow, StepPlan
from hopon.core.types import SamplingParams
from hopon.model.cpu import load
from hopon.serve.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
CHUNK = 256
TOKENS = 2048
"""Of each text: with fewer, chance moves the perplexity more than a precision does."""


@dataclass(frozen=True, slots=True)
class Cost:
    """How far a precision is from float32 on one text."""

    perplexity: float
    perplexity_change: float  # relative
    logprob_change: float  # mean absolute, per token


def texts() -> dict[str, str]:
    """The two texts: the sonnets, and the first question of every dialogue, an empty line between two."""
    lines = (DATA / "mt_bench_question.jsonl").read_text().splitlines()
    questions = "\n\n".join(json.loads(line)["turns"][0] for line in lines)
    return {"sonnet": (DATA / "sonnet.txt").read_text(), "questions": questions}


def first_tokens(model: Path, tokens: int) -> dict[str, list[int]]:
    """The first tokens of each text, in the model's own tokenizer."""
    tokenizer = Tokenizer.load(model)
    return {name: tokenizer.encode(text)[:tokens] for name, text in texts().items()}


def score(
    model: Path, samples: Sequence[Sequence[int]], *, dtype: str, kv_cache_dtype: str = "auto", level: str | None = None
) -> list[NDArray[np.float64]]:
    """Log-probability of every token but the first of each sample, under the model in a precision."""
    longest = max(map(len, samples))
    options = EngineOptions(
        model=str(model),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        level=level,
        max_model_len=longest,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
    )
    deployment = load(options, lambda what, done: None)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    size = deployment.config.block_size
    results: list[NDArray[np.float64]] = []
    for sample in samples:
        row = OpenRow(row=0, prompt=tuple(sample), output=(), params=params, seed=0, choice=0, stop_token_ids=())
        scores: list[float] = []
        for start in range(0, len(sample) - 1, CHUNK):
            count = min(CHUNK, len(sample) - 1 - start)
            blocks = tuple(range(-(-start // size), -(-(start + count) // size)))
            chunk = Chunk(row=0, start=start, count=count, num_logits=count, sample=False, new_blocks=blocks)
            plan = StepPlan(
                step=start,
                opened=() if start else (row,),
                closed=(0,) if results and not start else (),
                chunks=(chunk,),
            )
            found = deployment.executor.submit(plan).result().rows[0].prompt_logprobs
            scores += [entry.logprob for entry in found]
        results.append(np.array(scores))
    deployment.executor.close()
    return results


def compare(exact: NDArray[np.float64], other: NDArray[np.float64]) -> Cost:
    """The cost of ``other`` against ``exact``, log-probabilities of the same tokens."""
    return Cost(
        perplexity=exp(-other.mean()),
        perplexity_change=exp(exact.mean() - other.mean()) - 1,
        logprob_change=float(np.abs(exact - other).mean()),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "auto", "q8", "q4"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="first tokens of each text")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the rows below f32")
    parser.add_argument("--level", help="instruction level of the kernels")
    arguments = parser.parse_args()
    samples = first_tokens(arguments.model, arguments.tokens)
    exact = score(arguments.model, list(samples.values()), dtype="f32", level=arguments.level)
    heads = [f"{name}: perplexity | change | mean absolute change of log-probability" for name in samples]
    print("| dtype | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * 3 * len(samples))
    for dtype in ["f32", *arguments.dtypes]:
        kv = "f32" if dtype == "f32" else arguments.kv_cache_dtype
        found = score(arguments.model, list(samples.values()), dtype=dtype, kv_cache_dtype=kv, level=arguments.level)
        costs = [compare(*pair) for pair in zip(exact, found, strict=True)]
        cells = [f"{c.perplexity:.2f} | {c.perplexity_change:+.3%} | {c.logprob_change:.4f}" for c in costs]
        print(f"| {dtype} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
