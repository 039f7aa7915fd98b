"""Times the linear kernels on the matrices of SmolLM2-135M with random weights: layers and head, by dtype and rows.

python benchmarks/kernels.py [--level avx512] [--threads 2] [--dtypes bf16 i8] [--rows 1 64]

All layers are one native call, as in a step of the engine; a cell is the fastest of its repeats. GB/s counts the packed
weights and scales once per pass, whatever the caches did; GFLOP/s counts two per weight and row.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np

from hopon.native import Batch, Buffer, Dtype, Library, Matrix, Model, Op, OpKind, Pool, choose_level, load, pointer
from hopon.native.pack import QUAD, PackedMatrix, packed_sizes, split_scales

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, attention output, gate and up, down
INPUTS_PER_OUTLIER = {(576, 1536): 8, (49152, 576): 16}  # else 32, see hopon.model.program
HEAD = (49152, 576)


def random_model(dtype: Dtype) -> tuple[list[Matrix], Matrix, int, int]:
    """Matrices of all layers, head, and the bytes of both, in one arena as a server would have them."""
    shapes = [*SHAPES * LAYERS, HEAD]
    sizes = [packed_sizes(dtype, *shape) for shape in shapes]
    arena = np.empty(sum(map(sum, sizes)) + 64, np.uint8)
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    if dtype in (Dtype.F32, Dtype.BF16):
        floats = rng.standard_normal(1 << 20, dtype=np.float32)
        pattern = (floats if dtype == Dtype.F32 else (floats.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    at, matrices = -arena.ctypes.data % 64, []
    for (rows, cols), (data_bytes, scale_bytes) in zip(shapes, sizes, strict=True):
        data = arena[at : at + data_bytes]
        data[:] = np.resize(pattern, data_bytes)
        scales = arena[at + data_bytes :][:scale_bytes].view(np.uint16)
        if scale_bytes:
            words, offsets = split_scales(scales, cols)
            words[:] = 0x2000  # about 0.01
            offsets[:] = 0x3C00 if dtype == Dtype.I4 and rows != HEAD[0] else 0
        has_scales = scales if scale_bytes else None
        outliers = cols // QUAD // INPUTS_PER_OUTLIER.get((rows, cols), 32)
        packed = PackedMatrix(dtype=dtype, rows=rows, cols=cols, data=data, scales=has_scales, outliers=outliers)
        matrices.append(packed.struct())
        at += data_bytes + scale_bytes
    return matrices[:-1], matrices[-1], sum(map(sum, sizes[:-1])), sum(sizes[-1])


class Pass:
    """One native call that multiplies [m, 1536] rows by every matrix of a list, one after the other."""

    def __init__(self, library: Library, pool: Pool, matrices: list[Matrix], m: int) -> None:
        self._library, self._pool = library, pool
        rng = np.random.default_rng(1)
        x = rng.standard_normal((m, 1536), dtype=np.float32)
        y = np.empty((m, max(matrix.rows for matrix in matrices)), np.float32)
        buffers = (Buffer * 2)(*(Buffer(data=pointer(array), width=array.shape[1]) for array in (x, y)))
        weights = [ctypes.cast(ctypes.pointer(matrix), ctypes.POINTER(Matrix)) for matrix in matrices]
        ops = [Op(kind=OpKind.LINEAR, input=0, output=1, matrix=weight) for weight in weights]
        table = (Op * len(ops))(*ops)
        unused = np.zeros(64, np.float32)  # no op reads K, V or angles
        model = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "block_size", "num_blocks"), 1)
        self._model = Model(
            **model,
            head_dim=8,
            max_position=m,
            block_bytes=64,
            rope=pointer(unused),
            kv=pointer(unused),
            num_buffers=2,
            buffers=buffers,
            num_ops=len(ops),
            ops=table,
        )
        integers = [np.zeros(m, np.int32), np.array([0, m], np.int32), np.zeros(1, np.int32), np.zeros(m, np.int32)]
        tokens, start, zero, blocks = map(pointer, integers)
        self._batch = Batch(
            num_tokens=m,
            num_segments=1,
            tokens=tokens,
            segment_start=start,
            segment_pos=zero,
            segment_table=zero,
            block_tables=blocks,
            table_stride=m,
        )
        self._keep = (matrices, weights, x, y, unused, integers, table, buffers)

    def __call__(self) -> None:
        """Run it."""
        self._library.forward(self._pool, self._model, self._batch)


def best_time(work: Callable[[], None], seconds: float) -> float:
    """Least time of a call, from at least three and for about so many seconds."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(library: Library, threads: int, dtypes: list[Dtype], rows: list[int], seconds: float) -> None:
    """Prints the table."""
    print(f"level {library.level}, {threads} threads")
    print("dtype    m | layers ms  GFLOP/s   GB/s | head ms  GFLOP/s   GB/s")
    weights = LAYERS * sum(n * k for n, k in SHAPES), HEAD[0] * HEAD[1]
    with library.pool(threads) as pool:
        for dtype in dtypes:
            layers, head, *sizes = random_model(dtype)
            for m in rows:
                cells = []
                for matrices, count, size in zip((layers, [head]), weights, sizes, strict=True):
                    t = best_time(Pass(library, pool, matrices, m), seconds)
                    cells.append(f"{t * 1e3:9.2f} {2e-9 * m * count / t:8.0f} {size / t / 1e9:6.1f}")
                print(f"{dtype.name.lower():5} {m:4} | {cells[0]} | {cells[1]}", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", help="instruction level (default: the best of this CPU)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtypes", nargs="+", choices=[d.name.lower() for d in Dtype], default=["bf16", "i8", "i4", "f32"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 33, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=0.3, help="about how long each cell is measured")
    options = parser.parse_args()
    library = load(choose_level(options.level)[0])
    measure(library, options.threads, [Dtype[name.upper()] for name in options.dtypes], options.rows, options.seconds)


if __name__ == "__main__":
    main()
