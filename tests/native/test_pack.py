"""Packing: layouts of hopon.h element by element, rounding, quality of quantisation, arenas, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.native import Dtype
from hopon.native.pack import (
    PackedMatrix,
    aligned_empty,
    from_bf16,
    pack_bf16,
    pack_codes,
    pack_f32,
    packed_sizes,
    quantise,
    to_bf16,
    unpack,
    unpack_codes,
)

SHAPES = [(1, 1), (3, 33), (64, 32), (65, 100), (130, 172), (192, 576)]


def random_weights(rows: int, cols: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def random_codes(rows: int, cols: int, bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float32]]:
    rng = np.random.default_rng(rows * cols + bits)
    groups = -(-cols // 32)
    codes = rng.integers(0, 2**bits, (rows, cols), dtype=np.uint8)
    scale = rng.standard_normal((rows, groups)).astype(np.float16)
    offset = from_bf16(to_bf16(rng.standard_normal((rows, groups), dtype=np.float32)))
    return codes, scale, offset


@pytest.mark.parametrize("shape", SHAPES)
def test_floats_come_back(shape: tuple[int, int]) -> None:
    """f32 weights survive packing exactly, bf16 ones as their rounded values, and the padding is zero."""
    w = random_weights(*shape)
    for packed, want in ((pack_f32(w), w), (pack_bf16(w), from_bf16(to_bf16(w)))):
        np.testing.assert_array_equal(unpack(packed), want)
        number = np.float32 if packed.dtype == Dtype.F32 else np.uint16
        assert np.count_nonzero(packed.data.view(number)) == w.size


def test_layouts_are_those_of_the_header() -> None:
    """Every value of a small matrix of each dtype lies at the index that hopon.h gives."""
    rows, cols, k_padded = 130, 70, 96
    w = random_weights(rows, cols)
    f32 = pack_f32(w).data.view(np.float32)
    bf16, bits = pack_bf16(w).data.view(np.uint16), to_bf16(w)
    c8, scale, offset = random_codes(rows, cols, 8)
    i8 = pack_codes(c8, scale, offset, 8)
    c4, _, _ = random_codes(rows, cols, 4)
    i4 = pack_codes(c4, scale, offset, 4)
    assert i8.scales is not None
    words, offset_bits = i8.scales, to_bf16(offset)
    for n in range(rows):
        block, lane = divmod(n, 64)
        for k in range(cols):
            assert f32[(block * k_padded + k) * 64 + lane] == w[n, k]
            assert bf16[((block * k_padded // 2 + k // 2) * 64 + lane) * 2 + k % 2] == bits[n, k]
            assert i8.data[((block * k_padded // 4 + k // 4) * 64 + lane) * 4 + k % 4] == c8[n, k]
            group, high, quad, i = k // 32, k % 32 // 16, k % 16 // 4, k % 4
            byte = i4.data[(((block * k_padded // 32 + group) * 4 + quad) * 64 + lane) * 4 + i]
            assert (byte >> 4 if high else byte & 15) == c4[n, k]
            base = block * (3 + 4)  # groups, and offsets of two pairs of groups
            assert words[(base + group) * 64 + lane] == scale.view(np.uint16)[n, group]
            assert words[(base + 3 + group // 2 * 2) * 64 + lane * 2 + group % 2] == offset_bits[n, group]
        assert words[(base + 3 + 2) * 64 + lane * 2 + 1] == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_come_back(shape: tuple[int, int], bits: int) -> None:
    """Codes survive packing, and w = scale * (code - zero) + offset."""
    codes, scale, offset = random_codes(*shape, bits)
    packed = pack_codes(codes, scale, offset, bits)
    np.testing.assert_array_equal(unpack_codes(packed), codes)
    wide = [np.repeat(a.astype(np.float64), 32, axis=1)[:, : shape[1]] for a in (scale, offset)]
    np.testing.assert_array_equal(unpack(packed), wide[0] * (codes - 2.0 ** (bits - 1)) + wide[1])
    assert packed.scales is not None
    assert np.count_nonzero(packed.scales) == np.count_nonzero(scale) + np.count_nonzero(offset)
    assert packed.struct().has_offsets
    assert not pack_codes(codes, scale, 0 * offset, bits).struct().has_offsets


def test_bf16_rounds_to_nearest_even() -> None:
    """Every bf16 value keeps its bits; ties go to the even neighbour, others to the nearest; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    values = (bits << 16).view(np.float32)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(to_bf16(values)[numbers], bits[numbers])
    assert np.isnan(from_bf16(to_bf16(values[~numbers]))).all()
    finite = np.isfinite(values)
    for below_tie, step in ((0x7FFF, 0), (0x8000, None), (0x8001, 1)):
        rounded = to_bf16(((bits << 16) | below_tie).view(np.float32))
        want = bits + (bits & 1) if step is None else bits + step
        np.testing.assert_array_equal(rounded[finite], want[finite])
    assert np.isnan(from_bf16(to_bf16(np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)))).all()


@pytest.mark.parametrize("cols", [32, 100, 576])
def test_eight_bits_are_symmetric_and_close(cols: int) -> None:
    """8-bit quantisation errs by at most half a (half-rounded) step; zero is exact; there are no offsets."""
    w = random_weights(70, cols)
    w[5] = 0
    w[6, :32] = 0
    w[7, 3] = 1000
    codes, scale, offset = quantise(w, 8)
    assert not offset.any()
    step = np.repeat(scale.astype(np.float64), 32, axis=1)[:, :cols]
    error = np.abs(unpack(pack_codes(codes, scale, offset, 8)) - w)
    assert (error <= step * 0.501).all()
    assert (error[w == 0] == 0).all()
    group_max = np.abs(w[:, :32]).max(axis=1)
    assert (scale[:, 0] <= group_max / 127 * 1.002 + 1e-7).all()


@pytest.mark.parametrize("cols", [32, 100, 576])
def test_four_bits_use_the_range_of_their_group(cols: int) -> None:
    """4-bit quantisation errs by at most half a step plus the offset's rounding; constant groups are exact."""
    w = random_weights(70, cols) + 3
    w[5] = 0.75
    w[6, :32] = 0
    codes, scale, offset = quantise(w, 4)
    assert codes.max() == 15
    step = np.repeat(scale.astype(np.float64), 32, axis=1)[:, :cols]
    slack = np.repeat(np.abs(offset.astype(np.float64)), 32, axis=1)[:, :cols] * 2**-8
    error = np.abs(unpack(pack_codes(codes, scale, offset, 4)) - w)
    assert (error <= step * 0.501 + slack).all()
    assert (error[5] == 0).all()
    assert (error[6, :32] == 0).all()


def test_tiny_and_huge_weights() -> None:
    """Weights below the smallest half scale vanish or stay within one step; those beyond a half's range are refused."""
    tiny = np.full((1, 32), 1e-9, np.float32)
    for bits in (8, 4):
        assert np.abs(unpack(pack_codes(*quantise(tiny, bits), bits))).max() <= 1e-5
        for bad in (1e9, np.inf, np.nan, -np.inf):
            with pytest.raises(ValueError, match="finite and at most 60000"):
                quantise(np.full((1, 32), bad, np.float32), bits)


@pytest.mark.parametrize("dtype", Dtype)
def test_packs_into_an_arena(dtype: Dtype) -> None:
    """Packing into given memory writes the same bytes as packing into new memory, all of them and nothing else."""
    rows, cols = 70, 33
    data_bytes, scale_bytes = packed_sizes(dtype, rows, cols)
    arena = aligned_empty(64 + data_bytes + scale_bytes + 64, np.uint8)
    arena[:] = 0xA5
    data, scales = arena[64 : 64 + data_bytes], arena[64 + data_bytes :][:scale_bytes].view(np.uint16)
    w = random_weights(rows, cols)
    if dtype == Dtype.F32:
        fresh, placed = pack_f32(w), pack_f32(w, out=data)
    elif dtype == Dtype.BF16:
        fresh, placed = pack_bf16(w), pack_bf16(w, out=data)
    else:
        bits = 8 if dtype == Dtype.I8 else 4
        fresh = pack_codes(*random_codes(rows, cols, bits), bits)
        placed = pack_codes(*random_codes(rows, cols, bits), bits, out=data, out_scales=scales)
        assert placed.scales is not None
        assert fresh.scales is not None
        assert fresh.scales.tobytes() == scales.tobytes()
        assert np.shares_memory(placed.scales, arena)
    assert fresh.data.tobytes() == data.tobytes()
    assert np.shares_memory(placed.data, arena)
    assert (arena[:64] == 0xA5).all()
    assert (arena[-64:] == 0xA5).all()
    assert fresh.nbytes == data_bytes + scale_bytes


def test_whatever_the_memory_order() -> None:
    """Transposed, strided and double precision weights pack to the same bytes as a plain copy of them."""
    w = random_weights(100, 80)
    want = pack_f32(w[::2, ::2].copy()).data
    np.testing.assert_array_equal(pack_f32(w[::2, ::2]).data, want)
    np.testing.assert_array_equal(pack_f32(np.asfortranarray(w[::2, ::2])).data, want)
    codes, scale, offset = random_codes(80, 64, 4)
    wanted = pack_codes(codes[::2].copy(), scale[::2].copy(), offset[::2].copy(), 4)
    np.testing.assert_array_equal(pack_codes(codes[::2], scale[::2], offset[::2], 4).data, wanted.data)


def test_many_rows_are_packed_in_pieces() -> None:
    """A matrix larger than a piece of work packs to the same bytes as its halves packed by themselves."""
    w = random_weights(6000, 576)
    whole = pack_bf16(w).data
    halves = [pack_bf16(w[:3008]).data, pack_bf16(w[3008:]).data]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    for bits in (8, 4):
        together = pack_codes(*quantise(w, bits), bits)
        alone = pack_codes(*quantise(w[3008:], bits), bits)
        np.testing.assert_array_equal(unpack(together)[3008:], unpack(alone))


def test_bad_input_is_named() -> None:
    """Wrong shapes, types, sizes and codes are errors that name the value."""
    codes, scale, offset = random_codes(4, 40, 8)
    with pytest.raises(ValueError, match="must be below 16, got"):
        pack_codes(codes | np.uint8(16), scale, offset, 4)
    with pytest.raises(ValueError, match=r"offset must be float32 \(4, 2\)"):
        pack_codes(codes, scale, offset[:, :1], 8)
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 5"):
        pack_codes(codes, scale, offset, 5)
    with pytest.raises(ValueError, match="must be 16384 contiguous bytes"):
        pack_f32(random_weights(4, 40), out=aligned_empty(100, np.uint8))
    with pytest.raises(ValueError, match="64-byte aligned"):
        pack_codes(codes, scale, offset, 8, out=aligned_empty(4097, np.uint8)[1:])
    with pytest.raises(ValueError, match="0 x 3"):
        packed_sizes(Dtype.F32, 0, 3)
    with pytest.raises(ValueError, match="bias must be 4 floats"):
        pack_f32(random_weights(4, 40), bias=np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="bytes of scales"):
        PackedMatrix(dtype=Dtype.I8, rows=4, cols=40, data=aligned_empty(4096, np.uint8))
