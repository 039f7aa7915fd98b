"""Memory of activations, beside weights and KV cache, by the largest chunk of a long prompt.

``python -m benchmarks.workspace [--tokens 8000] [--chunks 64 208 512 2048 8000]`` prints a table. *Reserved* are the
buffers that the program has for a step of that many tokens. *Grown* is by how much the process grew in memory over the
prompt: what was touched of the buffers, the scratch of the kernels, the arrays of a step. All of it is kept, so that it
is the peak. Every chunk size has a process of its own; weights and KV cache are written before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from benchmarks.swap import prefill
from hopon.catalogue import resolve
from hopon.cli.environment import cache_root
from hopon.core.config import EngineOptions
from hopon.model.cpu import CpuExecutor, load


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes."""

    reserved: int
    grown: int


def workspace(chunk: int, *, model: str, dtype: str, level: str | None, threads: int, tokens: int) -> Workspace:
    """What a prompt takes that is computed in chunks. To be called once in a process."""
    size = 16
    options = EngineOptions(
        model=str(resolve(model, cache_root())),
        dtype=dtype,
        level=level,
        threads=threads,
        block_size=size,
        num_kv_blocks=-(-tokens // size) + 1,
        max_num_seqs=1,
        max_model_len=tokens,
        max_num_batched_tokens=chunk,
        cache_dir=str(cache_root()),
    )
    deployment = load(options, lambda what, share: None)
    executor = cast(CpuExecutor, deployment.executor)
    executor._kv.fill(0)
    before = resident()
    prefill(executor, tokens, size, chunk)
    grown = resident() - before
    executor.close()
    return Workspace(reserved=int(deployment.summary["buffer_bytes"]), grown=grown)


def resident() -> int:
    """Bytes of this process in memory that belong to no file."""
    found = re.search(r"^Anonymous: +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None, "Linux tells the anonymous memory of a process"
    return 1024 * int(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue or a path")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--level", help="instruction level (default: the best of this CPU)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 208, 512, 2048, 8000])
    arguments = vars(parser.parse_args())
    chunks = arguments.pop("chunks")
    print("| chunk in tokens | buffers reserved, bytes | process grown by, bytes |\n|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for chunk, found in zip(chunks, pool.map(partial(workspace, **arguments), chunks), strict=True):
            print(f"| {chunk} | {found.reserved:,} | {found.grown:,} |", flush=True)


if __name__ == "__main__":
    main()
