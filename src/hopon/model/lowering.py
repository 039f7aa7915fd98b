"""A program bound to memory: the structs that the kernels read, and the activation buffers behind them."""

from __future__ import annotations

import ctypes
from math import sqrt
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.model.config import ModelConfig
from hopon.model.kv import anonymous
from hopon.model.program import Op, Program

_ALIGN = 16  # floats in 64 bytes: every row of a buffer starts at a cache line


class PackedWeights(Protocol):
    """Where packed weights lie; they stay there as long as this object lives."""

    def matrix(self, name: str) -> native.Matrix:
        """A matrix of the program."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm weight of the program."""


def buffer_bytes(program: Program, *, max_num_tokens: int, max_num_logits: int) -> int:
    """Memory of the activation buffers."""
    tokens, logits = sum(map(_stride, program.buffers.values())), sum(map(_stride, program.logit_buffers.values()))
    return 4 * (max_num_tokens * tokens + max_num_logits * logits)


class LoweredProgram:
    """What ``hopon_forward`` runs.

    ``whole`` is the program; ``body`` ends before logits and ``tail`` begins there, so that many positions can get
    their logits slice by slice from one pass over the layers. ``logits`` is float32 [max_num_logits, vocabulary].
    """

    def __init__(
        self,
        program: Program,
        config: ModelConfig,
        weights: PackedWeights,
        *,
        kv: NDArray[np.uint8],
        kv_dtype: native.CacheDtype,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        max_num_tokens: int,
        max_num_logits: int,
    ) -> None:
        self._keep: list[Any] = [weights, kv]
        rope = config.rope.table(max_model_len)
        self._keep.append(rope)
        names, buffers = self._buffers(program, max_num_tokens, max_num_logits)
        self._matrices = {name: weights.matrix(name) for name in program.matrices}
        vectors = {name: native.pointer(weights.vector(name), np.float32) for name in program.vectors}
        ops = (native.Op * len(program.ops))(*(self._op(op, names, vectors) for op in program.ops))
        self._keep += [buffers, ops]

        def model(first: int, stop: int) -> native.Model:
            return native.Model(
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rope_dim=config.rope.dim,
                rope_interleaved=int(config.rope.interleaved),
                kv_dtype=kv_dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                max_position=max_model_len,
                attention_scale=1 / sqrt(config.head_dim),
                num_buffers=len(buffers),
                num_ops=stop - first,
                rope=native.pointer(rope, np.float32),
                kv=native.pointer(kv),
                block_bytes=kv.nbytes // num_blocks,
                buffers=buffers,
                ops=ctypes.cast(ctypes.addressof(ops) + first * ctypes.sizeof(native.Op), ctypes.POINTER(native.Op)),
            )

        body = program.num_body_ops
        self.whole, self.body, self.tail = model(0, len(ops)), model(0, body), model(body, len(ops))

    def _buffers(self, program: Program, max_num_tokens: int, max_num_logits: int) -> tuple[dict[str, int], Any]:
        """Numbers of the named buffers, and their structs."""
        structs = []
        widths = [(*item, max_num_tokens) for item in program.buffers.items()]
        widths += [(*item, max_num_logits) for item in program.logit_buffers.items()]
        for name, width, num_rows in widths:
            memory = anonymous(4 * num_rows * _stride(width)).view(np.float32).reshape(num_rows, _stride(width))
            self._keep.append(memory)
            structs.append(native.Buffer(data=native.pointer(memory), width=_stride(width)))
            if name == "logits":
                self.logits: NDArray[np.float32] = memory[:, :width]
        return {name: i for i, (name, _, _) in enumerate(widths)}, (native.Buffer * len(structs))(*structs)

    def _op(self, op: Op, buffers: dict[str, int], vectors: dict[str, int | None]) -> native.Op:
        return native.Op(
            kind=op.kind,
            on_logits=int(op.on_logits),
            input=buffers[op.source or op.target],
            output=buffers[op.target],
            layer=op.layer,
            width=op.width,
            groups=op.groups,
            accumulate=int(op.accumulate),
            eps=op.eps,
            matrix=ctypes.pointer(self._matrices[op.matrix]) if op.matrix else None,
            vector=vectors.get(op.vector),
            vector2=vectors.get(op.vector2),
        )


def _stride(width: int) -> int:
    return -(-width // _ALIGN) * _ALIGN
