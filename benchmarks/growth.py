"""How cost grows: step time against batch, context and size of the KV pool, scheduler time against the queue.

``python -m benchmarks.growth [--out docs/plots]`` measures and draws, in about two minutes; tables go to stdout. Steps
are those of the executor, called as an engine calls it; the least of several repeats counts. Beside the time of a token
stand the bytes that it reads: all packed weights, shared by the batch, and its own K and V.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

from benchmarks.plot import Points, chart, write
from benchmarks.scheduler import STEPS, full_house, step
from benchmarks.steps import again, time_of, touch
from hopon.catalogue import resolve
from hopon.cli.environment import cache_root
from hopon.core.config import EngineOptions
from hopon.core.plan import Chunk, Deployment, OpenRow, StepPlan
from hopon.core.types import SamplingParams
from hopon.model.cpu import CpuExecutor, load
from hopon.model.kv import block_bytes
from hopon.model.source import open_source

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8000)
POOLS = (256, 512, 1024, 2048, 4096)
"""MiB of KV cache."""
QUEUES = (1, 10, 100, 1000, 10000)


@contextmanager
def deployed(model: str, dtype: str, blocks: int, batch: int) -> Iterator[Deployment]:
    """A loaded model with so many KV blocks and seats."""
    options = EngineOptions(
        model=str(resolve(model, cache_root())),
        dtype=dtype,
        num_kv_blocks=blocks,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch, 256),
        cache_dir=str(cache_root()),
    )
    deployment = load(options, lambda what, share: None)
    try:
        yield deployment
    finally:
        deployment.executor.close()


def megabytes_read(deployment: Deployment, batch: int, context: int) -> float:
    """What a token of a decode step reads: its share of the weights, and K and V of its context."""
    weights, kv = (int(deployment.summary[name]) for name in ("weight_bytes", "kv_bytes_per_token"))
    return 1e-6 * (weights / batch + context * kv)


def decode_time(deployment: Deployment, batch: int, context: int, spread: int = 0) -> float:
    """Seconds of a step in which so many sequences decode at a context; tables may be spread over the pool."""
    engine = cast(CpuExecutor, deployment.executor)
    params = SamplingParams(temperature=0.0)
    blocks = -(-context // 16)
    opened, chunks = [], []
    for row in range(batch):
        prompt = tuple((7 * row + 13 * i) % 40000 + 100 for i in range(context))
        opened.append(OpenRow(row=row, prompt=prompt, output=(), params=params, seed=0, choice=0, stop_token_ids=()))
        own = tuple((row * blocks + i) * max(1, spread) for i in range(blocks))
        chunks.append(Chunk(row=row, start=context - 1, count=1, num_logits=1, sample=True, new_blocks=own))
    plan = StepPlan(step=0, opened=tuple(opened), chunks=tuple(chunks))
    touch(engine, plan)
    engine.submit(plan)
    seconds = time_of(partial(engine.submit, again(plan, sample=True)), 0.25)
    engine.submit(StepPlan(step=0, closed=tuple(range(batch))))
    return seconds


def by_batch(model: str, dtype: str) -> tuple[Points, Points]:
    """Milliseconds of a decode step at context 128, and megabytes read per token."""
    with deployed(model, dtype, 256 * 8 + 64, 256) as deployment:
        times = [(batch, 1e3 * decode_time(deployment, batch, 128)) for batch in BATCHES]
        return times, [(batch, megabytes_read(deployment, batch, 128)) for batch in BATCHES]


def by_context(model: str, contexts: Sequence[int], batch: int) -> tuple[Points, Points]:
    """Milliseconds of a decode step of so many sequences, and megabytes read per token."""
    with deployed(model, "auto", batch * -(-max(contexts) // 16) + 64, batch) as deployment:
        times = [(context, 1e3 * decode_time(deployment, batch, context)) for context in contexts]
        return times, [(context, megabytes_read(deployment, batch, context)) for context in contexts]


def by_pool(model: str) -> Points:
    """Milliseconds of a step of 16 sequences at context 512 whose blocks lie all over a pool of so many MiB."""
    found = []
    block = block_bytes(open_source(str(resolve(model, cache_root()))).config, 16, 2)
    for size in POOLS:
        blocks = size * 2**20 // block
        with deployed(model, "auto", blocks, 16) as deployment:
            found.append((size, 1e3 * decode_time(deployment, 16, 512, spread=(blocks - 1) // (16 * 32))))
    return found


def by_queue(running: int) -> Points:
    """Microseconds of plan and commit beside so many waiting requests."""
    found = []
    for waiting in QUEUES:
        scheduler = full_house(running, waiting, 200)
        gc.collect()
        found.append((waiting, 1e6 * median(sum(step(scheduler)) for _ in range(STEPS))))
    return found


def show(title: str, lines: Mapping[str, Points]) -> None:
    """A table."""
    print(f"\n{title}")
    for name, points in lines.items():
        print(f"  {name:24}", "  ".join(f"{x:g}: {y:.3g}" for x, y in points), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue or a path")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="of the plot by context")
    parser.add_argument("--only", nargs="+", choices=("batch", "context", "pool", "queue"))
    given = parser.parse_args(arguments)

    def wants(name: str) -> bool:
        return not given.only or name in given.only

    if wants("batch"):
        found = {name: by_batch(given.model, dtype) for name, dtype in (("own precision", "auto"), ("bf16", "bf16"))}
        lines = {name: times for name, (times, _) in found.items()}
        per_token = {name: [(x, y / x) for x, y in points] for name, points in lines.items()}
        show("ms of a decode step by batch (context 128)", lines)
        show("ms per token", per_token)
        show("MB read per token", {name: read for name, (_, read) in found.items()})
        write(given.out, "step-by-batch", chart("A decode step", "sequences in the batch", "ms", lines))
        write(
            given.out,
            "token-by-batch",
            chart("What a token costs", "sequences in the batch", "ms per token", per_token),
        )
    if wants("context"):
        found = {f"{n} sequence{'s' * (n > 1)}": by_context(given.model, given.contexts, n) for n in (1, 8)}
        lines = {name: times for name, (times, _) in found.items()}
        show("ms of a decode step by context", lines)
        show("MB read per token", {name: read for name, (_, read) in found.items()})
        write(given.out, "step-by-context", chart("A decode step", "context in tokens", "ms", lines))
    if wants("pool"):
        lines = {"16 sequences": by_pool(given.model)}
        show("ms of a decode step by size of the KV pool in MiB (context 512)", lines)
        write(given.out, "step-by-pool", chart("A decode step", "KV pool in MiB", "ms", lines))
    if wants("queue"):
        lines = {f"{running} running": by_queue(running) for running in (32, 256)}
        show("us of plan and commit by waiting requests", lines)
        write(given.out, "scheduler-by-queue", chart("The scheduler", "requests that wait", "us per step", lines))


if __name__ == "__main__":
    main()
