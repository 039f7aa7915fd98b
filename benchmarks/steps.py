"""Where the time of one step goes: every kind of op alone, the native calls, and all of the executor around them.

``python -m benchmarks.steps [--dtype bf16] [--level avx2] [--only attention]`` prints a line per case, in milliseconds.
A kind of op is timed by running a program of the ops of that kind alone, all layers, on the batch of the case: so
production code needs no probe, and caches are as cold as 30 layers of the kind make them. ``rest`` is what the pieces
do not explain.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from hopon import native
from hopon.catalogue import resolve
from hopon.cli.environment import cache_root
from hopon.core.config import EngineOptions
from hopon.core.plan import Chunk, OpenRow, StepPlan
from hopon.core.types import SamplingParams
from hopon.model.cpu import CpuExecutor, load

CASES = {
    "1 decode at 200": [(199, 1)],
    "32 decodes at 200": [(199, 1)] * 32,
    "32 decodes at 1000": [(999, 1)] * 32,
    "1 decode at 7000": [(6999, 1)],
    "256 tokens at 0": [(0, 256)],
    "256 tokens at 768": [(768, 256)],
    "31 decodes at 200, 225 tokens at 0": [(199, 1)] * 31 + [(0, 225)],
    "1024 tokens at 0": [(0, 1024)],
}
"""(start, count) of the chunks of a step."""

LENGTH = 7168
"""Tokens of a row's history: more than any case looks at."""


def plan_of(case: list[tuple[int, int]]) -> StepPlan:
    """A step of these chunks; each samples behind its last token, and its row is opened for it."""
    params = SamplingParams(temperature=0.0)
    blocks = -(-LENGTH // 16)
    opened, chunks = [], []
    for row, (start, count) in enumerate(case):
        prompt = tuple((7 * row + 13 * i) % 40000 + 100 for i in range(start + count))
        opened.append(OpenRow(row=row, prompt=prompt, output=(), params=params, seed=0, choice=0, stop_token_ids=()))
        own = range(row * blocks, row * blocks + -(-(start + count) // 16))
        chunks.append(Chunk(row=row, start=start, count=count, num_logits=1, sample=True, new_blocks=tuple(own)))
    return StepPlan(step=0, opened=tuple(opened), chunks=tuple(chunks))


def touch(executor: CpuExecutor, plan: StepPlan) -> None:
    """Write the blocks of a plan. Memory that was never written is one page of zeros, which no cache ever loses."""
    for chunk in plan.chunks:
        executor._kv[list(chunk.new_blocks)] = 0x3C  # 0.01 in bf16 and f32, 1.06 in f16


def time_of(work: Callable[[], object], seconds: float) -> float:
    """Least time of a call, from at least five and for about so many seconds: others on the machine only add to it."""
    work()
    least, begin, count = float("inf"), time.perf_counter(), 0
    while count < 5 or time.perf_counter() < begin + seconds:
        start = time.perf_counter()
        work()
        least, count = min(least, time.perf_counter() - start), count + 1
    return least


def only(model: native.Model, kind: native.OpKind) -> tuple[native.Model, object]:
    """The model with a program of the ops of one kind; and what keeps it alive."""
    chosen = [model.ops[i] for i in range(model.num_ops) if model.ops[i].kind == kind]
    ops = (native.Op * len(chosen))(*chosen)
    part = native.Model.from_buffer_copy(model)
    part.num_ops, part.ops = len(ops), ctypes.cast(ops, ctypes.POINTER(native.Op))
    return part, ops


def again(plan: StepPlan, *, sample: bool) -> StepPlan:
    """The plan's chunks once more, now that their rows are open."""
    return StepPlan(step=0, chunks=tuple(replace(chunk, sample=sample, new_blocks=()) for chunk in plan.chunks))


def measure(executor: CpuExecutor, kinds: list[native.OpKind], seconds: float) -> None:
    """Print the table, in milliseconds."""
    model, library, pool, batch = executor._model, executor._library, executor._pool, executor._batch
    heads = [*(kind.name.lower() for kind in kinds), "rest", "forward", "step"]
    print("case".ljust(36) + "".join(head.rjust(10) for head in heads))
    for name, case in CASES.items():
        plan = plan_of(case)
        touch(executor, plan)
        executor.submit(plan)
        batch.fill(plan.chunks)
        batch.want_logits(0, len(case))
        programs = [only(model.whole, kind) for kind in kinds]
        times = [
            time_of(partial(library.forward, pool, program, batch.struct), seconds)
            for program in (*(part for part, _ in programs), model.whole)
        ]
        times.insert(-1, times[-1] - sum(times[:-1]))
        times.append(time_of(partial(executor.submit, again(plan, sample=True)), seconds))
        print(name.ljust(36) + "".join(f"{1e3 * cell:10.3f}" for cell in times), flush=True)
        executor.submit(StepPlan(step=0, closed=tuple(range(len(case)))))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue or a path")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--level", help="instruction level (default: the best of this CPU)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="kinds of op (default: all)")
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long each cell is measured")
    arguments = parser.parse_args()
    kinds = [kind for kind in native.OpKind if not arguments.only or kind.name.lower() in arguments.only]
    options = EngineOptions(
        model=str(resolve(arguments.model, cache_root())),
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        level=arguments.level,
        threads=arguments.threads,
        num_kv_blocks=32 * -(-LENGTH // 16),
        max_model_len=LENGTH + 1024,
        max_num_batched_tokens=1024,
        cache_dir=str(cache_root()),
    )
    deployment = load(options, lambda what, done: None)
    print(", ".join(f"{key} {deployment.summary[key]}" for key in ("dtype", "kv_cache_dtype", "level", "threads")))
    measure(cast(CpuExecutor, deployment.executor), kinds, arguments.seconds)
    deployment.executor.close()


if __name__ == "__main__":
    main()
