"""Times attention on the same tokens in three ways: padded, request by request, and ragged.

python benchmarks/attention_three_ways.py [--lengths 40 65 90 130 170 240 330 480] [--threads 2] [--level avx512]

- *padded*: a rectangle. Every prompt is as long as the longest, every decode attends to as many keys as the longest
  has, and in a mixed step everybody computes as many tokens as the longest prompt.
- *per request*: linears on all tokens at once, attention in one kernel call per request and layer: the selective
  batching of Orca (OSDI'22).
- *ragged*: linears on all tokens at once, attention in one kernel call for all requests, as hopon does.

Parts of a step: the attention of all layers, and the linears of all layers (with random weights, shapes of
SmolLM2-135M). Real tokens get the same bits each way where they attend to the same keys; that is checked first. Layers
are timed as a model runs them, one after another, not all requests of one layer's call at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon.native import Batch, Buffer, CacheDtype, Dtype, Library, Model, Op, OpKind, Pool, choose_level, load, pointer
from hopon.native.pack import pack_bf16, pack_f32

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, attention output, gate and up, down
KINDS = ("prompts", "decodes", "mixed")


@dataclass(frozen=True)
class Segment:
    """``count`` tokens of request ``row`` from position ``start``."""

    row: int
    start: int
    count: int


def ragged(kind: str, lengths: Sequence[int]) -> list[Segment]:
    """What a step computes: all prompts, a token of everybody behind its prompt, or half of each."""
    whole = [Segment(row, 0, length) for row, length in enumerate(lengths)]
    single = [Segment(row, length - 1, 1) for row, length in enumerate(lengths)]
    mixed = [(whole, single)[row % 2][row] for row in range(len(lengths))]
    return {"prompts": whole, "decodes": single, "mixed": mixed}[kind]


def padded(segments: Sequence[Segment]) -> list[Segment]:
    """The same, where everybody has as many tokens and as many keys as the longest."""
    count = max(segment.count for segment in segments)
    end = max(segment.start + segment.count for segment in segments)
    return [Segment(segment.row, end - count, count) for segment in segments]


class Attention:
    """A KV cache of random numbers and a program of attention in every layer."""

    def __init__(self, library: Library, pool: Pool, dtype: Dtype, layers: int, lengths: Sequence[int]) -> None:
        self._library, self._pool = library, pool
        self.layers = layers
        per_row = -(-max(lengths) // BLOCK)
        rng = np.random.default_rng(0)
        size = (per_row * len(lengths), layers * KV_HEADS * 2 * BLOCK * DIM)
        floats = rng.standard_normal(size, dtype=np.float32)
        kv: NDArray[Any] = floats if dtype is Dtype.F32 else (floats.view(np.uint32) >> 16).astype(np.uint16)
        tokens = len(lengths) * max(lengths)
        self.query = rng.standard_normal((tokens, (HEADS + 2 * KV_HEADS) * DIM), dtype=np.float32)
        self.out = np.zeros((tokens, HEADS * DIM), np.float32)
        self._tables = rng.permutation(len(kv)).astype(np.int32).reshape(len(lengths), per_row)
        self._tokens = np.zeros(tokens, np.int32)
        rope = np.zeros((per_row * BLOCK, DIM), np.float32)
        self._programs = [self._program(kv, rope, dtype, layer) for layer in range(layers)]
        self._keep = (kv, rope)

    def _program(self, kv: NDArray[Any], rope: NDArray[np.float32], dtype: Dtype, layer: int) -> Model:
        """Attention of one layer. Buffers and ops stay alive with the struct that holds their arrays."""
        buffers = (Buffer * 2)(*(Buffer(pointer(array), array.shape[1]) for array in (self.query, self.out)))
        ops = (Op * 1)(Op(kind=OpKind.ATTENTION, input=0, output=1, layer=layer))
        return Model(
            num_layers=self.layers,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            rope_dim=DIM,
            kv_dtype=CacheDtype[dtype.name],
            block_size=BLOCK,
            num_blocks=len(kv),
            max_position=len(rope),
            attention_scale=DIM**-0.5,
            num_buffers=2,
            num_ops=len(ops),
            rope=pointer(rope),
            kv=pointer(kv),
            block_bytes=kv[0].nbytes,
            buffers=buffers,
            ops=ops,
        )

    def steps(self, segments: Sequence[Segment], *, one_by_one: bool) -> Callable[[], None]:
        """All layers of these segments, in one call per layer, or in one per layer and segment."""
        parts = [[segment] for segment in segments] if one_by_one else [list(segments)]
        starts = np.cumsum([0] + [sum(segment.count for segment in part) for part in parts])
        batches = [self._batch(part) for part in parts]
        programs = self._programs
        if one_by_one:  # each works on its own rows of the buffers
            shifted = [[self._shifted(model, int(start)) for start in starts[:-1]] for model in programs]
        else:
            shifted = [[model] for model in programs]

        def run() -> None:
            for models in shifted:
                for model, (batch, _) in zip(models, batches, strict=True):
                    self._library.forward(self._pool, model, batch)

        return run

    def _shifted(self, model: Model, row: int) -> Model:
        """The same program on buffers that begin at a row."""
        arrays = (self.query[row:], self.out[row:])
        buffers = (Buffer * 2)(*(Buffer(pointer(array), array.shape[1]) for array in arrays))
        copy = Model.from_buffer_copy(model)
        copy.buffers, copy.ops = buffers, model.ops
        return copy

    def _batch(self, segments: Sequence[Segment]) -> tuple[Batch, list[NDArray[np.int32]]]:
        counts = [segment.count for segment in segments]
        keep = [
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([segment.start for segment in segments], np.int32),
            np.array([segment.row for segment in segments], np.int32),
        ]
        batch = Batch(
            num_tokens=sum(counts),
            num_segments=len(segments),
            num_logits=0,
            tokens=pointer(self._tokens),
            segment_start=pointer(keep[0]),
            segment_pos=pointer(keep[1]),
            segment_table=pointer(keep[2]),
            block_tables=pointer(self._tables),
            table_stride=self._tables.shape[1],
            logit_index=None,
        )
        return batch, keep

    def outputs(self, work: Callable[[], None], count: int) -> NDArray[np.float32]:
        """What the last layer yields."""
        self.out[:] = np.nan
        work()
        return self.out[:count].copy()


class Linears:
    """Random matrices of all layers."""

    def __init__(self, library: Library, pool: Pool, dtype: Dtype, layers: int) -> None:
        rng = np.random.default_rng(1)
        pack = pack_f32 if dtype is Dtype.F32 else pack_bf16
        self._library, self._pool = library, pool
        self._packed = [pack(rng.standard_normal(shape, dtype=np.float32)) for _ in range(layers) for shape in SHAPES]
        self._matrices = [packed.struct() for packed in self._packed]

    def step(self, num_rows: int) -> Callable[[], None]:
        """All layers on so many rows."""
        x, y = np.ones((num_rows, 1536), np.float32), np.empty((num_rows, 3072), np.float32)

        def run() -> None:
            for matrix in self._matrices:
                self._library.linear(self._pool, matrix, x, y)

        return run


def check(attention: Attention, lengths: Sequence[int]) -> None:
    """Raises SystemExit unless all ways give real tokens the same bits where they attend to the same keys."""
    for kind in KINDS:
        segments = ragged(kind, lengths)
        count = sum(segment.count for segment in segments)
        order = np.random.default_rng(2).standard_normal(attention.query.shape, dtype=np.float32)
        attention.query[:] = order
        together = attention.outputs(attention.steps(segments, one_by_one=False), count)
        alone = attention.outputs(attention.steps(segments, one_by_one=True), count)
        if not np.array_equal(together, alone):
            raise SystemExit(f"{kind}: one by one, attention has other bits than ragged")
        if kind == "prompts":  # padding stands behind the real tokens, which never see it
            width = max(lengths)
            real = np.concatenate([np.arange(length) + width * row for row, length in enumerate(lengths)])
            attention.query[real] = order[:count]
            rectangle = attention.outputs(attention.steps(padded(segments), one_by_one=False), width * len(lengths))
            if not np.array_equal(rectangle[real], together):
                raise SystemExit("prompts: padded, attention has other bits than ragged")


def median_times(works: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Median time of each, in turns, so that a slow moment of the machine meets all; five turns at least."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    begin = time.perf_counter()
    while len(times[0]) < 5 or time.perf_counter() - begin < seconds:
        for work, taken in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]


def measure(library: Library, threads: int, dtype: Dtype, layers: int, lengths: Sequence[int], seconds: float) -> None:
    """Prints the table."""
    print(f"level {library.level}, {threads} threads, {dtype.name.lower()}, {layers} layers, lengths {list(lengths)}")
    print(f"{'':18} {'rows':>14} {'milliseconds':>30} {'times ragged':>21}")
    heads = f"{'step':8} {'part':9} {'real':>6} {'padded':>7} {'padded':>9} {'per request':>12} {'ragged':>7}"
    print(f"{heads} {'padded':>8} {'per request':>12}")
    with library.pool(threads) as pool:
        attention = Attention(library, pool, dtype, layers, lengths)
        linears = Linears(library, pool, dtype, layers)
        check(attention, lengths)
        for kind in KINDS:
            segments = ragged(kind, lengths)
            rectangle = padded(segments)
            few, many = (sum(segment.count for segment in each) for each in (segments, rectangle))
            parts = {
                "attention": [
                    attention.steps(rectangle, one_by_one=False),
                    attention.steps(segments, one_by_one=True),
                    attention.steps(segments, one_by_one=False),
                ],
                "linears": [linears.step(many), linears.step(few)],
            }
            sums = [0.0, 0.0, 0.0]
            for name, works in parts.items():
                times = median_times(works, seconds)
                if name == "linears":
                    times.append(times[-1])  # selective batching computes them as ragged batches do
                sums = [total + taken for total, taken in zip(sums, times, strict=True)]
                _line(kind, name, few, many, times)
            _line(kind, "both", few, many, sums)


def _line(kind: str, part: str, few: int, many: int, times: Sequence[float]) -> None:
    full, alone, together = times
    print(
        f"{kind:8} {part:9} {few:6} {many:7} {1e3 * full:9.2f} {1e3 * alone:12.2f} {1e3 * together:7.2f} "
        f"{full / together:8.2f} {alone / together:12.2f}",
        flush=True,
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[40, 65, 90, 130, 170, 240, 330, 480])
    parser.add_argument("--level", help="instruction level (default: the best of this CPU)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16", help="of weights and KV cache")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each part is measured")
    options = parser.parse_args()
    if min(options.lengths) < 1 or options.layers < 1:
        parser.error(f"lengths and layers must be at least 1, got {options.lengths} and {options.layers}")
    library = load(choose_level(options.level)[0])
    dtype = Dtype[options.dtype.upper()]
    measure(library, options.threads, dtype, options.layers, options.lengths, options.seconds)


if __name__ == "__main__":
    main()
