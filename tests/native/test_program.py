"""A whole tiny llama through hopon_forward: right against float64, and the same bits for every way to serve it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.native import CacheDtype, Dtype, Library, Op, OpKind
from tests.native.world import (
    F32,
    F64,
    Cache,
    Machine,
    Packed,
    Segment,
    Step,
    attention_model,
    make_op,
    pack,
    random_integers,
    random_tables,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, MLP, LAYERS = 90, 48, 6, 2, 8, 40, 2
QKV = (HEADS + 2 * KV_HEADS) * DIM
EPS = 1e-5
LENGTHS = [1, 7, 20, 40, 270]


class Llama:
    """Random weights of one dtype, and the same model in float64."""

    def __init__(self, dtype: Dtype, *, head_norms: bool, bias: bool, interleaved: bool) -> None:
        self.rng = rng = np.random.default_rng([int(dtype), head_norms, bias])
        self.interleaved, self.head_norms = interleaved, head_norms

        def matrix(rows: int, cols: int, with_bias: bool = False) -> Packed:
            if dtype in (Dtype.I8, Dtype.I4):
                return random_integers(rng, rows, cols, dtype)
            offset = rng.standard_normal(rows).astype(np.float32) if with_bias else None
            return pack(rng.standard_normal((rows, cols)) / np.sqrt(cols), dtype, offset)

        def vector(size: int) -> F32:
            return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

        self.embed = matrix(VOCAB, HIDDEN)
        self.layers = [
            {
                "qkv": matrix(QKV, HIDDEN, bias),
                "out": matrix(HIDDEN, HEADS * DIM),
                "up": matrix(2 * MLP, HIDDEN),
                "down": matrix(HIDDEN, MLP),
            }
            for _ in range(LAYERS)
        ]
        self.norms = [{name: vector(HIDDEN) for name in ("attention", "mlp")} for _ in range(LAYERS)]
        self.heads = [{name: vector(DIM) for name in ("q", "k")} for _ in range(LAYERS)]
        self.final = vector(HIDDEN)
        angle = np.arange(512)[:, None] * 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
        self.rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        self.tokens = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]

    def program(self) -> list[Op]:
        """Buffers: 0 residual, 1 normed, 2 qkv, 3 attention, 4 gate and up, 5 gated, 6 selected, 7 logits."""
        ops = [make_op(OpKind.EMBED, output=0, matrix=self.embed)]
        for i, (weights, norms, heads) in enumerate(zip(self.layers, self.norms, self.heads, strict=True)):
            extra = {"vector": heads["q"], "vector2": heads["k"], "eps": EPS} if self.head_norms else {}
            ops += [
                make_op(OpKind.NORM, input=0, output=1, width=HIDDEN, groups=1, vector=norms["attention"], eps=EPS),
                make_op(OpKind.LINEAR, input=1, output=2, matrix=weights["qkv"]),
                make_op(OpKind.ROPE_KV, input=2, layer=i, **extra),
                make_op(OpKind.ATTENTION, input=2, output=3, layer=i),
                make_op(OpKind.LINEAR, input=3, output=0, matrix=weights["out"], accumulate=1),
                make_op(OpKind.NORM, input=0, output=1, width=HIDDEN, groups=1, vector=norms["mlp"], eps=EPS),
                make_op(OpKind.LINEAR, input=1, output=4, matrix=weights["up"]),
                make_op(OpKind.GATE, input=4, output=5, width=MLP),
                make_op(OpKind.LINEAR, input=5, output=0, matrix=weights["down"], accumulate=1),
            ]
        ops += [
            make_op(OpKind.SELECT, input=0, output=6, width=HIDDEN),
            make_op(OpKind.NORM, input=6, output=6, width=HIDDEN, groups=1, vector=self.final, eps=EPS, on_logits=1),
            make_op(OpKind.LINEAR, input=6, output=7, matrix=self.embed, on_logits=1),
        ]
        return ops

    def expect(self, tokens: list[int]) -> F64:
        """Logits at every position in float64."""

        def norm(x: F64, weight: F32) -> F64:
            return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight, np.float64)

        def linear(x: F64, packed: Packed) -> F64:
            bias = packed.keep[-1].astype(np.float64) if packed.matrix.bias else 0.0
            return np.asarray(x @ packed.values.T + bias, np.float64)

        def rotate(x: F64) -> F64:
            half, table = DIM // 2, self.rope[: len(x), None].astype(np.float64)
            cos, sin = table[..., :half], table[..., half:]
            pairs = (slice(0, DIM, 2), slice(1, DIM, 2)) if self.interleaved else (slice(half), slice(half, DIM))
            a, b = x[..., pairs[0]], x[..., pairs[1]]
            out = np.empty_like(x)
            out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
            return out

        x = self.embed.values[tokens]
        for weights, norms, heads in zip(self.layers, self.norms, self.heads, strict=True):
            qkv = linear(norm(x, norms["attention"]), weights["qkv"]).reshape(len(x), -1, DIM)
            q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
            if self.head_norms:
                q, k = norm(q, heads["q"]), norm(k, heads["k"])
            q, k = rotate(q), rotate(k)
            mixed = attention_model(q, k, v, 0, DIM**-0.5)
            x = x + linear(mixed.reshape(len(x), -1), weights["out"])
            gate, up = np.split(linear(norm(x, norms["mlp"]), weights["up"]), 2, axis=1)
            x = x + linear(gate / (1 + np.exp(-gate)) * up, weights["down"])
        return linear(norm(x, self.final), self.embed)

    def serve(
        self,
        library: Library,
        schedule: list[list[Segment]],
        *,
        kv: CacheDtype = CacheDtype.F32,
        block_size: int = 16,
        threads: int = 1,
    ) -> list[F32]:
        """Runs the steps one after another on a fresh cache full of NaN; logits of every position of every sequence."""
        tables, blocks = random_tables(self.rng, LENGTHS, block_size)
        cache = Cache(LAYERS, KV_HEADS, DIM, block_size, blocks, kv)
        most = max(sum(s.count for s in step) for step in schedule)
        widths = [HIDDEN, HIDDEN, QKV, HEADS * DIM, 2 * MLP, MLP, HIDDEN, VOCAB]
        buffers = [np.full((most, width), np.nan, np.float32) for width in widths]
        machine = Machine(
            cache, HEADS, buffers, self.program(), rope=self.rope, rope_dim=DIM, interleaved=self.interleaved
        )
        logits = [np.zeros((length, VOCAB), np.float32) for length in LENGTHS]
        with library.pool(threads) as pool:
            for segments in schedule:
                tokens = [t for s in segments for t in self.tokens[s.row][s.start : s.start + s.count]]
                machine.run(library, pool, Step(segments, tables, tokens, range(len(tokens))))
                at = 0
                for s in segments:
                    logits[s.row][s.start : s.start + s.count] = buffers[7][at : at + s.count]
                    at += s.count
        return logits


def whole() -> list[list[Segment]]:
    """Every sequence alone, in one chunk."""
    return [[Segment(row, 0, length)] for row, length in enumerate(LENGTHS)]


def random_schedule(rng: np.random.Generator) -> list[list[Segment]]:
    """Sequences hop on and off: chunks of any size, mixed with single tokens."""
    done = [0] * len(LENGTHS)
    schedule: list[list[Segment]] = []
    largest = int(rng.choice([1, 5, 40, 300]))
    while done != LENGTHS:
        step = []
        for row in rng.permutation(len(LENGTHS)).tolist():
            left = LENGTHS[row] - done[row]
            if left and rng.random() < 0.6:
                count = int(rng.integers(1, min(left, largest if rng.random() < 0.7 else 1) + 1))
                step.append(Segment(row, done[row], count))
                done[row] += count
        if step:
            schedule.append(step)
    return schedule


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_norms", [False, True])
def test_f32_llama_agrees_with_float64(library: Library, head_norms: bool, interleaved: bool) -> None:
    """Logits of whole sequences, both rotations, with and without biases and head norms."""
    llama = Llama(Dtype.F32, head_norms=head_norms, bias=not head_norms, interleaved=interleaved)
    for got, tokens in zip(llama.serve(library, whole(), threads=2), llama.tokens, strict=True):
        np.testing.assert_allclose(got, llama.expect(tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.I8, Dtype.I4])
def test_narrow_llamas_are_near_float64(library: Library, dtype: Dtype) -> None:
    """Rounded activations and a bf16 cache move the logits by little against the same weights in float64."""
    llama = Llama(dtype, head_norms=False, bias=False, interleaved=False)
    for got, tokens in zip(llama.serve(library, whole(), kv=CacheDtype.BF16), llama.tokens, strict=True):
        expected = llama.expect(tokens)
        assert np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()) < 0.03


@pytest.mark.parametrize("kv", CacheDtype)
@pytest.mark.parametrize("dtype", list(Dtype))
def test_logits_have_the_same_bits_for_every_schedule(
    library: Library, dtype: Dtype, kv: CacheDtype, effort: Callable[[int, int], int]
) -> None:
    """Alone in one chunk or hopping on and off in any crowd, chunks, page size and threads: the same logits."""
    llama = Llama(dtype, head_norms=True, bias=False, interleaved=False)
    expected = llama.serve(library, whole(), kv=kv)
    rng = np.random.default_rng([int(dtype), int(kv)])
    for _ in range(effort(4, 60)):
        schedule = random_schedule(rng)
        block_size, threads = int(rng.choice([1, 4, 16, 32, 128])), int(rng.integers(1, 3))
        got = llama.serve(library, schedule, kv=kv, block_size=block_size, threads=threads)
        for row, (a, b) in enumerate(zip(got, expected, strict=True)):
            same: NDArray[np.bool_] = (a.view(np.uint32) == b.view(np.uint32)).all(axis=1)
            assert same.all(), (
                f"sequence {row} differs first at {same.argmin()}: "
                f"block size {block_size}, threads {threads}, {schedule}"
            )


def test_a_step_without_logits_runs(library: Library) -> None:
    """An interior chunk asks for no logits: nothing is selected, normed or multiplied for it."""
    llama = Llama(Dtype.F32, head_norms=False, bias=False, interleaved=False)
    tables, blocks = random_tables(llama.rng, LENGTHS, 16)
    cache = Cache(LAYERS, KV_HEADS, DIM, 16, blocks)
    widths = [HIDDEN, HIDDEN, QKV, HEADS * DIM, 2 * MLP, MLP, HIDDEN, VOCAB]
    buffers = [np.full((20, width), 7.0, np.float32) for width in widths]
    machine = Machine(cache, HEADS, buffers, llama.program(), rope=llama.rope, rope_dim=DIM)
    with library.pool(1) as pool:
        machine.run(library, pool, Step([Segment(2, 0, 20)], tables, llama.tokens[2]))
    assert (buffers[6] == 7.0).all()
    assert (buffers[7] == 7.0).all()
    keys, values = cache.read(LAYERS - 1, tables[2], 0, 20)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()
