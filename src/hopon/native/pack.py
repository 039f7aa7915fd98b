"""Packed weight matrices: rounding and the memory layouts of hopon.h, in numpy.

Turns a matrix [N outputs, K inputs] into the blocks of 64 columns that the kernels walk, and back (for tests). Knows
nothing of files, models or threads. A caller who has one big arena passes views of it as ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon.native import Dtype, Matrix, pointer

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Bits16 = NDArray[np.uint16]

BLOCK = 64
"""Outputs per packed block; N is padded to a multiple of it."""
GROUP = 32
"""Inputs that share a scale and an offset; K is padded to a multiple of it."""
QUAD = 4
"""Inputs that one integer instruction multiplies and sums; the unit of second digits."""
ALIGNMENT = 64
CHUNK_VALUES = 1 << 17
"""Values worked on at a time: temporaries stay in the cache."""
MAX_WEIGHT = 60000
"""Largest weight that can be quantised: its group's scale still fits a half."""

_BITS_PER_VALUE = {Dtype.F32: 32, Dtype.BF16: 16, Dtype.I8: 8, Dtype.I4: 4}


def padded(n: int, multiple: int) -> int:
    """``n`` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def packed_sizes(dtype: Dtype, rows: int, cols: int) -> tuple[int, int]:
    """Bytes of ``data`` and of ``scales`` of a packed [rows, cols] matrix. Both are multiples of 64."""
    if rows < 1 or cols < 1:
        raise ValueError(f"a matrix needs at least one row and one column, got {rows} x {cols}")
    n, groups = padded(rows, BLOCK), padded(cols, GROUP) // GROUP
    data = n * groups * GROUP * _BITS_PER_VALUE[dtype] // 8
    return data, n * (groups + padded(groups, 2)) * 2 if dtype in (Dtype.I8, Dtype.I4) else 0


def zero_code(bits: int) -> int:
    """The code of a weight that equals its group's offset: the middle one."""
    return 1 << (bits - 1)


def split_scales(scales: Bits16, cols: int) -> tuple[Bits16, Bits16]:
    """Views of the scales [N/64, K/32, 64], halves, and the offsets [N/64, ceil(K/64), 64, 2], bfloat16."""
    groups = padded(cols, GROUP) // GROUP
    blocks = scales.reshape(-1, groups + padded(groups, 2), BLOCK)
    return blocks[:, :groups], blocks[:, groups:].reshape(len(blocks), -1, BLOCK, 2)


def has_offsets(scales: Bits16, cols: int) -> bool:
    """Whether some offset is not zero."""
    return bool((split_scales(scales, cols)[1] & np.uint16(0x7FFF)).any())


def aligned_empty(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised array whose first byte lies at a multiple of 64."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    result: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMatrix:
    """Weights as the kernels read them: y = x . W^T + bias with W [rows, cols].

    Args:
        dtype: how the weights are stored.
        rows: outputs (N), without padding.
        cols: inputs (K), without padding.
        data: flat bytes, 64-byte aligned, ``packed_sizes(...)[0]`` of them.
        scales: flat 16-bit words [N/64][K/32 + 2 ceil(K/64)][64], see ``split_scales``; None unless I8 or I4.
        bias: [rows] or None.
        outliers: quads of a row of x that may have a second digit, one in eight by default. For I8 and I4.
    """

    dtype: Dtype
    rows: int
    cols: int
    data: Bytes
    scales: Bits16 | None = None
    bias: Floats | None = None
    outliers: int | None = None

    def __post_init__(self) -> None:
        data_bytes, scale_bytes = packed_sizes(self.dtype, self.rows, self.cols)
        _check_buffer("data", self.data, data_bytes)
        if (self.scales is None) != (scale_bytes == 0):
            raise ValueError(f"{self.dtype.name} weights have {scale_bytes} bytes of scales")
        if self.scales is not None:
            _check_buffer("scales", self.scales, scale_bytes)
        if self.bias is not None and (self.bias.shape != (self.rows,) or self.bias.dtype != np.float32):
            raise ValueError(f"bias must be {self.rows} floats, got {self.bias.dtype} {self.bias.shape}")

    @property
    def rows_padded(self) -> int:
        """Outputs including the padding."""
        return padded(self.rows, BLOCK)

    @property
    def cols_padded(self) -> int:
        """Inputs including the padding."""
        return padded(self.cols, GROUP)

    def struct(self) -> Matrix:
        """What the kernels take; it keeps this object's memory alive."""
        matrix = _OwningMatrix(
            dtype=self.dtype,
            rows=self.rows,
            cols=self.cols,
            rows_padded=self.rows_padded,
            cols_padded=self.cols_padded,
            outliers=self.cols_padded // QUAD // 8 if self.outliers is None else self.outliers,
            has_offsets=self.scales is not None and has_offsets(self.scales, self.cols),
            data=pointer(self.data),
            scales=pointer(self.scales),
            bias=pointer(self.bias),
        )
        matrix.owner = self
        return matrix

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class _OwningMatrix(Matrix):
    owner: PackedMatrix


def _check_buffer(name: str, array: NDArray[Any], size: int) -> None:
    if array.nbytes != size or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be {size} contiguous bytes, got {array.nbytes} of shape {array.shape}")
    if array.ctypes.data % ALIGNMENT:
        raise ValueError(f"{name} must be {ALIGNMENT}-byte aligned, its address is {array.ctypes.data:#x}")


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return result


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    """The floats that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack_f32(weights: Floats, *, bias: Floats | None = None, out: Bytes | None = None) -> PackedMatrix:
    """Packs [N, K] floats unchanged."""
    return _pack_floats(Dtype.F32, weights, bias, out)


def pack_bf16(weights: Floats, *, bias: Floats | None = None, out: Bytes | None = None) -> PackedMatrix:
    """Packs [N, K] floats rounded to bfloat16."""
    return _pack_floats(Dtype.BF16, weights, bias, out)


def _buffer(name: str, out: NDArray[Any] | None, size: int, dtype: Any) -> NDArray[Any]:
    if out is None:
        return aligned_empty(size // np.dtype(dtype).itemsize, dtype)
    _check_buffer(name, out, size)
    return out.view(dtype)


def _chunks(rows: int, cols: int) -> list[tuple[int, int]]:
    """Ranges of rows, each a whole number of blocks but for the last row."""
    step = max(1, CHUNK_VALUES // (BLOCK * cols)) * BLOCK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _pad(chunk: NDArray[Any], cols: int) -> NDArray[Any]:
    """A chunk with its rows padded to whole blocks and its columns to ``cols``, by zeros."""
    rows = padded(chunk.shape[0], BLOCK)
    if chunk.shape == (rows, cols):
        return chunk
    result = np.zeros((rows, cols), chunk.dtype)
    result[: chunk.shape[0], : chunk.shape[1]] = chunk
    return result


def _pack_floats(dtype: Dtype, weights: Floats, bias: Floats | None, out: Bytes | None) -> PackedMatrix:
    if weights.ndim != 2:
        raise ValueError(f"weights must be [N, K], got shape {weights.shape}")
    rows, cols = weights.shape
    cols_padded = padded(cols, GROUP)
    data = _buffer("out", out, packed_sizes(dtype, rows, cols)[0], np.uint8)
    # bf16 moves as pairs of inputs, 32 bits each.
    words = data.view(np.float32).reshape(-1, cols_padded if dtype == Dtype.F32 else cols_padded // 2, BLOCK)
    for start, end in _chunks(rows, cols_padded):
        chunk = _pad(np.ascontiguousarray(weights[start:end], np.float32), cols_padded)
        if dtype == Dtype.BF16:
            chunk = to_bf16(chunk).view(np.float32)
        blocks = chunk.reshape(-1, BLOCK, words.shape[1])
        words[start // BLOCK : start // BLOCK + len(blocks)] = blocks.transpose(0, 2, 1)
    return PackedMatrix(dtype=dtype, rows=rows, cols=cols, data=data, bias=bias)


def pack_codes(
    codes: Bytes,
    scale: Halves,
    offset: Floats,
    bits: int,
    *,
    bias: Floats | None = None,
    out: Bytes | None = None,
    out_scales: Bits16 | None = None,
) -> PackedMatrix:
    """Packs integer codes with w = scale * (code - zero_code(bits)) + offset.

    Args:
        codes: [N, K] bytes, below 2**bits.
        scale: [N, K/32] halves, one per group of 32 inputs (the last group may be short).
        offset: [N, K/32] floats, rounded to bfloat16 here.
        bits: 8 or 4.
        bias: [N] or None.
        out: memory for the codes, see ``packed_sizes``.
        out_scales: memory for the scales.
    """
    dtype = _integer_dtype(bits)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise ValueError(f"codes must be [N, K] bytes, got {codes.dtype} {codes.shape}")
    rows, cols = codes.shape
    groups, cols_padded = -(-cols // GROUP), padded(cols, GROUP)
    for name, array, kind in (("scale", scale, np.float16), ("offset", offset, np.float32)):
        if array.shape != (rows, groups) or array.dtype != kind:
            wanted = f"{np.dtype(kind)} {(rows, groups)}"
            raise ValueError(f"{name} must be {wanted}, got {array.dtype} {array.shape}")
    data_bytes, scale_bytes = packed_sizes(dtype, rows, cols)
    data = _buffer("out", out, data_bytes, np.uint8)
    scales = _buffer("out_scales", out_scales, scale_bytes, np.uint16)
    # A quad of 4 inputs moves as one 32-bit word.
    words = data.view(np.uint32).reshape(-1, cols_padded * bits // 32, BLOCK)
    scale_words, offset_words = split_scales(scales, cols)
    if groups % 2:
        offset_words[:, -1, :, 1] = 0
    for start, end in _chunks(rows, cols_padded):
        chunk = _pad(np.ascontiguousarray(codes[start:end]), cols_padded)
        if bits == 4:
            if chunk.max() > 15:
                raise ValueError(f"4-bit codes must be below 16, got {chunk.max()}")
            low_high = chunk.reshape(len(chunk), groups, 2, GROUP // 2)
            chunk = low_high[:, :, 0] | (low_high[:, :, 1] << np.uint8(4))
        blocks = chunk.reshape(-1, BLOCK, words.shape[1] * 4).view(np.uint32)
        place = slice(start // BLOCK, start // BLOCK + len(blocks))
        words[place] = blocks.transpose(0, 2, 1)
        scale_words[place] = (
            _pad(scale[start:end].view(np.uint16), groups).reshape(-1, BLOCK, groups).transpose(0, 2, 1)
        )
        pairs = _pad(to_bf16(offset[start:end]), padded(groups, 2)).reshape(-1, BLOCK, padded(groups, 2) // 2, 2)
        offset_words[place] = pairs.transpose(0, 2, 1, 3)
    return PackedMatrix(dtype=dtype, rows=rows, cols=cols, data=data, scales=scales, bias=bias)


def _integer_dtype(bits: int) -> Dtype:
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {bits}")
    return Dtype.I8 if bits == 8 else Dtype.I4


def quantise(weights: Floats, bits: int) -> tuple[Bytes, Halves, Floats]:
    """Rounds [N, K] floats to codes, scales and offsets per group of 32 inputs, for ``pack_codes``.

    8 bits: symmetric, code 128 + round(w / d), offset 0. 4 bits: the group's own range, w = d * (code - 8) + offset.
    The scale is rounded to half and the offset to bfloat16 first, and the codes chosen for the rounded ones.

    Raises:
        ValueError: a weight is not finite, or beyond MAX_WEIGHT.
    """
    _integer_dtype(bits)
    if weights.ndim != 2:
        raise ValueError(f"weights must be [N, K], got shape {weights.shape}")
    rows, cols = weights.shape
    groups, cols_padded = -(-cols // GROUP), padded(cols, GROUP)
    codes = np.empty((rows, cols), np.uint8)
    scale = np.empty((rows, groups), np.float16)
    offset = np.zeros((rows, groups), np.float32)
    for start, end in _chunks(rows, cols_padded):
        chunk = np.ascontiguousarray(weights[start:end], np.float32)
        if cols != cols_padded:  # repeats the last input, so that padding does not widen the group's range
            chunk = np.pad(chunk, ((0, 0), (0, cols_padded - cols)), mode="edge")
        w = chunk.reshape(end - start, groups, GROUP)
        low, high = _fold(np.minimum, w), _fold(np.maximum, w)
        largest = float(np.maximum(-low, high).max())
        if not largest <= MAX_WEIGHT:  # also catches NaN
            raise ValueError(f"weights to quantise must be finite and at most {MAX_WEIGHT}, got {largest}")
        spread, steps = (np.maximum(-low, high), 127) if bits == 8 else (high - low, 15)
        # Rounding the scale down would push the ends of the range out of the codes: round up.
        d = _round_up_to_half(np.divide(spread, steps, dtype=np.float32))
        scale[start:end] = d
        if bits == 4:
            offset[start:end] = from_bf16(to_bf16(low + 8 * d))
        inverse = np.divide(1, d, where=d > 0, out=np.zeros_like(d))
        scaled = w * inverse[:, :, None]
        # Half a step more, because the cast to integers cuts off.
        scaled += zero_code(bits) + 0.5 - (offset[start:end] * inverse)[:, :, None]
        np.clip(scaled, 0, 2**bits - 0.5, out=scaled)
        codes[start:end] = scaled.astype(np.uint8).reshape(end - start, cols_padded)[:, :cols]
    return codes, scale, offset


def _fold(pick: np.ufunc, values: Floats) -> Floats:
    """``pick.reduce`` over the last axis, a power of two long; by halves, which numpy does several times faster."""
    while (width := values.shape[-1]) > 1:
        values = pick(values[..., : width // 2], values[..., width // 2 :])
    return values[..., 0]


def _round_up_to_half(values: Floats) -> Floats:
    """The smallest half not below each value (values are finite and at least 0), as floats."""
    halves = values.astype(np.float16)
    below = halves.astype(np.float32) < values
    halves[below] = np.nextafter(halves[below], np.float16(np.inf))
    return halves.astype(np.float32)


def unpack(matrix: PackedMatrix) -> NDArray[np.float64]:
    """The weights [N, K] that a packed matrix stands for, exactly (N * K doubles: meant for tests)."""
    rows, cols, n, k = matrix.rows, matrix.cols, matrix.rows_padded, matrix.cols_padded
    groups = k // GROUP
    if matrix.dtype == Dtype.F32:
        blocks = matrix.data.view(np.float32).reshape(-1, k, BLOCK)
        return blocks.transpose(0, 2, 1).reshape(n, k)[:rows, :cols].astype(np.float64)
    if matrix.dtype == Dtype.BF16:
        pairs = from_bf16(matrix.data.view(np.uint16)).reshape(-1, k // 2, BLOCK, 2)
        return pairs.transpose(0, 2, 1, 3).reshape(n, k)[:rows, :cols].astype(np.float64)
    codes = unpack_codes(matrix).reshape(rows, -1)
    assert matrix.scales is not None, "integer weights have scales"
    words, offset_bits = split_scales(matrix.scales, cols)
    halves = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.float16).reshape(n, groups)
    floats = from_bf16(offset_bits).transpose(0, 2, 1, 3).reshape(n, -1)[:, :groups]
    scale, offset = (np.repeat(a[:rows].astype(np.float64), GROUP, axis=1)[:, :cols] for a in (halves, floats))
    result: NDArray[np.float64] = scale * (codes - float(zero_code(_BITS_PER_VALUE[matrix.dtype]))) + offset
    return result


def unpack_codes(matrix: PackedMatrix) -> Bytes:
    """The codes [N, K] of an I8 or I4 matrix."""
    n, k = matrix.rows_padded, matrix.cols_padded
    if matrix.dtype == Dtype.I8:
        codes = matrix.data.reshape(-1, k // 4, BLOCK, 4).transpose(0, 2, 1, 3)
    else:
        nibbles = matrix.data.reshape(-1, k // GROUP, 1, 4, BLOCK, 4)
        both = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=2)
        codes = both.transpose(0, 4, 1, 2, 3, 5)
    return np.ascontiguousarray(codes.reshape(n, k)[: matrix.rows, : matrix.cols])
