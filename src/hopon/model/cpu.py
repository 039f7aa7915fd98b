"""The CPU executor and the factory that loads a model for it.

``load`` is what the engine process is started with ("hopon.model.cpu:load"). Order of decisions: the model's
configuration, the memory, the settings; only then weights are read.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.plan import Chunk, Deployment, Move, Report, RowResult, StepPlan, StepResult
from hopon.model.batch import FlatBatch, Rows
from hopon.model.families import build_program
from hopon.model.guide import Guides
from hopon.model.kv import anonymous, block_bytes, size_kv
from hopon.model.lowering import LoweredProgram, buffer_bytes
from hopon.model.machine import available_memory, num_threads
from hopon.model.sampler import Sampler
from hopon.model.source import open_source
from hopon.model.vocabulary import read_vocabulary
from hopon.model.weights.store import Layout, WeightDtype, load_weights, plan_layout

MAX_LOGIT_ROWS = 64
"""Most positions whose logits exist at once; more are scored slice by slice, which bounds memory."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed when it was submitted."""

    value: StepResult

    def result(self) -> StepResult:
        """What came of it."""
        return self.value


class CpuExecutor:
    """Computes plans on this machine's cores, at once, in the calling thread and its pool.

    Args:
        library: kernels of one instruction level.
        threads: workers, the caller included.
        model: the program, bound to memory.
        kv: [blocks, bytes per block]; those behind ``config.num_blocks`` are scratch for padding.
        config: limits; see there.
        guides: of the model's vocabulary.
    """

    def __init__(
        self,
        *,
        library: native.Library,
        threads: int,
        model: LoweredProgram,
        kv: NDArray[np.uint8],
        config: SchedulerConfig,
        guides: Guides,
    ) -> None:
        self._library, self._model, self._kv, self._config = library, model, kv, config
        self._host = anonymous(config.num_host_blocks * kv.shape[1]).reshape(-1, kv.shape[1])
        self._pool = library.pool(threads)
        self._rows = Rows(
            max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, block_size=config.block_size
        )
        scratch = np.arange(config.num_blocks, len(kv))
        self._rows.tables[self._rows.padding_row, : len(scratch)] = scratch
        # Tokens of one sequence: no more than the scratch blocks hold, a step computes and a position exists for.
        self._max_padding = min(len(scratch) * config.block_size, config.max_num_batched_tokens, config.max_model_len)
        self._batch = FlatBatch(
            self._rows, max_num_segments=config.max_num_seqs + 1, max_num_tokens=config.max_num_batched_tokens
        )
        self._sampler = Sampler(
            self._rows,
            max_num_seqs=config.max_num_seqs,
            max_num_logits=config.max_num_batched_tokens,
            logits=model.logits,
            guides=guides,
        )

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Compute a plan. Raises NativeError where a kernel refuses it."""
        for row in plan.closed:
            self._rows.close(row)
            self._sampler.close(row)
        for move in plan.moves:
            self._move(move)
        for opened in plan.opened:
            self._rows.open(opened)
            self._sampler.open(opened)
        for chunk in plan.chunks:
            self._rows.append_blocks(chunk)
        padding = self._forward_padding(plan)
        if not plan.chunks:
            return FinishedStep(StepResult())
        self._batch.fill(plan.chunks, padding)
        return FinishedStep(StepResult(self._compute(plan.chunks)))

    def close(self) -> None:
        """End the threads; memory goes with the object."""
        self._pool.close()

    def _compute(self, chunks: tuple[Chunk, ...]) -> tuple[RowResult, ...]:
        """Run the filled batch and sample: the first slice of logits in the same call, the others after it."""
        batch, model, num_logits = self._batch, self._model, self._batch.num_logits
        if not num_logits:
            batch.want_logits(0, 0)
            self._library.forward(self._pool, model.body, batch.struct)
            return tuple([RowResult(chunk.row) for chunk in chunks])
        self._sampler.prepare(chunks)
        most = len(model.logits)
        for start in range(0, num_logits, most):
            stop = min(start + most, num_logits)
            batch.want_logits(start, stop)
            program = model.tail if start else model.whole
            self._library.step(self._pool, program, batch.struct, self._sampler.part(start, stop))
        return self._sampler.results(chunks)

    def _forward_padding(self, plan: StepPlan) -> int:
        """Pay for padding: passes of dummy tokens for what does not fit beside the plan's own; returns what does."""
        left, room = plan.padding, self._config.max_num_batched_tokens - plan.num_tokens
        beside = min(left, room, self._max_padding) if plan.chunks else 0
        left -= beside
        while left:
            count = min(left, self._max_padding)
            self._batch.fill((), count)
            self._batch.want_logits(0, 0)
            self._library.forward(self._pool, self._model.body, self._batch.struct)
            left -= count
        return beside

    def _move(self, move: Move) -> None:
        source = self._host if move.kind == "from_host" else self._kv
        target = self._host if move.kind == "to_host" else self._kv
        assert move.source < len(source), f"no block {move.source} to move ({move.kind})"
        assert move.target < len(target), f"no block {move.target} to move to ({move.kind})"
        target[move.target] = source[move.source]


def load(options: EngineOptions, report: Report) -> Deployment:
    """Open a model, size the cache, load or pack the weights, and start the threads.

    Raises:
        OSError: a file is missing or cannot be read; names it.
        ValueError: a file or an option is at fault, the memory does not suffice, or there are no kernels for the level
            that was asked for; names it with the numbers.
    """
    report("opening the model", 0.0)
    dtype = weight_dtype(options.dtype)
    try:
        level, reason = native.choose_level(options.level)
        library = native.load(level)
    except native.NativeError as error:  # for whoever starts it: an option or an installation at fault
        raise ValueError(str(error)) from error
    threads = options.threads or num_threads()
    source = open_source(options.model)
    program = build_program(source.config)
    layout = plan_layout(source, program, dtype)
    kv_dtype = cache_dtype(options.kv_cache_dtype, layout)

    num_tokens = options.max_num_batched_tokens
    num_logits = min(num_tokens, MAX_LOGIT_ROWS)
    buffers = buffer_bytes(program, max_num_tokens=num_tokens, max_num_logits=num_logits)
    item_size = 4 if kv_dtype is native.CacheDtype.F32 else 2
    other_blocks = -(-num_tokens // options.block_size) + options.num_host_blocks  # for padding, and the host tier
    fixed = layout.num_bytes + buffers + other_blocks * block_bytes(source.config, options.block_size, item_size)
    size = size_kv(source.config, options, item_size=item_size, available=available_memory(), fixed=fixed)
    if size.notice:
        warnings.warn(size.notice, stacklevel=2)
    config = SchedulerConfig(
        num_blocks=size.num_blocks,
        num_host_blocks=options.num_host_blocks,
        block_size=options.block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=num_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
    )

    cache_dir = Path(options.cache_dir) if options.cache_dir else None
    weights = load_weights(source, program, layout, cache_dir, report)
    scratch = -(-min(num_tokens, size.max_model_len) // options.block_size)
    # Not in huge pages: clearing them when they are first touched costs more than the address look-ups they spare.
    kv = anonymous((size.num_blocks + scratch) * size.block_bytes).reshape(-1, size.block_bytes)
    model = LoweredProgram(
        program,
        source.config,
        weights,
        kv=kv,
        kv_dtype=kv_dtype,
        block_size=options.block_size,
        num_blocks=len(kv),
        max_model_len=size.max_model_len,
        max_num_tokens=num_tokens,
        max_num_logits=num_logits,
    )
    guides = Guides(lambda: read_vocabulary(options.tokenizer or options.model), source.config.vocab_size)
    executor = CpuExecutor(library=library, threads=threads, model=model, kv=kv, config=config, guides=guides)
    summary: dict[str, str | int | float] = {
        "model": str(source.path),
        "family": source.config.family,
        "parameters": source.config.num_parameters,
        "vocab_size": source.config.vocab_size,
        "dtype": layout.description,
        "kv_cache_dtype": kv_dtype.name.lower(),
        "level": level,
        "level_reason": reason,
        "threads": threads,
        "weight_bytes": layout.num_bytes,
        "buffer_bytes": buffers,
        "kv_bytes": size.num_bytes,
        "kv_bytes_per_token": size.block_bytes // size.block_size,
        "kv_tokens": size.num_tokens,
        "max_model_len": size.max_model_len,
        "full_length_requests": round(size.num_full_requests, 2),
    }
    report("ready", 1.0)
    return Deployment(executor=executor, config=config, summary=summary)


_WEIGHT_DTYPES: dict[str, WeightDtype] = {
    "auto": "auto",
    "f32": "f32",
    "float32": "f32",
    "float": "f32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "q8": "q8",
    "q4": "q4",
}


def weight_dtype(name: str) -> WeightDtype:
    """The precision that a user's word for it means. Raises ValueError with the known words."""
    if name not in _WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_WEIGHT_DTYPES)}, got {name!r}")
    return _WEIGHT_DTYPES[name]


def cache_dtype(name: str, layout: Layout) -> native.CacheDtype:
    """Precision of the KV cache.

    By itself bfloat16 beside integer weights, float16 beside bfloat16 ones and float32 beside float32. Kernels are
    fastest with bfloat16, which rounds queries and weights of attention too; beside bfloat16 weights the sum of both is
    too far from float32 (mean change of a log-probability above 0.015 on SmolLM2), while float16 adds nothing to it.
    """
    f32, bf16, f16 = native.CacheDtype.F32, native.CacheDtype.BF16, native.CacheDtype.F16
    known = {"f32": f32, "float32": f32, "float": f32, "bf16": bf16, "bfloat16": bf16, "f16": f16, "float16": f16}
    if name == "auto":
        dtypes = {place.dtype for place in layout.matrices.values()}
        if native.Dtype.F32 in dtypes:
            return f32
        return f16 if native.Dtype.BF16 in dtypes else bf16
    if name not in known:
        raise ValueError(f"kv_cache_dtype must be one of auto, {', '.join(known)}, got {name!r}")
    return known[name]
