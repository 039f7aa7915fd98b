"""The small ops, one at a time, against float64; and what a bad program or batch gets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.native import Buffer, CacheDtype, Dtype, Library, NativeError, Op, OpKind, Pool
from tests.native.world import (
    F32,
    F64,
    Cache,
    Machine,
    Packed,
    Segment,
    Step,
    make_op,
    pack,
    random_integers,
    random_tables,
)

HEADS, KV_HEADS, DIM = 6, 2, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def run_op(
    library: Library, threads: int, op: Op, source: F32, out_width: int, tokens: list[int] | None = None
) -> tuple[F32, F32]:
    """Runs one op on rows of one sequence; returns the input and output buffers afterwards."""
    count = len(source)
    tables, blocks = random_tables(np.random.default_rng(0), [count], 16)
    out = np.full((count, out_width), 7.0, np.float32)
    copy = source.copy()
    op.input, op.output = 0, 1
    machine = Machine(Cache(1, KV_HEADS, DIM, 16, blocks), HEADS, [copy, out], [op])
    with library.pool(threads) as pool:
        machine.run(library, pool, Step([Segment(0, 0, count)], tables, tokens))
    return copy, out


def matrix_of(dtype: Dtype, rows: int, cols: int) -> Packed:
    rng = np.random.default_rng([rows, cols, int(dtype)])
    if dtype in (Dtype.F32, Dtype.BF16):
        return pack(rng.standard_normal((rows, cols)), dtype)
    return random_integers(rng, rows, cols, dtype)


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (130, 72), (200, 96)])
def test_embedding_gathers_rows_of_the_packed_matrix(library: Library, dtype: Dtype, rows: int, cols: int) -> None:
    """Every id gives its row as floats: exact for f32 and bf16, one rounding for integers; columns behind stay."""
    packed = matrix_of(dtype, rows, cols)
    tokens = [*range(rows), 0, rows - 1]
    source = np.zeros((len(tokens), 1), np.float32)
    for threads in (1, 2):
        _, out = run_op(library, threads, make_op(OpKind.EMBED, matrix=packed), source, cols + 3, tokens)
        if dtype in (Dtype.F32, Dtype.BF16):
            assert (out[:, :cols] == packed.values[tokens]).all()
        else:
            np.testing.assert_allclose(out[:, :cols], packed.values[tokens], rtol=3e-7, atol=1e-7)
        assert (out[:, cols:] == 7.0).all()


def norm_model(x: NDArray[Any], weight: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight
    return np.asarray(scaled, np.float64)


@pytest.mark.parametrize(("width", "groups"), [(1, 1), (8, 6), (15, 1), (64, 3), (576, 1), (1000, 2)])
def test_norm_agrees_with_float64(library: Library, width: int, groups: int) -> None:
    """RMSNorm of each group of each row, into another buffer or in place."""
    rng = np.random.default_rng(width)
    weight = rng.standard_normal(width).astype(np.float32)
    source = (rng.standard_normal((33, width * groups + 2)) * 10).astype(np.float32)
    expected = norm_model(source[:, : width * groups].reshape(33, groups, width), weight, 1e-5).reshape(33, -1)
    op = make_op(OpKind.NORM, width=width, groups=groups, vector=weight, eps=1e-5)
    _, out = run_op(library, 2, op, source, width * groups + 1)
    np.testing.assert_allclose(out[:, :-1], expected, rtol=1e-6, atol=1e-6)
    assert (out[:, -1] == 7.0).all()
    tables, blocks = random_tables(rng, [33], 16)
    op.input = op.output = 0
    inside = source.copy()
    with library.pool(1) as pool:
        Machine(Cache(1, 1, 8, 16, blocks), 1, [inside], [op]).run(library, pool, Step([Segment(0, 0, 33)], tables))
    assert inside[:, : width * groups].tobytes() == out[:, :-1].tobytes()
    assert (inside[:, width * groups :] == source[:, width * groups :]).all()


@pytest.mark.parametrize("width", [1, 16, 40, 1536])
def test_gate_agrees_with_float64(library: Library, width: int) -> None:
    """silu(gate) * up, also where exp overflows."""
    rng = np.random.default_rng(width)
    source = (rng.standard_normal((20, 2 * width)) * 5).astype(np.float32)
    source[:4, 0] = [-1e4, 1e4, -88, 88]
    gate, up = source[:, :width].astype(np.float64), source[:, width:].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    _, out = run_op(library, 2, make_op(OpKind.GATE, width=width), source, width + 1)
    np.testing.assert_allclose(out[:, :-1], expected, rtol=2e-6, atol=1e-30)
    assert (out[:, -1] == 7.0).all()


def test_select_picks_the_rows_that_want_logits(library: Library, pool: Pool) -> None:
    """SELECT copies the named rows in order, and later ops on logits touch these rows only."""
    source = np.arange(60, dtype=np.float32).reshape(10, 6)
    out, normed = np.full((10, 7), 7.0, np.float32), np.full((10, 7), 7.0, np.float32)
    weight = np.ones(6, np.float32)
    ops = [
        make_op(OpKind.SELECT, input=0, output=1, width=6),
        make_op(OpKind.NORM, input=1, output=2, width=6, groups=1, vector=weight, on_logits=1),
    ]
    tables, blocks = random_tables(np.random.default_rng(0), [10], 16)
    machine = Machine(Cache(1, 1, 8, 16, blocks), 1, [source, out, normed], ops)
    machine.run(library, pool, Step([Segment(0, 0, 10)], tables, logits=[1, 4, 9]))
    assert (out[:3, :6] == source[[1, 4, 9]]).all()
    assert (out[3:] == 7.0).all()
    assert (out[:, 6] == 7.0).all()
    np.testing.assert_allclose(normed[:3, :6], norm_model(source[[1, 4, 9]], weight, 0.0), rtol=1e-6)
    assert (normed[3:] == 7.0).all()


def rope_model(x: F64, table: F32, rope_dim: int, interleaved: bool) -> F64:
    """x [rows, heads, dim] rotated by table [rows, rope_dim]."""
    half = rope_dim // 2
    cos, sin = (part[:, None].astype(np.float64) for part in (table[:, :half], table[:, half:]))
    out = x.copy()
    first = slice(0, rope_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rope_dim, 2) if interleaved else slice(half, rope_dim)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_dim", [0, 8, DIM])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", CacheDtype)
@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_rope_and_kv_write(
    library: Library, interleaved: bool, rope_dim: int, normed: bool, dtype: CacheDtype, block_size: int
) -> None:
    """q is normed and rotated in place, k likewise into the cache, v as it is; no other slot of the cache changes."""
    rng = np.random.default_rng([rope_dim, block_size])
    table = rng.standard_normal((200, max(rope_dim, 1))).astype(np.float32)
    weights = [rng.standard_normal(DIM).astype(np.float32) for _ in range(2)] if normed else []
    source = rng.standard_normal((37, WIDTH + 1)).astype(np.float32)
    segments = [Segment(0, 60, 30), Segment(2, 0, 1), Segment(1, 99, 6)]
    tables, blocks = random_tables(rng, [90, 105, 1], block_size)
    cache = Cache(3, KV_HEADS, DIM, block_size, blocks, dtype)
    fields: dict[str, Any] = {"vector": weights[0], "vector2": weights[1], "eps": 1e-6} if normed else {}
    op = make_op(OpKind.ROPE_KV, layer=1, **fields)
    qkv = source.copy()
    machine = Machine(cache, HEADS, [qkv], [op], rope=table, rope_dim=rope_dim, interleaved=interleaved)
    with library.pool(2) as pool:
        machine.run(library, pool, Step(segments, tables))
    position = np.concatenate([np.arange(s.start, s.start + s.count) for s in segments])
    heads = source[:, : (HEADS + KV_HEADS) * DIM].reshape(37, -1, DIM).astype(np.float64)
    if normed:
        heads[:, :HEADS] = norm_model(heads[:, :HEADS], weights[0], 1e-6)
        heads[:, HEADS:] = norm_model(heads[:, HEADS:], weights[1], 1e-6)
    heads = rope_model(heads, table[position], rope_dim, interleaved)
    tolerance = 2e-6 if dtype == CacheDtype.F32 else 2**-8
    np.testing.assert_allclose(qkv[:, : HEADS * DIM], heads[:, :HEADS].reshape(37, -1), rtol=2e-6, atol=2e-6)
    token = 0
    for s in segments:
        own = slice(token, token + s.count)
        keys, values = cache.read(1, tables[s.row], s.start, s.count)
        np.testing.assert_allclose(keys, heads[own, HEADS:], rtol=tolerance, atol=2e-6)
        raw = source[own, (HEADS + KV_HEADS) * DIM : WIDTH].reshape(s.count, KV_HEADS, DIM)
        assert (values == cache.rounded(raw)).all()
        token += s.count
    untouched = np.iinfo(cache.memory.dtype).max
    assert (cache.memory != untouched).sum() == 37 * KV_HEADS * DIM * 2
    assert (cache.memory[:, [0, 2]] == untouched).all()


def test_rows_have_the_same_bits_alone_and_in_a_crowd(library: Library) -> None:
    """No small op lets a row's neighbours or the number of threads change its bits."""
    rng = np.random.default_rng(9)
    weight = rng.standard_normal(500).astype(np.float32)
    packed = matrix_of(Dtype.I4, 100, 500)
    makers: list[Callable[[], Op]] = [
        lambda: make_op(OpKind.NORM, width=500, groups=2, vector=weight, eps=1e-5),
        lambda: make_op(OpKind.GATE, width=500),
        lambda: make_op(OpKind.EMBED, matrix=packed),
    ]
    source = rng.standard_normal((300, 1000)).astype(np.float32)
    tokens = rng.integers(0, 100, 300).tolist()
    for maker in makers:
        crowds = [run_op(library, threads, maker(), source, 1000, tokens)[1] for threads in (1, 2)]
        assert crowds[0].tobytes() == crowds[1].tobytes()
        for i in (0, 17, 299):
            alone = run_op(library, 2, maker(), source[i : i + 1], 1000, tokens[i : i + 1])[1]
            assert alone.tobytes() == crowds[0][i : i + 1].tobytes()


class Valid:
    """A machine and a step with nothing wrong, for tests that break one thing."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.packed = pack(rng.standard_normal((50, 32)))
        self.weight = np.ones(32, np.float32)
        self.buffers = [np.zeros((20, WIDTH), np.float32) for _ in range(2)]
        self.ops = [
            make_op(OpKind.EMBED, output=0, matrix=self.packed),
            make_op(OpKind.NORM, input=0, output=0, width=32, groups=1, vector=self.weight),
            make_op(OpKind.LINEAR, input=0, output=1, matrix=self.packed),
            make_op(OpKind.ROPE_KV, input=1, layer=0),
            make_op(OpKind.ATTENTION, input=1, output=0, layer=0),
            make_op(OpKind.GATE, input=0, output=1, width=10),
            make_op(OpKind.SELECT, input=1, output=0, width=10),
        ]
        tables, blocks = random_tables(rng, [40, 20], 16)
        self.cache = Cache(1, KV_HEADS, DIM, 16, blocks)
        self.machine = Machine(self.cache, HEADS, self.buffers, self.ops, max_position=64)
        self.step = Step([Segment(0, 30, 10), Segment(1, 0, 5)], tables, [3] * 15, [9, 14])
        self.model, self.batch = self.machine.model, self.step.batch

    def run(self, library: Library, pool: Pool) -> None:
        self.machine.run(library, pool, self.step)


def set_op(index: int, **fields: Any) -> Callable[[Valid], None]:
    def change(v: Valid) -> None:
        for name, value in fields.items():
            setattr(v.machine.ops[index], name, value)

    return change


def set_model(**fields: Any) -> Callable[[Valid], None]:
    def change(v: Valid) -> None:
        for name, value in fields.items():
            setattr(v.model, name, value)

    return change


def set_batch(**fields: Any) -> Callable[[Valid], None]:
    def change(v: Valid) -> None:
        for name, value in fields.items():
            setattr(v.batch, name, value)

    return change


def set_array(name: str, index: Any, value: int) -> Callable[[Valid], None]:
    def change(v: Valid) -> None:
        getattr(v.step, name)[index] = value

    return change


def narrow_buffer(v: Valid) -> None:
    v.machine._buffers[0] = Buffer(v.machine._buffers[0].data, 31)


def bad_matrix(name: str, value: int | None) -> Callable[[Valid], None]:
    def change(v: Valid) -> None:
        setattr(v.packed.matrix, name, value)

    return change


BROKEN: dict[str, Callable[[Valid], None]] = {
    "token id beyond the embedding": set_array("tokens", 7, 50),
    "negative token id": set_array("tokens", 7, -1),
    "block id beyond the pool": set_array("tables", (0, 2), 99),
    "negative block id": set_array("tables", (1, 0), -1),
    "position beyond the rotation table": set_array("position", 0, 55),
    "negative position": set_array("position", 0, -1),
    "more blocks than the table has": set_array("position", 1, 48),
    "negative table row": set_array("table", 0, -1),
    "an empty segment": set_array("start", 1, 0),
    "segments that do not end at num_tokens": set_array("start", 2, 14),
    "logit row beyond the tokens": set_array("logits", 1, 15),
    "logit rows out of order": set_array("logits", 0, 14),
    "no tokens": set_batch(num_tokens=0),
    "no segments": set_batch(num_segments=0),
    "null tokens": set_batch(tokens=None),
    "null tables": set_batch(block_tables=None),
    "head_dim not a multiple of 8": set_model(head_dim=12),
    "heads not a multiple of kv heads": set_model(num_heads=7),
    "block size of 3": set_model(block_size=3),
    "block size of 24": set_model(block_size=24),
    "block size of 0": set_model(block_size=0),
    "blocks too small": set_model(block_bytes=16),
    "unknown KV dtype": set_model(kv_dtype=2),
    "odd rotation": set_model(rope_dim=3),
    "null cache": set_model(kv=None),
    "unknown op": set_op(1, kind=99),
    "buffer that does not exist": set_op(1, input=2),
    "negative buffer": set_op(1, output=-1),
    "layer that does not exist": set_op(4, layer=1),
    "linear in place": set_op(2, output=0),
    "norm wider than its buffer": set_op(1, width=WIDTH + 1),
    "norm without weights": set_op(1, vector=None),
    "gate wider than its buffer": set_op(5, width=WIDTH),
    "linear into a buffer that is too narrow": narrow_buffer,
    "matrix without data": bad_matrix("data", None),
    "matrix of an unknown dtype": bad_matrix("dtype", 4),
    "matrix with ragged padding": bad_matrix("rows_padded", 63),
    "integer matrix without scales": bad_matrix("dtype", 2),
}


def test_a_valid_step_runs(library: Library, pool: Pool) -> None:
    """The step that the next test breaks is accepted as it is."""
    Valid().run(library, pool)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_is_refused(library: Library, pool: Pool, name: str) -> None:
    """Whatever can be checked is checked before anything runs: an error, no crash and no output."""
    valid = Valid()
    before = valid.cache.memory.copy()
    BROKEN[name](valid)
    if name.endswith("matrix") or "matrix" in name:
        for op in valid.machine.ops:
            if op.matrix:
                op.matrix.contents = valid.packed.matrix
    with pytest.raises(NativeError, match="refused"):
        valid.run(library, pool)
    assert (valid.cache.memory == before).all()
    assert not any(buffer.any() for buffer in valid.buffers)


def test_null_arguments_are_refused(library: Library, pool: Pool) -> None:
    """Null pointers at the border are errors."""
    valid = Valid()
    forward = library.functions.hopon_forward
    model, batch = ctypes.byref(valid.model), ctypes.byref(valid.batch)
    assert forward(None, model, batch) == forward(pool.handle, None, batch) == forward(pool.handle, model, None) == -1
