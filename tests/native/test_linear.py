"""Linear kernels of every dtype and level: the exact arithmetic of hopon.h, and bits that depend on one row only.

The models here do every rounding of hopon.h one by one. A fused step is a product and a sum in extended precision (64
bits of fraction, in which all the products are exact) rounded once to f32, so results are compared bit by bit.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.native import Dtype, Library, Pool, load
from hopon.native import build as builder
from hopon.native.pack import (
    PackedMatrix,
    from_bf16,
    pack_bf16,
    pack_codes,
    pack_f32,
    quantise,
    split_scales,
    to_bf16,
    unpack,
    unpack_codes,
)

F32 = NDArray[np.float32]
Step = Callable[[F32, F32, F32], F32]

MATRICES = [(1, 1), (7, 33), (64, 32), (130, 172), (192, 100), (72, 576), (65, 1536)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 31, 32, 33, 34]
EXTENDED = np.finfo(np.longdouble).nmant >= 63


def make(
    dtype: Dtype, rows: int, cols: int, *, bias: bool = False, seed: int = 0, symmetric: bool = False
) -> PackedMatrix:
    rng = np.random.default_rng([seed, rows, cols])
    w = rng.standard_normal((rows, cols), dtype=np.float32)
    b = rng.standard_normal(rows, dtype=np.float32) if bias else None
    if dtype == Dtype.F32:
        return pack_f32(w, bias=b)
    if dtype == Dtype.BF16:
        return pack_bf16(w, bias=b)
    bits = 8 if dtype == Dtype.I8 else 4
    codes, scale, offset = quantise(w, bits)
    codes[rows // 2] = 2**bits - 1  # the largest sums that codes can give
    if symmetric:
        offset[:] = 0
    else:
        offset += np.random.default_rng(seed).standard_normal(offset.shape, dtype=np.float32) / 8
        offset[rows // 2] = 0
    return pack_codes(codes, scale, offset, bits, bias=b)


def activations(m: int, cols: int, seed: int = 1) -> F32:
    return np.random.default_rng([seed, m, cols]).standard_normal((m, cols), dtype=np.float32)


def fused(a: F32, b: F32, c: F32) -> F32:
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float32)


def unfused(a: F32, b: F32, c: F32) -> F32:
    return a * b + c


def largest_of(half: NDArray[np.uint32]) -> F32:
    """The largest float with these upper 16 bits."""
    return ((half << 16) + np.uint32(0xFFFF)).view(np.float32)


def prepare_integers(x: F32, cols_padded: int, allowed: int) -> tuple[NDArray[np.int64], F32]:
    """Fixed point rows and their scales."""
    padded = np.zeros((len(x), cols_padded), np.float32)
    padded[:, : x.shape[1]] = np.abs(x)
    quads = padded.reshape(len(x), -1, 4).max(axis=2).view(np.uint32) >> 16
    most = quads.max(axis=1)
    bulk = np.sort(quads, axis=1)[:, quads.shape[1] - 1 - allowed]
    bulk = np.maximum(bulk, np.maximum(most.astype(np.int64) - 2048, 0)).astype(np.uint32)
    scale = np.maximum(largest_of(bulk) / np.float32(127), largest_of(most) / np.float32(32639))
    scale[scale < np.finfo(np.float32).tiny] = 0
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    q = np.zeros((len(x), cols_padded), np.int64)
    q[:, : x.shape[1]] = np.rint(x * inverse[:, None])
    assert np.abs(q).max() <= 32639
    has_high = (np.abs(q) > 127).reshape(len(x), -1, 4).any(axis=2)
    assert (has_high.sum(axis=1) <= allowed).all()
    return q, scale


def model(level: str, matrix: PackedMatrix, x: F32) -> F32:
    """y = x . W^T without bias, every rounding as in hopon.h."""
    step: Step = unfused if level == "portable" else fused
    m, rows = len(x), matrix.rows
    total = np.zeros((m, rows), np.float32)
    if matrix.dtype in (Dtype.F32, Dtype.BF16):
        w = unpack(matrix).astype(np.float32)
        order = range(matrix.cols)
        if matrix.dtype == Dtype.BF16:
            x = from_bf16(to_bf16(x))
            if level == "amx":
                return model_of_tiles(w, x)
            if level == "avx512":  # the instruction adds the second product of a pair first
                order_list = [k ^ 1 for k in range(matrix.cols + matrix.cols % 2)]
                order = [k for k in order_list if k < matrix.cols]  # type: ignore[assignment]
        for k in order:
            total = step(x[:, k : k + 1], w[None, :, k], total)
        return total
    q, scale = prepare_integers(x, matrix.cols_padded, matrix.struct().outliers)
    codes = np.zeros((rows, matrix.cols_padded), np.int64)
    codes[:, : matrix.cols] = unpack_codes(matrix)
    assert matrix.scales is not None
    groups = matrix.cols_padded // 32
    words, pairs = split_scales(matrix.scales, matrix.cols)
    halves = np.ascontiguousarray(words.transpose(1, 0, 2)).reshape(groups, -1)[:, :rows]
    scales = halves.view(np.float16).astype(np.float32)
    zero = 128 if matrix.dtype == Dtype.I8 else 8
    sums = q.reshape(m, groups, 32).sum(axis=2)
    rounded = np.zeros((m, 2 * pairs.shape[1]), np.float32)
    rounded[:, :groups] = from_bf16(to_bf16(sums.astype(np.float32)))
    offsets = from_bf16(pairs).transpose(1, 3, 0, 2).reshape(rounded.shape[1], -1)[:, :rows]
    if matrix.struct().has_offsets:
        for g in range(len(offsets)):
            group = g ^ 1 if level in ("amx", "avx512") else g  # as in a product of bf16
            total = step(rounded[:, group : group + 1], offsets[None, group], total)
    high = (q + 128) >> 8
    low = q - 256 * high
    for g, d in enumerate(scales):
        part = slice(32 * g, 32 * g + 32)
        exact = low[:, part] @ codes[:, part].T - zero * sums[:, g : g + 1]
        total = step(exact.astype(np.float32), d[None], total)
    outliers = np.zeros((m, rows), np.float32)
    for quad in range(matrix.cols_padded // 4):
        part = slice(4 * quad, 4 * quad + 4)
        some = high[:, part].any(axis=1)
        products = (high[some, part] @ codes[:, part].T).astype(np.float32)
        outliers[some] = step(products, scales[None, quad // 8], outliers[some])
    return step(outliers, np.full((1, 1), 256, np.float32), total) * scale[:, None]


def model_of_tiles(w: F32, x: F32) -> F32:
    """The matrix unit's bf16 product: steps of 32 inputs, in each a chain over the even ones and one over the odd."""
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, w.shape[1], 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(start, min(start + 32, w.shape[1])):
            chains[k % 2] = fused(x[:, k : k + 1], w[None, :, k], chains[k % 2])
        total = total + (chains[0] + chains[1])
    return total


def same_bits(got: F32, want: F32) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.skipif(not EXTENDED, reason="fused steps are modelled in 80-bit floats, which this machine lacks")
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("shape", MATRICES)
def test_bits_are_those_of_the_model(library: Library, pool2: Pool, dtype: Dtype, shape: tuple[int, int]) -> None:
    """Results equal the step-by-step model of hopon.h in every bit, for K padded and not and N of any size."""
    x = activations(23, shape[1])
    for matrix in (make(dtype, *shape), replace(make(dtype, *shape, symmetric=True), outliers=1)):
        same_bits(library.linear(pool2, matrix.struct(), x), model(library.level, matrix, x) + np.float32(0))


@pytest.mark.parametrize("dtype", Dtype)
def test_close_to_exact_arithmetic(library: Library, pool: Pool, dtype: Dtype) -> None:
    """Results are as near to float64 on the same weights as the rounding of the inputs allows."""
    matrix = make(dtype, 100, 576)
    x = activations(9, 576)
    exact, size = x @ unpack(matrix).T, np.abs(x) @ np.abs(unpack(matrix)).T
    relative = {Dtype.F32: 2e-6, Dtype.BF16: 5e-4, Dtype.I8: 2e-3, Dtype.I4: 2e-3}[dtype]
    assert (np.abs(library.linear(pool, matrix.struct(), x) - exact) < relative * size + 1e-4).all()


def check_identity(library: Library, dtype: Dtype, row_counts: list[int]) -> None:
    """Row i of a call with m rows has the bits that it has alone, for one thread and two."""
    with library.pool(1) as one, library.pool(2) as two:
        for rows, cols in ((130, 172), (64, 576), (200, 96)):
            matrix = make(dtype, rows, cols, bias=True)
            most = max(row_counts)
            x = activations(most, cols) * np.linspace(0.01, 100, most, dtype=np.float32)[:, None]
            alone = np.concatenate([library.linear(one, matrix.struct(), x[i : i + 1]) for i in range(most)])
            for m in row_counts:
                for threads in (one, two):
                    same_bits(library.linear(threads, matrix.struct(), x[most - m :]), alone[most - m :])


@pytest.mark.parametrize("dtype", Dtype)
def test_a_row_is_the_same_in_any_crowd(library: Library, dtype: Dtype) -> None:
    """Bits of a row do not depend on the number of rows, its place among them, or the threads."""
    check_identity(library, dtype, [*ROWS, 150, 301])


@pytest.mark.parametrize("dtype", Dtype)
def test_bias_and_accumulate(library: Library, pool2: Pool, dtype: Dtype) -> None:
    """The sum is (product + bias) + what was there, rounded after each; columns and rows outside are not touched."""
    for rows, m in ((130, 7), (64, 1), (33, 3)):
        with_bias, plain = make(dtype, rows, 100, bias=True), make(dtype, rows, 100)
        assert with_bias.bias is not None
        x = np.full((m, 117), np.nan, np.float32)
        x[:, :100] = activations(m, 100)
        product = library.linear(pool2, plain.struct(), x)
        y = np.full((m + 1, rows + 5), 7.5, np.float32)
        before = activations(m, rows, seed=2)
        y[:m, :rows] = before
        library.linear(pool2, with_bias.struct(), x, y[:m], accumulate=True)
        same_bits(y[:m, :rows], (product + with_bias.bias) + before)
        library.linear(pool2, with_bias.struct(), x, y[:m])
        same_bits(y[:m, :rows], product + with_bias.bias)
        library.linear(pool2, plain.struct(), x, y[:m], accumulate=True)
        same_bits(y[:m, :rows], product + (product + with_bias.bias))
        assert (y[m] == 7.5).all()
        assert (y[:, rows:] == 7.5).all()


@pytest.mark.parametrize("dtype", Dtype)
def test_rows_of_every_size(library: Library, pool: Pool, dtype: Dtype) -> None:
    """Zero rows give zeros; rows scaled by powers of two give scaled results; an outlier spoils no other row."""
    matrix = make(dtype, 70, 96)
    x = activations(6, 96)
    x[1] = 0
    x[2, 5] = 1e30
    x[3] *= np.float32(2.0**-60)
    x[4] *= np.float32(2.0**60)
    y = library.linear(pool, matrix.struct(), x)
    assert (y[1] == 0).all()
    assert np.isfinite(y).all()
    plain = x.copy()
    plain[3] *= np.float32(2.0**60)
    plain[4] *= np.float32(2.0**-60)
    want = library.linear(pool, matrix.struct(), plain)
    same_bits(y[3], want[3] * np.float32(2.0**-60))
    same_bits(y[4], want[4] * np.float32(2.0**60))
    exact = x[2].astype(np.float64) @ unpack(matrix).T
    np.testing.assert_allclose(y[2], exact, rtol=1e-2, atol=1e-2 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", Dtype)
def test_subnormal_rows_are_finite_and_tiny(library: Library, pool: Pool, dtype: Dtype) -> None:
    """Rows of subnormal numbers give results no larger than exact arithmetic does (they may count as zero)."""
    matrix = make(dtype, 64, 64)
    for size in (1e-45, 1e-40, 1e-38, 3e-34, 5e-34):
        x = np.full((2, 64), size, np.float32)
        x[1, ::2] = 0
        y = library.linear(pool, matrix.struct(), x).astype(np.float64)
        bound = 1.02 * np.abs(x.astype(np.float64)) @ np.abs(unpack(matrix)).T + 1e-44 * 64
        assert (np.abs(y) <= bound).all()


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_stays_in_its_row(library: Library, pool: Pool, dtype: Dtype, bad: float) -> None:
    """NaN and infinity make their own row's results non-finite, and no other's."""
    matrix = make(dtype, 64, 96)
    x = activations(5, 96)
    clean = library.linear(pool, matrix.struct(), x)
    x[2, 77] = bad
    y = library.linear(pool, matrix.struct(), x)
    assert not np.isfinite(y[2]).any()
    same_bits(np.delete(y, 2, axis=0), np.delete(clean, 2, axis=0))


@pytest.mark.parametrize("dtype", [Dtype.I8, Dtype.I4])
def test_a_few_large_inputs_cost_the_others_little(library: Library, pool: Pool, dtype: Dtype) -> None:
    """Inputs 100 times the others leave the error where it is, if they are in 1 of 16 quads; not if in all."""
    matrix = make(dtype, 100, 576, symmetric=True)  # offsets meet the sums in bfloat16, which is another error
    x = activations(8, 576)
    errors = []
    for every in (577, 64, 4):
        spiked = x.copy()
        spiked[:, ::every] *= 100
        exact = spiked.astype(np.float64) @ unpack(matrix).T
        errors.append(np.abs(library.linear(pool, matrix.struct(), spiked) - exact).mean())
    plain, few, many = errors
    assert few < 1.5 * plain
    assert many > 10 * plain


def test_integer_sums_at_their_limits(library: Library, pool: Pool) -> None:
    """The largest codes and digits give exact sums: nothing saturates or wraps."""
    codes = np.full((64, 64), 255, np.uint8)
    one, zero = np.full((64, 2), 1, np.float16), np.full((64, 2), 128, np.float32)
    x = np.ones((4, 64), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 32:] = 0
    y = library.linear(pool, pack_codes(codes, one, zero, 8).struct(), x)
    np.testing.assert_allclose(y[:, 0], [255 * 64, -255 * 64, 0, 255 * 32], rtol=5e-3)


def test_no_rows_is_no_work(library: Library, pool: Pool) -> None:
    """A call without rows succeeds and writes nothing."""
    assert library.linear(pool, make(Dtype.F32, 5, 5).struct(), np.empty((0, 5), np.float32)).shape == (0, 5)


FMA_LINE = "t[r][v] = fma(a, wk[v], t[r][v]);"
ONLY_LINEAR = """
#include "pool.h"
#include "linear.h"
extern "C" {
hopon_pool *hopon_pool_create(int32_t threads) { return new hopon_pool(threads); }
void hopon_pool_destroy(hopon_pool *pool) { delete pool; }
int32_t hopon_linear(hopon_pool *pool, const hopon_matrix *w, const float *x, int64_t ldx, float *y, int64_t ldy,
                     int32_t m, int32_t accumulate) {
  hopon::FloatMode mode;
  pool->reserve(hopon::kSlotLinear, hopon::HOPON_LEVEL::linear_scratch_bytes(*w, m));
  pool->together(hopon::HOPON_LEVEL::LINEAR_RUNS, false, [&](hopon_pool::Team &team) {
    hopon::HOPON_LEVEL::linear(team, *w, x, ldx, y, ldy, m, accumulate != 0, {}, [](int64_t) {});
  });
  return 0;
}
}
"""
MUTANTS: dict[str, tuple[Dtype, str, list[tuple[str, str]]]] = {
    "two chains over k in tiles of several rows": (
        Dtype.F32,
        "linear.h",
        [
            (
                "f32x16 wk[V];",
                "static thread_local f32x16 carry[R][V];\n"
                "if (R > 1 && k == cols / 2) for (int i = 0; i < R * V; i++)\n"
                "{ carry[i / V][i % V] = t[i / V][i % V]; t[i / V][i % V] = zero(); }\n"
                "f32x16 wk[V];",
            ),
            (FMA_LINE, FMA_LINE + " if (R > 1 && k == cols - 1) t[r][v] = carry[r][v] + t[r][v];"),
        ],
    ),
    "one scale for a tile": (
        Dtype.I8,
        "linear_int.h",
        [
            (
                "*(const float *)(x + at.scale)",
                "*(const float *)(x - r * job.row_bytes + at.scale)",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path, built_levels: tuple[str, ...]) -> None:
    """The identity check can fail: each way to let a row's neighbours in makes it fail."""
    assert "portable" in built_levels
    dtype, file, changes = MUTANTS[name]
    check_identity(load("portable"), dtype, [1, 2, 3, 4])
    sources = tmp_path / "src"
    shutil.copytree(builder.SOURCES, sources)
    text = (sources / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{file} has no single {old!r} to mutate"
        text = text.replace(old, new)
    (sources / file).write_text(text)
    (sources / "only_linear.cpp").write_text(ONLY_LINEAR)
    path = tmp_path / "hopon-portable.so"
    flags = [flag for flag in builder.COMMON_FLAGS if flag not in ("-O3", "-fvisibility=hidden")]
    command = [*builder.find_compiler(), *flags, "-O1", "-DHOPON_LEVEL_PORTABLE", str(sources / "only_linear.cpp")]
    subprocess.run([*command, "-o", str(path)], check=True, capture_output=True)
    functions, real = ctypes.CDLL(str(path)), load("portable").functions
    for function in ("hopon_pool_create", "hopon_pool_destroy", "hopon_linear"):
        ours, theirs = getattr(functions, function), getattr(real, function)
        ours.restype, ours.argtypes = theirs.restype, theirs.argtypes
    with pytest.raises(AssertionError):
        check_identity(Library("portable", functions), dtype, [1, 2, 3, 4])
