"""Reads GGUF files, versions 2 and 3: metadata, tensor table, dequantisation.

Format and block layouts: the GGUF specification and ggml's ``ggml-common.h`` (both MIT, ggml-org). This module knows
files only: nothing of architectures, packing or tokenizers.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hopon.model.weights.reader import Bytes, Codes, Floats, Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class GGUF:
    """An open GGUF file, memory-mapped.

    ``metadata`` maps keys to Python scalars, strings, lists of strings, or numpy arrays (arrays of numbers).
    ``tensors`` maps names to :class:`Tensor`, in file order.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a GGUF file, is truncated or corrupt, or holds a tensor type that is not supported. The
            message names the file and what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size < 24:
                raise ValueError(f"{self.path}: not a GGUF file: {self._size} bytes are less than its header")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._pos = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read_header()
        except struct.error:
            raise self._error(
                f"truncated or corrupt: the header runs past the end of the file ({self._size} bytes)"
            ) from None
        except UnicodeDecodeError as error:
            raise self._error(f"corrupt: a string before byte {self._pos} is not UTF-8 ({error.reason})") from None

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> Bytes:
        """The stored bytes of rows ``start:stop`` of a tensor as a read-only view, uint8 [rows, bytes per row]."""
        tensor = self.tensors[name]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        data: Bytes = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(rows, tensor.nbytes // rows)[start:stop]

    def float32(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows ``start:stop`` (first axis) of a tensor as float32, dequantised; the whole tensor by default."""
        tensor = self.tensors[name]
        _, size, decode, _ = _TYPES[tensor.type]
        if len(tensor.shape) == 1:
            return decode(self.raw(name).reshape(-1, size)).reshape(-1)[start:stop]
        per_row = int(np.prod(tensor.shape[1:-1], dtype=np.int64))
        raw = self.raw(name, start * per_row, None if stop is None else stop * per_row)
        return decode(raw.reshape(-1, size)).reshape(-1, *tensor.shape[1:])

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes | None:
        """Rows ``start:stop`` of a matrix as integers, or None where the type has no such form.

        Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 map exactly. Q4_K and Q5_K keep their codes;
        scale and minimum, which the file stores as products of two numbers, are rounded to half precision. Q6_K has
        scales per 16 columns and no such form: whoever packs it requantises its float values. Floats have none.

        Raises:
            ValueError: a scale or minimum is out of the range of half precision.
        """
        tensor = self.tensors[name]
        _, size, _, split = _TYPES[tensor.type]
        if split is None:
            return None
        raw = self.raw(name, start, stop)
        codes, scale, minimum = split(raw.reshape(-1, size))
        with np.errstate(over="ignore"):
            half_scale, half_minimum = scale.astype(np.float16), minimum.astype(np.float16)
        if not (np.isfinite(half_scale).all() and np.isfinite(half_minimum).all()):
            raise self._error(f"tensor {name!r} ({tensor.type}) has a scale beyond half precision (65504)")
        rows = raw.shape[0]
        return Codes(
            codes=codes.reshape(rows, -1),
            scale=half_scale.reshape(rows, -1),
            minimum=half_minimum.reshape(rows, -1),
            bits=int(tensor.type[1]),
        )

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}")

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._pos)
        self._pos += struct.calcsize("<" + code)
        return value

    def _strings(self, count: int) -> list[str]:
        unpack, data, size, pos = struct.Struct("<Q").unpack_from, self._map, self._size, self._pos
        strings = []
        for _ in range(count):
            (length,) = unpack(data, pos)
            end = pos + 8 + length
            if end > size:
                raise self._error(f"truncated or corrupt: a string of {length} bytes at byte {pos} ends past the file")
            strings.append(str(data[pos + 8 : end], "utf-8"))
            pos = end
        self._pos = pos
        return strings

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._error(f"corrupt: metadata {key!r} has unknown type {kind}")
        item, count = self._take("I"), self._take("Q")
        if item == _STRING:
            return self._strings(count)
        if item not in _SCALARS:
            raise self._error(f"corrupt: metadata {key!r} is an array of type {item}")
        dtype = np.dtype("<" + _SCALARS[item])
        if self._pos + count * dtype.itemsize > self._size:
            raise self._error(f"truncated or corrupt: the array {key!r} of {count} values ends past the file")
        array = np.frombuffer(self._map, dtype, count, self._pos).copy()
        self._pos += array.nbytes
        return array

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._error(f"not a GGUF file: it starts with {self._map[:4]!r} instead of b'GGUF'")
        self._pos = 4
        version = self._take("I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are, little-endian)")
        num_tensors, num_keys = self._take("Q"), self._take("Q")
        for _ in range(num_keys):
            key = self._strings(1)[0]
            self.metadata[key] = self._value(self._take("I"), key)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"corrupt: general.alignment is {alignment!r}")
        base = -(-self._pos // alignment) * alignment
        for name, kind, shape, offset in table:
            block, size, _, _ = _TYPES[kind]
            if shape[-1] % block:
                raise self._error(
                    f"corrupt: tensor {name!r} has rows of {shape[-1]}, {kind} needs a multiple of {block}"
                )
            nbytes = int(np.prod(shape, dtype=object)) // block * size
            if base + offset + nbytes > self._size:
                raise self._error(
                    f"truncated: tensor {name!r} ends at byte {base + offset + nbytes}, the file has {self._size}"
                )
            if name in self.tensors:
                raise self._error(f"corrupt: tensor {name!r} appears twice")
            self.tensors[name] = Tensor(
                name=name, type=kind, shape=shape, offset=base + offset, nbytes=nbytes, path=self.path
            )

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._strings(1)[0]
        num_dims = self._take("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"corrupt: tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._take("Q") for _ in range(num_dims))[::-1]
        kind, offset = self._take("I"), self._take("Q")
        if 0 in shape:
            raise self._error(f"corrupt: tensor {name!r} has shape {shape}")
        if kind not in _NAMES:
            raise self._error(f"tensor {name!r} has type {kind}, which is not supported ({', '.join(_TYPES)} are)")
        return name, _NAMES[kind], shape, offset


# Each decoder takes blocks, uint8 [blocks, bytes per block]. Splitters return codes [blocks, values], scale and
# minimum float32 [blocks, groups of 32]; decoders compute code * scale + minimum in float32, in ggml's order.

Split = tuple[Bytes, Floats, Floats]


def _half(blocks: Bytes, start: int) -> Floats:
    """The half-precision number at byte ``start`` of every block, float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 16 bytes] -> [blocks, 32]: low nibbles are the first half of the values."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _high_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 fifth bits of a Q5 block, as 0 or 16."""
    bits: Bytes = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits * np.uint8(16)


def _split_q4_0(blocks: Bytes) -> Split:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * -8


def _split_q4_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _split_q5_0(blocks: Bytes) -> Split:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _high_bits(blocks, 2), scale, scale * -16


def _split_q5_1(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 8:]) | _high_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _split_q8_0(blocks: Bytes) -> Split:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scale, scale * -128


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and minima of a Q4_K or Q5_K block: 6-bit integers in bytes 4..15, times two halves."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), -(_half(blocks, 2) * minimum.astype(np.float32))


def _k_nibbles(packed: Bytes) -> Bytes:
    """[blocks, 128] -> [blocks, 256]: of every 32 bytes, the low nibbles come before the high ones."""
    four = packed.reshape(-1, 4, 32)
    return np.stack([four & 15, four >> 4], axis=2).reshape(-1, 256)


def _split_q4_k(blocks: Bytes) -> Split:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _split_q5_k(blocks: Bytes) -> Split:
    bits: Bytes = np.unpackbits(blocks[:, 16:48].reshape(-1, 32, 1), axis=2, bitorder="little")  # [blocks, 32, groups]
    return _k_nibbles(blocks[:, 48:]) | bits.transpose(0, 2, 1).reshape(-1, 256) * np.uint8(16), *_k_scales(blocks)


def _decode_q6_k(blocks: Bytes) -> Floats:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low4 = np.concatenate([low & 15, low >> 4], axis=2)  # [blocks, 2 halves, 4 runs, 32]
    high2 = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low4 | high2 << 4).astype(np.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values: Floats = scale[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)
    return values.reshape(-1, 256)


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


Decode = Callable[[Bytes], Floats]


def _symmetric(split: Callable[[Bytes], Split], zero: int) -> Decode:
    """Decoder of a type whose zero is code ``zero``: scale * (code - zero), rounded once."""

    def decode(blocks: Bytes) -> Floats:
        codes, scale, _ = split(blocks)
        return (codes.astype(np.float32) - zero) * scale

    return decode


def _affine(split: Callable[[Bytes], Split]) -> Decode:
    def decode(blocks: Bytes) -> Floats:
        codes, scale, minimum = split(blocks)
        grouped = codes.reshape(len(codes), -1, 32).astype(np.float32)
        grouped *= scale[:, :, None]
        grouped += minimum[:, :, None]
        return grouped.reshape(len(codes), -1)

    return decode


# name -> (values per block, bytes per block, decoder, splitter into integers)
_TYPES: dict[str, tuple[int, int, Decode, Callable[[Bytes], Split] | None]] = {
    "F32": (1, 4, _decode_f32, None),
    "F16": (1, 2, _decode_f16, None),
    "BF16": (1, 2, _decode_bf16, None),
    "Q4_0": (32, 18, _symmetric(_split_q4_0, 8), _split_q4_0),
    "Q4_1": (32, 20, _affine(_split_q4_1), _split_q4_1),
    "Q5_0": (32, 22, _symmetric(_split_q5_0, 16), _split_q5_0),
    "Q5_1": (32, 24, _affine(_split_q5_1), _split_q5_1),
    "Q8_0": (32, 34, _symmetric(_split_q8_0, 128), _split_q8_0),
    "Q4_K": (256, 144, _affine(_split_q4_k), _split_q4_k),
    "Q5_K": (256, 176, _affine(_split_q5_k), _split_q5_k),
    "Q6_K": (256, 210, _decode_q6_k, None),
}
# ggml's numbers of these types
_NAMES = dict(zip((0, 1, 30, 2, 3, 6, 7, 8, 12, 13, 14), _TYPES, strict=True))
