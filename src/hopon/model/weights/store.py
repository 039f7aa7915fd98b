"""All weights of a model, packed for the kernels, in one piece of memory; and a copy of that on disk.

Packing a model takes seconds, reading it packed takes a fraction of one. The copy is keyed by everything it depends
on: the file's path, size, time and header, the precisions, and the version of the layout here. It is written beside
its final name and renamed, so that it is there wholly or not at all.
"""

from __future__ import annotations

import hashlib
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Report
from hopon.model.kv import anonymous
from hopon.model.program import Matrix, Program
from hopon.model.source import Source
from hopon.model.weights.reader import Bytes
from hopon.native import Dtype
from hopon.native.pack import (
    ALIGNMENT,
    BLOCK,
    GROUP,
    QUAD,
    Floats,
    Halves,
    has_offsets,
    pack_bf16,
    pack_codes,
    pack_f32,
    packed_sizes,
    padded,
    quantise,
    zero_code,
)

WeightDtype = Literal["auto", "f32", "bf16", "q8", "q4"]

LAYOUT_VERSION = 2
"""Grows with every change of what the kernels read or of how weights are rounded."""

_VALUES_PER_PIECE = 1 << 20  # packed at once: bounds what packing needs beside its result


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a packed matrix lies; offsets in bytes from the start of the arena."""

    dtype: Dtype
    rows: int
    cols: int
    data: int
    scales: int | None
    bias: int | None
    outliers: int

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of scales of one block of 64 rows; blocks follow one another."""
        return packed_sizes(self.dtype, BLOCK, self.cols)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where everything lies: matrices, and vectors as (offset, length)."""

    matrices: Mapping[str, Place]
    vectors: Mapping[str, tuple[int, int]]
    num_bytes: int

    @property
    def description(self) -> str:
        """The precisions of the matrices, layers first, e.g. "i4 (head i8)"."""
        names = {name: place.dtype.name.lower() for name, place in self.matrices.items()}
        layers = sorted({kind for name, kind in names.items() if name.startswith("layers.")})
        others = sorted({kind for name, kind in names.items() if not name.startswith("layers.")} - set(layers))
        return "+".join(layers) + (f" (head {'+'.join(others)})" if others else "")


def plan_layout(source: Source, program: Program, dtype: WeightDtype) -> Layout:
    """Decide each matrix's precision and place; reads no weights.

    ``q4`` keeps embedding and head at 8 bits. ``auto`` keeps the file's own precision: 4-bit types stay 4-bit, other
    integer types become 8-bit, floats become bf16.
    """
    at = 0
    places: dict[str, Place] = {}
    vectors: dict[str, tuple[int, int]] = {}

    def take(num_bytes: int) -> int:
        nonlocal at
        start, at = at, padded(at + num_bytes, ALIGNMENT)
        return start

    for name, matrix in program.matrices.items():
        shapes = [source.tensor(weight).shape for weight in matrix.weights]
        kind = _precision(source, matrix, dtype)
        rows, cols = sum(shape[0] for shape in shapes), shapes[0][1]
        data_bytes, scale_bytes = packed_sizes(kind, rows, cols)
        places[name] = Place(
            dtype=kind,
            rows=rows,
            cols=cols,
            data=take(data_bytes),
            scales=take(scale_bytes) if scale_bytes else None,
            bias=take(4 * rows) if matrix.biases else None,
            outliers=max(1, padded(cols, GROUP) // QUAD // matrix.inputs_per_outlier),
        )
    for vector in program.vectors:
        (length,) = source.tensor(vector).shape
        vectors[vector] = take(4 * length), length
    return Layout(matrices=places, vectors=vectors, num_bytes=at)


def _precision(source: Source, matrix: Matrix, dtype: WeightDtype) -> Dtype:
    if dtype == "auto":
        types = {source.tensor(weight).type for weight in matrix.weights}
        if any(kind in ("F32", "F16", "BF16") for kind in types):
            return Dtype.BF16
        return Dtype.I4 if all(kind.startswith("Q4") for kind in types) else Dtype.I8
    if dtype == "q4":
        return Dtype.I8 if matrix.is_table else Dtype.I4
    return {"f32": Dtype.F32, "bf16": Dtype.BF16, "q8": Dtype.I8}[dtype]


class PackedStore:
    """Packed weights in memory. The arena lives as long as this object."""

    def __init__(self, layout: Layout, arena: Bytes) -> None:
        self._layout, self._arena = layout, arena

    def matrix(self, name: str) -> native.Matrix:
        """A matrix as the kernels read it."""
        place = self._layout.matrices[name]
        base = self._arena.ctypes.data
        scales = None
        if place.scales is not None:
            _, scale_bytes = packed_sizes(place.dtype, place.rows, place.cols)
            scales = self._arena[place.scales : place.scales + scale_bytes].view(np.uint16)
        return native.Matrix(
            dtype=place.dtype,
            rows=place.rows,
            cols=place.cols,
            rows_padded=padded(place.rows, BLOCK),
            cols_padded=padded(place.cols, GROUP),
            outliers=place.outliers,
            has_offsets=scales is not None and has_offsets(scales, place.cols),
            data=base + place.data,
            scales=None if place.scales is None else base + place.scales,
            bias=None if place.bias is None else base + place.bias,
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm weight."""
        offset, length = self._layout.vectors[name]
        return self._arena[offset : offset + 4 * length].view(np.float32)


def load_weights(
    source: Source, program: Program, layout: Layout, cache_dir: Path | None, report: Report
) -> PackedStore:
    """The packed weights of a model: from the copy under ``cache_dir``, or packed from the file and copied there.

    A copy that is stale, truncated or damaged at its head is packed anew, and one that cannot be written is left out,
    both with a warning that names the file.

    Raises:
        OSError: the model's files cannot be read.
        ValueError: weights do not fit the precision.
    """
    arena = anonymous(layout.num_bytes, huge=True)
    key = _key(source, layout)
    cached = None if cache_dir is None else cache_dir / "packed" / f"{key.hex()}.bin"
    if cached is not None and _read(cached, key, arena, report):
        return PackedStore(layout, arena)
    for done in _pack(source, program, layout, arena):
        report("packing weights", done)
    if cached is not None:
        report("saving packed weights", 0.0)
        _write(cached, key, arena)
    return PackedStore(layout, arena)


def _pack(source: Source, program: Program, layout: Layout, arena: Bytes) -> Iterator[float]:
    """Fill the arena piece by piece; yields the share that is done."""
    for vector, (offset, length) in layout.vectors.items():
        arena[offset : offset + 4 * length] = source.float32(vector).view(np.uint8)
    total = sum(place.rows * place.cols for place in layout.matrices.values())
    done = 0
    for name, place in layout.matrices.items():
        matrix = program.matrices[name]
        if place.bias is not None:
            biases = np.concatenate([source.float32(bias) for bias in matrix.biases])
            arena[place.bias : place.bias + 4 * place.rows] = biases.view(np.uint8)
        step = max(1, _VALUES_PER_PIECE // (place.cols * BLOCK)) * BLOCK
        for start in range(0, place.rows, step):
            stop = min(start + step, place.rows)
            _pack_rows(source, matrix, place, start, stop, arena)
            done += (stop - start) * place.cols
            yield done / total


def _pack_rows(source: Source, matrix: Matrix, place: Place, start: int, stop: int, arena: Bytes) -> None:
    """Pack rows ``start:stop`` of the stacked tensors into their place; ``start`` is a multiple of 64."""
    first, last = start // BLOCK, padded(stop, BLOCK) // BLOCK
    data_bytes, scale_bytes = place.block_bytes
    out = arena[place.data + first * data_bytes : place.data + last * data_bytes]
    pieces = list(_pieces(source, matrix, start, stop))
    if place.dtype in (Dtype.F32, Dtype.BF16):
        values = np.concatenate([source.float32(weight, a, b) for weight, a, b in pieces])
        pack = pack_f32 if place.dtype is Dtype.F32 else pack_bf16
        pack(values, out=out)
        return
    assert place.scales is not None, "integer weights have scales"
    out_scales = arena[place.scales + first * scale_bytes : place.scales + last * scale_bytes].view(np.uint16)
    bits = 4 if place.dtype is Dtype.I4 else 8
    parts = zip(*(_codes(source, weight, a, b, bits) for weight, a, b in pieces), strict=True)
    codes, scale, offset = map(np.concatenate, parts)
    pack_codes(codes, scale, offset, bits, out=out, out_scales=out_scales)


def _pieces(source: Source, matrix: Matrix, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Which rows of which tensors make up rows ``start:stop`` of the stack."""
    base = 0
    for weight in matrix.weights:
        rows = source.tensor(weight).shape[0]
        first, last = max(start - base, 0), min(stop - base, rows)
        if first < last:
            yield weight, first, last
        base += rows


def _codes(source: Source, weight: str, start: int, stop: int, bits: int) -> tuple[Bytes, Halves, Floats]:
    """The file's own integers where they fit into so many bits, else the values quantised in groups of 32."""
    found = source.codes(weight, start, stop)
    if found is not None and found.bits <= bits:
        # Codes of fewer bits move to the middle of the wider range, so that offsets stay small.
        middle, shift = zero_code(found.bits), np.uint8(zero_code(bits) - zero_code(found.bits))
        offset = found.minimum.astype(np.float32) + np.float32(middle) * found.scale.astype(np.float32)
        return found.codes + shift, found.scale, offset
    return quantise(source.float32(weight, start, stop), bits)


_HEADER = struct.Struct("<8s32sQ12x")  # magic, key, bytes of the arena; a checksum of these follows
_MAGIC = b"hoponwts"
_HEADER_BYTES = 64


def _key(source: Source, layout: Layout) -> bytes:
    """Hash of everything that the packed bytes depend on."""
    parts: list[object] = [LAYOUT_VERSION, layout, source.config]
    for path in source.files:
        stat = path.stat()
        parts += [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    parts += [(t.name, t.type, t.shape, t.offset) for t in source.reader.tensors.values()]
    return hashlib.sha256(repr(parts).encode()).digest()


def _header(key: bytes, num_bytes: int) -> bytes:
    head = _HEADER.pack(_MAGIC, key, num_bytes)
    return head + struct.pack("<I", zlib.crc32(head))


def _read(path: Path, key: bytes, arena: Bytes, report: Report) -> bool:
    """Fill the arena from a cached copy. False where there is none, or none that can be used."""
    if not path.exists():
        return False
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != _HEADER_BYTES + len(arena) or file.read(_HEADER_BYTES) != _header(key, len(arena)):
            warnings.warn(f"{path}: stale, truncated or damaged ({size} bytes): packing the weights anew", stacklevel=3)
            return False
        at, view = 0, arena.data
        while at < len(arena):
            count = file.readinto(view[at : at + (32 << 20)])
            if not count:
                warnings.warn(f"{path}: became shorter while it was read: packing the weights anew", stacklevel=3)
                return False
            at += count
            report("reading packed weights", at / len(arena))
    return True


def _write(path: Path, key: bytes, arena: Bytes) -> None:
    """Save the arena under its final name in one go: whoever looks finds all of it or nothing."""
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb", buffering=0) as file:
            file.write(_header(key, len(arena)))
            view, at = arena.data, 0
            while at < len(arena):
                at += file.write(view[at : at + (32 << 20)])
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if partial.exists():
            partial.unlink()
        warnings.warn(
            f"{path}: packed weights cannot be saved ({error}); the next start packs them again", stacklevel=3
        )
