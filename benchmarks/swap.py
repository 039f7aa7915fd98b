"""Swap against re-prefill on this machine: what brings a preempted sequence back sooner?

``python -m benchmarks.swap MODEL`` moves the KV blocks of one sequence to the host tier and back through the engine's
executor, and computes the same context again, by context length. Medians; the prediction for other machines is
:mod:`hopon.sim.swap`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from hopon.core.config import EngineOptions
from hopon.core.plan import Chunk, Executor, Move, OpenRow, StepPlan
from hopon.core.types import SamplingParams
from hopon.model.cpu import load

CHUNK = 256


def prefill(executor: Executor, context: int, block_size: int, most: int = CHUNK) -> float:
    """Seconds to compute ``context`` tokens in chunks of ``most``, as a resumption does; logits at the end only."""
    prompt = tuple(3 + i % 1000 for i in range(context))
    row = OpenRow(
        row=0, prompt=prompt, output=(), params=SamplingParams(temperature=0.0), seed=0, choice=0, stop_token_ids=()
    )
    begin = time.perf_counter()
    for start in range(0, context, most):
        count = min(most, context - start)
        last = start + count == context
        blocks = tuple(range(-(-start // block_size), -(-(start + count) // block_size)))
        chunk = Chunk(row=0, start=start, count=count, num_logits=int(last), sample=last, new_blocks=blocks)
        executor.submit(StepPlan(step=start, opened=() if start else (row,), chunks=(chunk,))).result()
    seconds = time.perf_counter() - begin
    executor.submit(StepPlan(step=context, closed=(0,))).result()
    return seconds


def swap(executor: Executor, num_blocks: int) -> float:
    """Seconds to move so many blocks out and in again."""
    out = tuple(Move("to_host", i, i) for i in range(num_blocks))
    back = tuple(Move("from_host", i, i) for i in range(num_blocks))
    begin = time.perf_counter()
    executor.submit(StepPlan(step=0, moves=out)).result()
    executor.submit(StepPlan(step=1, moves=back)).result()
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    longest = max(arguments.contexts)
    size = 16
    num_blocks = -(-longest // size) + 1
    options = EngineOptions(
        model=str(arguments.model),
        block_size=size,
        max_num_seqs=1,
        max_model_len=longest + 16,
        num_kv_blocks=num_blocks,
        num_host_blocks=num_blocks,
    )
    deployment = load(options, lambda what, share: None)
    per_token = int(deployment.summary["kv_bytes_per_token"])
    print("| context | KV MiB | out and in, ms | computed again, ms | again / moved |")
    print("|---|---|---|---|---|")
    for context in arguments.contexts:
        blocks = -(-context // size)
        again = median(prefill(deployment.executor, context, size) for _ in range(arguments.runs))
        moved = median(swap(deployment.executor, blocks) for _ in range(arguments.runs))
        mib = context * per_token / 2**20
        print(f"| {context} | {mib:.1f} | {moved * 1e3:.2f} | {again * 1e3:.1f} | {again / moved:.0f} |", flush=True)
    deployment.executor.close()


if __name__ == "__main__":
    main()
