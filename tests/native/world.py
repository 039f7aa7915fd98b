"""Small worlds for the kernels' tests: packed matrices, KV caches and batches built by hand, and float64 models.

Everything is written from the text of hopon.h, not from the package's own packing, so that a shared mistake shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon.native import Batch, Buffer, CacheDtype, Dtype, Library, Matrix, Model, Op, OpKind, Pool, pointer

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounds floats to bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Packed:
    """A matrix in hopon's layout and its exact values in float64 [rows, cols]."""

    matrix: Matrix
    values: F64
    keep: list[NDArray[Any]]


def _pad(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // 64) * 64, -(-cols // 32) * 32


def pack(weights: NDArray[Any], dtype: Dtype = Dtype.F32, bias: F32 | None = None) -> Packed:
    """Packs float weights as F32 or BF16."""
    rows, cols = weights.shape
    n, k = _pad(rows, cols)
    full = np.zeros((n, k), np.float32)
    full[:rows, :cols] = weights
    values: F64
    data: NDArray[Any]
    if dtype == Dtype.F32:
        data = np.ascontiguousarray(full.reshape(n // 64, 64, k).transpose(0, 2, 1))
        values = full[:rows, :cols].astype(np.float64)
    else:
        bits = to_bf16(full)
        data = np.ascontiguousarray(bits.reshape(n // 64, 64, k // 2, 2).transpose(0, 2, 1, 3))
        values = from_bf16(bits)[:rows, :cols].astype(np.float64)
    return _packed(dtype, rows, cols, data, None, bias, values)


def random_integers(rng: np.random.Generator, rows: int, cols: int, dtype: Dtype) -> Packed:
    """A random matrix of codes with group scales and minima, as I8 or I4."""
    n, k = _pad(rows, cols)
    codes = np.zeros((n, k), np.uint8)
    largest = 255 if dtype == Dtype.I8 else 15
    codes[:rows, :cols] = rng.integers(0, largest + 1, (rows, cols))
    groups, pairs = k // 32, -(-k // 64)
    scales = np.zeros((n, groups), np.float16)
    scales[:rows] = rng.uniform(-0.3, 0.3, (rows, groups)) / largest
    offsets = np.zeros((n, 2 * pairs), np.uint16)
    offsets[:rows, :groups] = to_bf16(rng.uniform(-0.15, 0.15, (rows, groups)).astype(np.float32))
    scale, offset = (a.astype(np.float64).repeat(32, axis=1)[:, :k] for a in (scales, from_bf16(offsets)))
    values = ((codes - (largest + 1.0) / 2) * scale + offset)[:rows, :cols]
    data: NDArray[Any]
    if dtype == Dtype.I8:
        data = codes.reshape(n // 64, 64, k // 4, 4).transpose(0, 2, 1, 3)
    else:
        halves = codes.reshape(n // 64, 64, k // 32, 2, 4, 4).transpose(0, 2, 3, 4, 1, 5)  # [B][G][half][j][n][i]
        data = halves[:, :, 0] | halves[:, :, 1] << 4
    blocks = [
        scales.view(np.uint16).reshape(n // 64, 64, groups).transpose(0, 2, 1).reshape(n // 64, -1),
        offsets.reshape(n // 64, 64, pairs, 2).transpose(0, 2, 1, 3).reshape(n // 64, -1),
    ]
    return _packed(dtype, rows, cols, np.ascontiguousarray(data), np.concatenate(blocks, axis=1), None, values)


def _packed(
    dtype: Dtype,
    rows: int,
    cols: int,
    data: NDArray[Any],
    scales: NDArray[np.uint16] | None,
    bias: F32 | None,
    values: F64,
) -> Packed:
    n, k = _pad(rows, cols)
    aligned = _aligned(data)
    keep: list[NDArray[Any]] = [array for array in (aligned, scales, bias) if array is not None]
    matrix = Matrix(dtype, rows, cols, n, k, k // 32, 1, 0, pointer(aligned), pointer(scales), pointer(bias))
    return Packed(matrix, values, keep)


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@dataclass
class Cache:
    """A KV cache full of NaN, and who owns which blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: CacheDtype = CacheDtype.F32
    memory: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        element = np.uint32 if self.dtype == CacheDtype.F32 else np.uint16
        shape = (self.num_blocks, self.num_layers, self.num_kv_heads, 2, self.block_size * self.head_dim)
        self.memory = np.full(shape, np.iinfo(element).max, element)  # all ones: a NaN in every dtype

    @property
    def block_bytes(self) -> int:
        return int(self.memory[0].nbytes)

    def store(self, layer: int, table: NDArray[np.int32], first: int, keys: F32, values: F32) -> None:
        """Writes K and V [tokens, kv heads, head_dim] of positions from ``first``."""
        for half, array in enumerate((keys, values)):
            view, place = self._tiles(half), self._places(half, layer, table, first, len(keys))
            view[place] = self._bits(array)

    def read(self, layer: int, table: NDArray[np.int32], first: int, count: int) -> tuple[F32, F32]:
        """K and V [tokens, kv heads, head_dim] as floats."""
        keys, values = (self._tiles(half)[self._places(half, layer, table, first, count)] for half in (0, 1))
        return self._floats(keys), self._floats(values)

    def rounded(self, array: F32) -> F32:
        """What comes back of values written to the cache."""
        return self._floats(self._bits(array))

    def _bits(self, array: F32) -> NDArray[Any]:
        if self.dtype == CacheDtype.F32:
            return array.view(np.uint32)
        if self.dtype == CacheDtype.BF16:
            return to_bf16(array)
        return np.clip(array, -65504, 65504).astype(np.float16).view(np.uint16)

    def _floats(self, bits: NDArray[Any]) -> F32:
        if self.dtype == CacheDtype.F32:
            return np.ascontiguousarray(bits).view(np.float32)
        if self.dtype == CacheDtype.BF16:
            return from_bf16(bits)
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)

    def _tiles(self, half: int) -> NDArray[Any]:
        """[block, layer, kv head, tile, *place in a tile] as hopon.h has it."""
        return self.memory[:, :, :, half].reshape(
            *self.memory.shape[:3], self.block_size // min(16, self.block_size), -1
        )

    def _places(self, half: int, layer: int, table: NDArray[np.int32], first: int, count: int) -> tuple[Any, ...]:
        """Index into ``_tiles`` that gives [token, kv head, d]."""
        position, tile, dim = np.arange(first, first + count), min(16, self.block_size), self.head_dim
        block, slot = table[position // self.block_size], position % self.block_size
        token, d = (slot % tile)[:, None], np.arange(dim)[None]
        pack = 2 if self.dtype == CacheDtype.BF16 else 1
        if half == 0:
            inside = (d // pack * tile + token) * pack + d % pack
        else:
            pack = min(pack, tile)
            inside = (token // pack * dim + d) * pack + token % pack
        heads = np.arange(self.num_kv_heads)[None, :, None]
        return block[:, None, None], layer, heads, (slot // tile)[:, None, None], inside[:, None, :]


@dataclass(frozen=True)
class Segment:
    """``count`` tokens of sequence ``row`` from position ``start``."""

    row: int
    start: int
    count: int


class Step:
    """A batch and the arrays that it points to."""

    def __init__(
        self,
        segments: Sequence[Segment],
        tables: NDArray[np.int32],
        tokens: Sequence[int] | None = None,
        logits: Sequence[int] = (),
    ) -> None:
        counts = [s.count for s in segments]
        self.tokens = np.zeros(sum(counts), np.int32) if tokens is None else np.array(tokens, np.int32)
        self.start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.position = np.array([s.start for s in segments], np.int32)
        self.table = np.array([s.row for s in segments], np.int32)
        self.tables = np.ascontiguousarray(tables, np.int32)
        self.logits = np.array(logits, np.int32)
        self.batch = Batch(
            sum(counts),
            len(segments),
            len(self.logits),
            0,
            pointer(self.tokens),
            pointer(self.start),
            pointer(self.position),
            pointer(self.table),
            pointer(self.tables),
            self.tables.shape[1],
            pointer(self.logits),
        )


def make_op(kind: OpKind, **fields: Any) -> Op:
    """An op; arrays and matrices become pointers (kept alive by the caller)."""
    op = Op(kind=kind)
    for name, value in fields.items():
        if isinstance(value, Packed):
            op.matrix.contents = value.matrix
        elif isinstance(value, np.ndarray):
            setattr(op, name, pointer(value, np.float32))
        else:
            setattr(op, name, value)
    return op


class Machine:
    """A model struct with its cache, buffers and program."""

    def __init__(
        self,
        cache: Cache,
        num_heads: int,
        buffers: Sequence[F32],
        ops: Sequence[Op],
        *,
        rope: F32 | None = None,
        rope_dim: int = 0,
        interleaved: bool = False,
        max_position: int = 4096,
        scale: float | None = None,
    ) -> None:
        self.cache = cache
        self.buffers = list(buffers)
        self.rope = np.zeros((max_position, max(rope_dim, 1)), np.float32) if rope is None else rope
        self._buffers = (Buffer * len(buffers))(*(Buffer(pointer(b, np.float32), b.shape[1]) for b in buffers))
        self.ops = (Op * len(ops))(*ops)
        self.model = Model(
            num_layers=cache.num_layers,
            num_heads=num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            rope_dim=rope_dim,
            rope_interleaved=int(interleaved),
            kv_dtype=cache.dtype,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            max_position=len(self.rope),
            attention_scale=cache.head_dim**-0.5 if scale is None else scale,
            num_buffers=len(buffers),
            num_ops=len(ops),
            rope=pointer(self.rope),
            kv=pointer(cache.memory),
            block_bytes=cache.block_bytes,
            buffers=self._buffers,
            ops=self.ops,
        )

    def run(self, library: Library, pool: Pool, step: Step) -> None:
        library.forward(pool, self.model, step.batch)


def random_tables(rng: np.random.Generator, lengths: Sequence[int], block_size: int) -> tuple[NDArray[np.int32], int]:
    """Block tables of sequences over scattered blocks, padded with an id that must not be read; and the pool's size."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = rng.permutation(sum(counts) + 3).astype(np.int32)
    tables = np.full((len(lengths), max(counts)), 2**31 - 1, np.int32)
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[taken : taken + count]
        taken += count
    return tables, len(blocks)


def attention_model(query: F32 | F64, keys: F32 | F64, values: F32 | F64, first: int, scale: float) -> F64:
    """Causal attention in float64: query [rows, heads, d] at positions from ``first``; K, V [tokens, kv heads, d]."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.astype(np.float64).reshape(rows, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    k, v = (array.astype(np.float64).transpose(1, 0, 2)[:, None] for array in (keys, values))
    scores = q @ k.swapaxes(-1, -2) * scale
    unseen = np.arange(len(keys)) > first + np.arange(rows)[:, None]
    scores[..., unseen] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ v / weights.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray(out.transpose(2, 0, 1, 3)).reshape(rows, heads, dim)
