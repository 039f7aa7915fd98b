"""A model as a program: a short list of ops over named buffers.

A family page builds it once; ``lowering`` turns it into what the kernels read. Plain data: it knows neither files nor
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hopon.native import OpKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op. ``source`` and ``target`` name buffers, ``matrix`` and the vectors name weights of the program.

    ``on_logits`` ops work on the rows that want logits, the others on all tokens of the batch.
    """

    kind: OpKind
    target: str
    source: str = ""
    matrix: str = ""
    vector: str = ""
    vector2: str = ""
    layer: int = 0
    width: int = 0
    groups: int = 1
    eps: float = 0.0
    accumulate: bool = False
    on_logits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A weight matrix of the program: tensors of the file stacked by rows.

    ``weights`` and ``biases`` are canonical tensor names; there are as many biases as weights, or none. ``is_table``
    marks embedding and head: they are kept at 8 bits where the layers have 4. Integer kernels keep a second digit for
    one in ``inputs_per_outlier`` of the inputs (see hopon.h).
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    is_table: bool = False
    inputs_per_outlier: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Buffers (name -> width in floats), weights and ops of a model.

    ``logit_buffers`` hold one row per position that wants logits, the others one per token of the batch. The last
    buffer written is ``logits``. ``vectors`` are canonical names of norm weights.
    """

    buffers: Mapping[str, int]
    logit_buffers: Mapping[str, int]
    matrices: Mapping[str, Matrix]
    vectors: tuple[str, ...]
    ops: tuple[Op, ...]

    @property
    def num_body_ops(self) -> int:
        """Ops before the first one that works on the rows that want logits."""
        return next(i for i, op in enumerate(self.ops) if op.kind == OpKind.SELECT)


class Builder:
    """Collects buffers, weights and ops while a family page states them one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, int] = {}
        self._logit_buffers: dict[str, int] = {}
        self._matrices: dict[str, Matrix] = {}
        self._vectors: list[str] = []
        self._ops: list[Op] = []
        self._selected = False

    def embed(self, target: str, tensor: str, width: int) -> None:
        """``target`` = the rows of the embedding that the batch's tokens pick."""
        self._matrices[tensor] = Matrix(weights=(f"{tensor}.weight",), is_table=True)
        self._write(Op(kind=OpKind.EMBED, target=target, matrix=tensor), width)

    def norm(self, source: str, target: str, tensor: str, width: int, eps: float) -> None:
        """RMSNorm of every row."""
        vector = self._vector(tensor)
        op = Op(kind=OpKind.NORM, source=source, target=target, vector=vector, width=width, eps=eps)
        self._write(op, width)

    def linear(self, source: str, target: str, tensors: tuple[str, ...], width: int, *, biased: bool = False) -> None:
        """``target`` = source times the stacked matrices, plus their biases."""
        self._linear(source, target, tensors, width, biased, accumulate=False)

    def add_linear(self, source: str, target: str, tensor: str, width: int, *, biased: bool = False) -> None:
        """``target`` += source times the matrix, plus its bias."""
        self._linear(source, target, (tensor,), width, biased, accumulate=True)

    def rope_kv(self, qkv: str, layer: int, *, q_norm: str = "", k_norm: str = "", eps: float = 0.0) -> None:
        """Norm (where named) and rotate q and k, and write K and V of the layer into the cache."""
        vector, vector2 = (self._vector(name) if name else "" for name in (q_norm, k_norm))
        self._ops.append(
            Op(kind=OpKind.ROPE_KV, source=qkv, target=qkv, layer=layer, vector=vector, vector2=vector2, eps=eps)
        )

    def attention(self, qkv: str, target: str, layer: int, width: int) -> None:
        """``target`` = causal attention of the rotated q over the cache of the layer."""
        self._write(Op(kind=OpKind.ATTENTION, source=qkv, target=target, layer=layer), width)

    def gate(self, source: str, target: str, width: int) -> None:
        """``target`` = silu(first half of source) * second half."""
        self._write(Op(kind=OpKind.GATE, source=source, target=target, width=width), width)

    def select(self, *names: str) -> None:
        """From here on these buffers, and all others that are written, have only the rows that want logits.

        Behind the last attention nobody needs the other rows: that spares them most of a layer.
        """
        self._selected = True
        for name in names:
            width = self._buffers[name]
            self._write(Op(kind=OpKind.SELECT, source=name, target=name, width=width), width)

    def head(self, source: str, target: str, tensor: str, width: int) -> None:
        """Logits. The embedding's own matrix serves where the two are tied: there is one copy."""
        self._matrices[tensor] = Matrix(weights=(f"{tensor}.weight",), is_table=True, inputs_per_outlier=16)
        self._write(Op(kind=OpKind.LINEAR, source=source, target=target, matrix=tensor), width)

    def build(self) -> Program:
        """The program as stated."""
        return Program(
            buffers=self._buffers,
            logit_buffers=self._logit_buffers,
            matrices=self._matrices,
            vectors=tuple(self._vectors),
            ops=tuple(self._ops),
        )

    def _linear(
        self, source: str, target: str, tensors: tuple[str, ...], width: int, biased: bool, *, accumulate: bool
    ) -> None:
        name = "+".join(tensors)
        self._matrices[name] = Matrix(
            weights=tuple(f"{tensor}.weight" for tensor in tensors),
            biases=tuple(f"{tensor}.bias" for tensor in tensors) if biased else (),
            # What the gate multiplies has the longest tails: on some tokens a few inputs are 100 times the others.
            inputs_per_outlier=12
            if any(op.kind == OpKind.GATE and op.target == self._current(source) for op in self._ops)
            else 32,
        )
        op = Op(kind=OpKind.LINEAR, source=source, target=target, matrix=name, accumulate=accumulate)
        self._write(op, width)

    def _vector(self, tensor: str) -> str:
        self._vectors.append(f"{tensor}.weight")
        return self._vectors[-1]

    def _current(self, name: str) -> str:
        """The buffer that a name stands for: once rows are selected, those that were written before have another."""
        return f"{name} of the selected" if self._selected and name in self._buffers else name

    def _write(self, op: Op, width: int) -> None:
        source = op.source if op.kind == OpKind.SELECT else self._current(op.source)
        op = replace(op, source=source, target=self._current(op.target), on_logits=self._selected)
        buffers = self._logit_buffers if self._selected else self._buffers
        assert buffers.setdefault(op.target, width) == width, f"buffer {op.target} is written with two widths"
        self._ops.append(op)
