"""Typed binding of the CPU kernels to numpy arrays.

``choose_level`` says which instruction level this machine should use and why, ``load`` opens its library, and
``Library`` calls it. Importing this module loads nothing. Calls release the interpreter lock. It knows nothing of
models or requests; the meaning of every struct field is in ``src/hopon.h``, of which the structs here are a mirror.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

ABI = 4
LEVELS = ("amx", "avx512", "vnni", "avx2", "portable")
"""Instruction levels, best first."""


class NativeError(RuntimeError):
    """A library cannot be used here, or a kernel refused its arguments."""


class Dtype(IntEnum):
    """How a matrix stores a number."""

    F32 = 0
    BF16 = 1
    I8 = 2
    I4 = 3


class CacheDtype(IntEnum):
    """How the KV cache stores a number."""

    F32 = 0
    BF16 = 1
    F16 = 4


class OpKind(IntEnum):
    """What an op of a program does."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROPE_KV = 3
    ATTENTION = 4
    GATE = 5
    SELECT = 6


class Matrix(ctypes.Structure):
    """``hopon_matrix``: a packed weight matrix."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("rows_padded", ctypes.c_int32),
        ("cols_padded", ctypes.c_int32),
        ("outliers", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class Buffer(ctypes.Structure):
    """``hopon_buffer``: a named activation buffer of rows."""

    _fields_ = (("data", ctypes.c_void_p), ("width", ctypes.c_int64))


class Op(ctypes.Structure):
    """``hopon_op``: one step of a program."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("on_logits", ctypes.c_int32),
        ("input", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        ("matrix", ctypes.POINTER(Matrix)),
        ("vector", ctypes.c_void_p),
        ("vector2", ctypes.c_void_p),
    )


class Model(ctypes.Structure):
    """``hopon_model``: shapes, KV cache, buffers and the program."""

    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rope_dim", ctypes.c_int32),
        ("rope_interleaved", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("max_position", ctypes.c_int32),
        ("attention_scale", ctypes.c_float),
        ("num_buffers", ctypes.c_int32),
        ("num_ops", ctypes.c_int32),
        ("rope", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("buffers", ctypes.POINTER(Buffer)),
        ("ops", ctypes.POINTER(Op)),
    )


class Batch(ctypes.Structure):
    """``hopon_batch``: one step's ragged tokens."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_segments", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("segment_start", ctypes.c_void_p),
        ("segment_pos", ctypes.c_void_p),
        ("segment_table", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("logit_index", ctypes.c_void_p),
    )


class SampleRow(ctypes.Structure):
    """``hopon_sample_row``: how to choose one token."""

    _fields_ = (
        ("logits_row", ctypes.c_int32),
        ("forced", ctypes.c_int32),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("choice", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("num_banned", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        ("banned", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("num_biased", ctypes.c_int32),
        ("num_seen", ctypes.c_int32),
        ("biased", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class Sampling(ctypes.Structure):
    """``hopon_sampling``: rows of parameters for rows of logits, and where the results go."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocab", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("max_top", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("which", ctypes.c_void_p),
        ("want_logprob", ctypes.c_void_p),
        ("out_token", ctypes.c_void_p),
        ("out_logprob", ctypes.c_void_p),
        ("out_top_ids", ctypes.c_void_p),
        ("out_top_logprobs", ctypes.c_void_p),
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (Matrix, Buffer, Op, Model, Batch, SampleRow, Sampling)
"""In the order in which ``hopon_sizes`` reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """What ``Library.sample`` returns.

    Args:
        tokens: [rows] int32.
        logprobs: [rows] float32, raw log-probability of the token; 0 where it was not wanted.
        top_ids: [rows, max_top] int32, best first; only the first ``num_top`` of a row mean something.
        top_logprobs: [rows, max_top] float32, likewise.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def pointer(array: NDArray[Any] | None, dtype: type[np.generic] | None = None) -> int | None:
    """Address of a C-contiguous array's first element, for a struct's pointer field; the caller keeps it alive.

    Raises:
        ValueError: not contiguous, or not of ``dtype``.
    """
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"array must be C-contiguous, got strides {array.strides} for shape {array.shape}")
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"array must be {np.dtype(dtype).name}, got {array.dtype.name}")
    return int(array.ctypes.data)


class Pool:
    """Worker threads of a library. Use as a context manager, or ``close`` it; one call at a time."""

    def __init__(self, library: Library, threads: int) -> None:
        """Starts ``threads - 1`` threads; the caller of a kernel is the other worker.

        Raises:
            NativeError: the number is outside 1..1024, or the system refused to start the threads.
        """
        self.threads = threads
        self._library = library
        self._handle: int | None = library.functions.hopon_pool_create(threads)
        if self._handle is None:
            raise NativeError(f"cannot create a pool of {threads} threads (1 to 1024 are possible)")

    @property
    def handle(self) -> int:
        """The native pointer.

        Raises:
            NativeError: the pool is closed.
        """
        if self._handle is None:
            raise NativeError("the thread pool is closed")
        return self._handle

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless."""
        if self._handle is not None:
            self._library.functions.hopon_pool_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Library:
    """The kernels of one instruction level. Made by ``load``."""

    def __init__(self, level: str, functions: ctypes.CDLL) -> None:
        self.level = level
        self.functions = functions

    def pool(self, threads: int) -> Pool:
        """Worker threads for this library's calls; ``threads`` counts the caller."""
        return Pool(self, threads)

    def linear(
        self,
        pool: Pool,
        matrix: Matrix,
        x: NDArray[np.float32],
        out: NDArray[np.float32] | None = None,
        *,
        accumulate: bool = False,
    ) -> NDArray[np.float32]:
        """``x @ matrix.T + bias`` for x [m, >= cols], into ``out`` [m, >= rows] (a new array by default).

        With ``accumulate`` the product is added to ``out``. Rows may lie apart (a stride), columns may not.

        Raises:
            ValueError: an array of the wrong kind or shape.
            NativeError: the kernel refused the matrix.
        """
        if out is None:
            if accumulate:
                raise ValueError("accumulate needs an output array to add to")
            out = np.empty((len(x), matrix.rows), np.float32)
        x_stride, out_stride = _row_stride("x", x, matrix.cols), _row_stride("out", out, matrix.rows)
        if len(out) != len(x):
            raise ValueError(f"out must have {len(x)} rows like x, got {len(out)}")
        status = self.functions.hopon_linear(
            pool.handle,
            ctypes.byref(matrix),
            x.ctypes.data,
            x_stride,
            out.ctypes.data,
            out_stride,
            len(x),
            int(accumulate),
        )
        self._check("linear", status)
        return out

    def forward(self, pool: Pool, model: Model, batch: Batch) -> None:
        """Runs the model's program on one step.

        Raises:
            NativeError: the batch or the program is out of bounds (a block, token or position id; a buffer's width).
        """
        self._check("forward", self.functions.hopon_forward(pool.handle, ctypes.byref(model), ctypes.byref(batch)))

    def step(self, pool: Pool, model: Model, batch: Batch, sampling: Sampling) -> None:
        """Runs the model's program on one step, then samples from the logits that it computed.

        Raises:
            NativeError: as for ``forward`` and ``sample``.
        """
        refs = ctypes.byref(model), ctypes.byref(batch), ctypes.byref(sampling)
        self._check("step", self.functions.hopon_step(pool.handle, *refs))

    def sample(
        self,
        pool: Pool,
        logits: NDArray[np.float32],
        rows: Sequence[SampleRow] | ctypes.Array[SampleRow],
        *,
        want_logprobs: NDArray[np.uint8] | None = None,
        vocab: int | None = None,
    ) -> SampleResult:
        """Chooses one token per row of parameters.

        Args:
            pool: the worker threads.
            logits: [n, >= vocab]; a row of parameters names its row here.
            rows: one per token to choose; arrays that they point to must be alive.
            want_logprobs: one flag per row; all rows by default.
            vocab: how many of the columns count; all by default.

        Raises:
            ValueError: an array of the wrong kind or shape, or a row that does not exist.
            NativeError: a parameter is out of bounds, or the mask of a row allows no token.
        """
        size = logits.shape[1] if vocab is None else vocab
        stride = _row_stride("logits", logits, size)
        count = len(rows)
        table = rows if isinstance(rows, ctypes.Array) else (SampleRow * count)(*rows)
        wanted = np.ones(count, np.uint8) if want_logprobs is None else want_logprobs
        if wanted.shape != (count,):
            raise ValueError(f"want_logprobs must have shape ({count},), got {wanted.shape}")
        for row in table:
            if not 0 <= row.logits_row < len(logits):
                raise ValueError(f"logits_row must be in [0, {len(logits)}), got {row.logits_row}")
        max_top = max((row.num_top for row in table), default=0)
        result = SampleResult(
            tokens=np.empty(count, np.int32),
            logprobs=np.empty(count, np.float32),
            top_ids=np.zeros((count, max_top), np.int32),
            top_logprobs=np.zeros((count, max_top), np.float32),
        )
        sampling = Sampling(
            logits=logits.ctypes.data,
            stride=stride,
            vocab=size,
            num_rows=count,
            max_top=max_top,
            rows=ctypes.addressof(table),
            want_logprob=pointer(wanted, np.uint8),
            out_token=pointer(result.tokens),
            out_logprob=pointer(result.logprobs),
            out_top_ids=pointer(result.top_ids),
            out_top_logprobs=pointer(result.top_logprobs),
        )
        self.choose(pool, sampling)
        return result

    def choose(self, pool: Pool, sampling: Sampling) -> None:
        """Chooses the tokens that a struct describes; its arrays must be alive.

        Raises:
            NativeError: as for ``sample``.
        """
        self._check("sample", self.functions.hopon_sample(pool.handle, ctypes.byref(sampling)))

    def uniform(self, seed: int, choice: int, index: int) -> float:
        """The random number in [0, 1) that decides output token ``index`` of a request's ``choice``."""
        return float(self.functions.hopon_uniform(seed, choice, index))

    def _check(self, what: str, status: int) -> None:
        if status == -1:
            raise NativeError(
                f"hopon_{what} ({self.level}) refused its arguments: a size, id or pointer is out of bounds"
            )
        if status == -2:
            raise NativeError(f"hopon_{what} ({self.level}) has no memory for its scratch")
        assert status == 0, f"hopon_{what} returned {status}, which hopon.h does not know"


def library_path(level: str) -> Path:
    """Where ``hopon.native.build`` puts the library of ``level``."""
    return Path(__file__).resolve().parent / "lib" / f"hopon-{level}.so"


def available_levels() -> tuple[str, ...]:
    """Levels whose library is built and which this CPU supports, best first."""
    levels = []
    for level in LEVELS:
        if library_path(level).exists():
            functions = _open(level)
            if functions.hopon_level_supported():
                levels.append(level)
    return tuple(levels)


def choose_level(forced: str | None = None) -> tuple[str, str]:
    """The level to load, and the reason in a few words for the log.

    Args:
        forced: a level that the user wants, or None for the best one.

    Raises:
        NativeError: no library is built, or the forced level is unknown, not built or not supported by this CPU.
    """
    available = available_levels()
    if forced is not None:
        if forced not in LEVELS:
            raise NativeError(f"unknown kernel level {forced!r}; known: {', '.join(LEVELS)}")
        if forced not in available:
            _refuse(forced)
        return forced, "asked for"
    if not available:
        raise NativeError(
            f"no kernel library in {library_path(LEVELS[0]).parent}; build them with: python -m hopon.native.build"
        )
    best = available[0]
    passed = [f"{level} {_why_not(level)}" for level in LEVELS[: LEVELS.index(best)]]
    return best, "; ".join(["best of this CPU", *passed]) if passed else "best of this CPU"


def load(level: str) -> Library:
    """Opens the library of ``level``.

    Raises:
        NativeError: it is unknown, missing, of another ABI or not supported by this CPU.
    """
    if level not in LEVELS:
        raise NativeError(f"unknown kernel level {level!r}; known: {', '.join(LEVELS)}")
    if not library_path(level).exists():
        _refuse(level)
    functions = _open(level)
    if not functions.hopon_level_supported():
        _refuse(level)
    sizes = (ctypes.c_int32 * len(STRUCTS))()
    functions.hopon_sizes(sizes)
    for struct, size in zip(STRUCTS, sizes, strict=True):
        if ctypes.sizeof(struct) != size:
            here = ctypes.sizeof(struct)
            raise NativeError(
                f"{struct.__name__} has {here} bytes here and {size} in {library_path(level)}; rebuild it"
            )
    name = functions.hopon_level().decode()
    assert name == level, f"{library_path(level)} says it is {name}"
    return Library(level, functions)


def _why_not(level: str) -> str:
    return "is not supported by this CPU" if library_path(level).exists() else "is not built"


def _refuse(level: str) -> None:
    raise NativeError(f"kernel level {level} {_why_not(level)}; library: {library_path(level)}")


def _row_stride(name: str, array: NDArray[np.float32], columns: int) -> int:
    """Distance between two rows in floats."""
    if array.ndim != 2 or array.dtype != np.float32:
        raise ValueError(f"{name} must be a float32 matrix, got {array.dtype.name} of shape {array.shape}")
    if array.shape[1] < columns:
        raise ValueError(f"{name} must have at least {columns} columns, got {array.shape[1]}")
    if array.size == 0:
        return max(columns, 1)
    row, column = array.strides
    if (array.shape[1] > 1 and column != 4) or (len(array) > 1 and row < 4 * array.shape[1]) or row % 4:
        raise ValueError(f"{name} must have adjacent columns and separate rows, got strides {array.strides}")
    return row // 4 if len(array) > 1 else array.shape[1]


def _open(level: str) -> ctypes.CDLL:
    path = library_path(level)
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}") from error
    integer, long, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "hopon_abi": (integer, []),
        "hopon_level": (ctypes.c_char_p, []),
        "hopon_level_supported": (integer, []),
        "hopon_sizes": (None, [address]),
        "hopon_uniform": (ctypes.c_double, [ctypes.c_uint64, integer, integer]),
        "hopon_pool_create": (address, [integer]),
        "hopon_pool_destroy": (None, [address]),
        "hopon_linear": (integer, [address, address, address, long, address, long, integer, integer]),
        "hopon_forward": (integer, [address, address, address]),
        "hopon_step": (integer, [address, address, address, address]),
        "hopon_sample": (integer, [address, address]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(functions, name)
        except AttributeError as error:
            raise NativeError(
                f"{path} has no function {name}; rebuild it with: python -m hopon.native.build"
            ) from error
        function.restype = result
        function.argtypes = arguments
        if name == "hopon_abi" and (found := function()) != ABI:
            raise NativeError(
                f"{path} has ABI {found}, this hopon needs {ABI}; rebuild it with: python -m hopon.native.build"
            )
    return functions
