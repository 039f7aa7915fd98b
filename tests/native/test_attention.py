"""Ragged paged attention: right against float64, and the same bits whoever shares the call."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.native import CacheDtype, Library, OpKind, load
from hopon.native import build as builder
from tests.native.world import (
    F32,
    Cache,
    Machine,
    Segment,
    Step,
    attention_model,
    make_op,
    random_tables,
)


class Crowd:
    """Sequences with known K, V and queries at every position of one layer.

    ``prefixes`` says of a sequence which other one it shares its first tokens with, and how many.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        kv_heads: int,
        group: int,
        dim: int,
        sharpness: float = 1.0,
        prefixes: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.rng, self.lengths, self.kv_heads, self.group, self.dim = rng, lengths, kv_heads, group, dim
        shape = (sum(lengths), kv_heads, dim)
        self.first = np.concatenate([[0], np.cumsum(lengths)])
        self.keys, self.values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        self.query = rng.standard_normal((shape[0], kv_heads * group, dim), dtype=np.float32) * np.float32(sharpness)
        self.prefixes = prefixes or {}
        for row, (other, count) in self.prefixes.items():
            for array in (self.keys, self.values):
                array[self.first[row] :][:count] = array[self.first[other] :][:count]

    def run(
        self,
        library: Library,
        segments: list[Segment],
        *,
        block_size: int = 16,
        dtype: CacheDtype = CacheDtype.F32,
        threads: int = 1,
        layer: int = 1,
    ) -> list[F32]:
        """Output [count, heads, dim] of each segment; only what a segment may see is in the cache, the rest is NaN."""
        rows = sorted({s.row for s in segments})
        ends = [max(s.start + s.count for s in segments if s.row == row) for row in rows]
        tables, blocks = random_tables(self.rng, ends, block_size)
        for row, (other, count) in self.prefixes.items():
            if row in rows and other in rows:
                mine, theirs = rows.index(row), rows.index(other)
                whole = min(count, ends[mine], ends[theirs]) // block_size
                tables[mine, :whole] = tables[theirs, :whole]
        cache = Cache(2, self.kv_heads, self.dim, block_size, blocks, dtype)
        for i, row in enumerate(rows):
            own = slice(self.first[row], self.first[row] + ends[i])
            cache.store(layer, tables[i], 0, self.keys[own], self.values[own])
        heads = self.kv_heads * self.group
        local = [Segment(rows.index(s.row), s.start, s.count) for s in segments]
        step = Step(local, tables)
        qkv = np.full((step.batch.num_tokens, (heads + 2 * self.kv_heads) * self.dim + 5), np.nan, np.float32)
        token = 0
        for s in segments:
            at = self.first[s.row] + s.start
            qkv[token : token + s.count, : heads * self.dim] = self.query[at : at + s.count].reshape(s.count, -1)
            token += s.count
        out = np.full((len(qkv), heads * self.dim + 3), 7.0, np.float32)
        op = make_op(OpKind.ATTENTION, input=0, output=1, layer=layer)
        machine = Machine(cache, heads, [qkv, out], [op])
        with library.pool(threads) as pool:
            machine.run(library, pool, step)
        assert (out[:, heads * self.dim :] == 7.0).all(), "attention wrote behind its columns"
        result = out[:, : heads * self.dim].reshape(-1, heads, self.dim)
        return [result[step.start[i] : step.start[i + 1]].copy() for i in range(len(segments))]

    def expect(self, segment: Segment, dtype: CacheDtype) -> NDArray[np.float64]:
        own = slice(self.first[segment.row], self.first[segment.row] + segment.start + segment.count)
        at = self.first[segment.row] + segment.start
        rounded = Cache(1, 1, 8, 1, 1, dtype).rounded
        query = self.query[at : at + segment.count]
        return attention_model(
            rounded(query) if dtype == CacheDtype.BF16 else query,
            rounded(self.keys[own]),
            rounded(self.values[own]),
            segment.start,
            self.dim**-0.5,
        )

    def random_segments(self, count: int, chunk: int) -> list[Segment]:
        segments = []
        for row in self.rng.permutation(len(self.lengths))[:count]:
            start = int(self.rng.integers(0, self.lengths[row]))
            limit = 1 if self.rng.random() < 0.4 else chunk
            segments.append(
                Segment(int(row), start, int(self.rng.integers(1, min(limit, self.lengths[row] - start) + 1)))
            )
        return segments


LENGTHS = [1, 2, 15, 16, 17, 31, 33, 100, 255, 256, 257, 300, 511, 512, 513, 600]


@pytest.mark.parametrize("dtype", CacheDtype)
@pytest.mark.parametrize(("group", "dim"), [(1, 8), (2, 64), (3, 64), (7, 128), (3, 24), (5, 96), (1, 256), (30, 16)])
def test_attention_agrees_with_float64(library: Library, dtype: CacheDtype, group: int, dim: int) -> None:
    """Any mix of chunks and decodes gives the float64 result, for every way to store and page K and V."""
    rng = np.random.default_rng([group, dim, int(dtype)])
    crowd = Crowd(rng, LENGTHS, 2, group, dim, sharpness=2.0)
    for block_size in (1, 8, 16, 32, 128):
        segments = crowd.random_segments(6, 70)
        segments.append(Segment(15, 597, 3))  # three rows behind two borders of a split
        segments = list({s.row: s for s in segments}.values())
        results = crowd.run(library, segments, block_size=block_size, dtype=dtype, threads=2)
        for segment, got in zip(segments, results, strict=True):
            # With a bf16 cache the weights are rounded to bf16 as well: 2^-9 of each, of values that go up to 4.
            rtol, atol = (2e-3, 5e-3) if dtype == CacheDtype.BF16 else (2e-5, 1e-5)
            np.testing.assert_allclose(got, crowd.expect(segment, dtype), rtol=rtol, atol=atol)


def check_identity(library: Library, *, rounds: int, dtypes: Sequence[CacheDtype] = tuple(CacheDtype)) -> None:
    """Raises AssertionError unless every row has the bits that it has alone."""
    for dtype in dtypes:
        for group, dim in ((1, 64), (3, 64), (5, 96), (7, 24)):
            rng = np.random.default_rng([group, dim, int(dtype), 5])
            crowd = Crowd(rng, [5, 16, 40, 255, 300, 530], 2, group, dim)
            alone: dict[tuple[int, int], F32] = {}
            for _ in range(rounds):
                segments = crowd.random_segments(int(rng.integers(1, 7)), 90)
                block_size, threads = int(rng.choice([1, 2, 4, 8, 16, 48, 128])), int(rng.integers(1, 3))
                results = crowd.run(library, segments, block_size=block_size, dtype=dtype, threads=threads)
                for segment, got in zip(segments, results, strict=True):
                    for i in {0, segment.count - 1, int(rng.integers(0, segment.count))}:
                        key = (segment.row, segment.start + i)
                        if key not in alone:
                            alone[key] = crowd.run(library, [Segment(*key, 1)], dtype=dtype)[0]
                        assert got[i].tobytes() == alone[key].tobytes(), (
                            f"row {key} differs: {segments}, block size {block_size}, threads {threads}, {dtype!r}"
                        )


def test_attention_of_a_row_has_the_same_bits_in_any_crowd(library: Library, effort: Callable[[int, int], int]) -> None:
    """A row alone, in a crowd, in any chunk, page size and number of threads: one result, bit by bit."""
    check_identity(library, rounds=effort(12, 200))


def check_cuts(library: Library) -> None:
    """Raises AssertionError unless long contexts have the same bits for any number of threads."""
    crowd = Crowd(np.random.default_rng(3), [3000], 1, 3, 64)
    for segment in (Segment(0, 2999, 1), Segment(0, 2600, 9), Segment(0, 509, 5)):
        one = crowd.run(library, [segment], threads=1)[0]
        for threads in (2, 3, 5):
            assert crowd.run(library, [segment], threads=threads)[0].tobytes() == one.tobytes()
        np.testing.assert_allclose(one, crowd.expect(segment, CacheDtype.F32), rtol=2e-5, atol=1e-5)


def test_a_long_context_cut_over_threads_has_the_same_bits(library: Library) -> None:
    """Splits computed by several workers and merged afterwards give the bits of one worker."""
    check_cuts(library)


def check_sharing(library: Library, *, rounds: int, dtypes: Sequence[CacheDtype] = tuple(CacheDtype)) -> None:
    """Raises AssertionError unless decodes behind common blocks have the bits that they have alone."""
    lengths = [900, 700, 1300, 520, 600, 1100, 256, 800, 257, 1025, 640, 530]
    prefixes = {1: (0, 600), 2: (0, 900), 3: (0, 512), 5: (4, 300), 7: (4, 513), 8: (0, 256), 9: (2, 1024)}
    prefixes[11] = (0, 100)  # less than a split
    for dtype in dtypes:
        for group, dim in ((1, 64), (3, 64), (9, 24)):
            rng = np.random.default_rng([group, dim, int(dtype), 8])
            crowd = Crowd(rng, lengths, 2, group, dim, prefixes=prefixes)
            last = [Segment(row, length - 1, 1) for row, length in enumerate(lengths)]
            alone = [crowd.run(library, [segment], dtype=dtype)[0] for segment in last]
            for _ in range(rounds):
                chosen = [int(row) for row in rng.permutation(len(lengths))[: int(rng.integers(2, len(lengths) + 1))]]
                segments = [last[row] for row in chosen]
                segments[0] = Segment(chosen[0], lengths[chosen[0]] - 20, 20)  # a chunk among them
                block_size, threads = int(rng.choice([1, 4, 16, 48, 64, 256])), int(rng.integers(1, 4))
                results = crowd.run(library, segments, block_size=block_size, dtype=dtype, threads=threads)
                for row, got in zip(chosen, results, strict=True):
                    assert got[-1].tobytes() == alone[row].tobytes(), (
                        f"row {row} differs: {chosen}, block size {block_size}, threads {threads}, {dtype!r}"
                    )


def test_decodes_behind_a_common_prefix_have_the_same_bits(library: Library, effort: Callable[[int, int], int]) -> None:
    """Rows that read common blocks together, trees of prefixes included: the bits of each alone."""
    check_sharing(library, rounds=effort(6, 100))


def check_rules(library: Library) -> None:
    """All that the mutants below must not pass."""
    check_identity(library, rounds=12, dtypes=(CacheDtype.F32,))
    check_cuts(library)
    check_sharing(library, rounds=4, dtypes=(CacheDtype.F32,))


def test_the_rules_hold_before_mutation(built_levels: tuple[str, ...]) -> None:
    """What the mutants fail is what the real portable kernels pass."""
    assert "portable" in built_levels
    check_rules(load("portable"))


def test_huge_scores_do_not_overflow(library: Library) -> None:
    """Scores far beyond the range of exp give the row of V that wins."""
    crowd = Crowd(np.random.default_rng(4), [400], 1, 2, 64, sharpness=1e4)
    segment = Segment(0, 380, 20)
    got = crowd.run(library, [segment])[0]
    np.testing.assert_allclose(got, crowd.expect(segment, CacheDtype.F32), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", CacheDtype)
def test_a_poisoned_neighbour_does_not_leak(library: Library, dtype: CacheDtype) -> None:
    """NaN and infinities of one sequence stay in its own rows."""
    crowd = Crowd(np.random.default_rng(6), [70, 70], 2, 3, 64)
    clean = crowd.run(library, [Segment(0, 40, 30)], dtype=dtype)[0]
    for poison in (np.nan, np.inf):
        crowd.keys[crowd.first[1] :] = poison
        crowd.values[crowd.first[1] :] = poison
        mixed = crowd.run(library, [Segment(1, 40, 30), Segment(0, 40, 30)], dtype=dtype)
        assert mixed[1].tobytes() == clean.tobytes()
        if dtype != CacheDtype.F16 or np.isnan(poison):  # f16 keeps the largest number it has instead of an infinity
            assert np.isnan(mixed[0]).all()


@pytest.mark.parametrize("dtype", CacheDtype)
def test_a_later_token_does_not_leak_into_an_earlier_row(library: Library, dtype: CacheDtype) -> None:
    """NaN written at a later position of the same chunk does not change the rows before it (weight 0 times NaN)."""
    crowd = Crowd(np.random.default_rng(7), [60], 1, 3, 64)
    clean = crowd.run(library, [Segment(0, 20, 40)], dtype=dtype)[0]
    crowd.keys[45:], crowd.values[45:] = np.nan, np.nan
    dirty = crowd.run(library, [Segment(0, 20, 40)], dtype=dtype)[0]
    assert dirty[:25].tobytes() == clean[:25].tobytes()
    assert np.isnan(dirty[25:]).all()


@pytest.mark.parametrize("dtype", CacheDtype)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_later_value_does_not_leak_through_a_weight_of_zero(
    library: Library, dtype: CacheDtype, poison: float
) -> None:
    """The rows before a V that is no number have the bits that they have without it; those from there on do not."""
    crowd = Crowd(np.random.default_rng(9), [300], 1, 3, 64)
    clean = crowd.run(library, [Segment(0, 230, 70)], dtype=dtype)[0]
    crowd.values[273:] = poison
    dirty = crowd.run(library, [Segment(0, 230, 70)], dtype=dtype)[0]
    assert dirty[:43].tobytes() == clean[:43].tobytes()
    if dtype != CacheDtype.F16 or np.isnan(poison):
        assert not np.isfinite(dirty[43:]).any()


@pytest.mark.parametrize("dtype", CacheDtype)
def test_a_result_that_underflows_has_the_same_sign_in_any_crowd(library: Library, dtype: CacheDtype) -> None:
    """The sum of a row ends below the smallest normal number: later rows of the same chunk leave it as it is."""
    crowd = Crowd(np.random.default_rng(10), [60], 1, 1, 64, sharpness=0.0)
    crowd.values[:] = 0.0
    crowd.values[0], crowd.values[16] = 1.25 * 2.0**-126, -1.5 * 2.0**-126
    chunk = crowd.run(library, [Segment(0, 20, 40)], dtype=dtype)[0]
    for i in (0, 5, 11, 12, 39):
        assert crowd.run(library, [Segment(0, 20 + i, 1)], dtype=dtype)[0].tobytes() == chunk[i : i + 1].tobytes()


MUTANTS = {
    "splits of 128 tokens for chunks": (
        "attention.h",
        "for (int split = task.split; split < task.split_end; ++split) {",
        "const int kSplit = task.num_rows > 4 ? 128 : 256; const int last = (last_length + kSplit - 1) / kSplit;\n"
        "for (int split = task.split; split < last; ++split) {",
    ),
    "free lanes are not masked": (
        "attention_vectors.h",
        "store(scores + full, keep_first(load(scores + full), rest, -infinity));",
        "",
    ),
    "outputs run over the whole tile": (
        "attention.h",
        "const int own = std::min(length[v + q] - begin, kSplit);",
        "const int own = std::min((length[v + q] - begin + 15) / 16 * 16, kSplit);",
    ),
    "partial results are merged as they come": (
        "attention.h",
        "merge_split(state, first, {next[width_], next[width_ + 1]}, next, width_);",
        "{ float *last = partial_at(token, kv_head, head, plan_.splits_of(plan_.context(token)) - split);"
        " merge_split(state, first, {last[width_], last[width_ + 1]}, last, width_); }",
    ),
    "a split more is taken for common": (
        "attention_plan.h",
        "shared_[s] = same;",
        "shared_[s] = std::min(same + 1, most);",
    ),
    "the first block is taken for the whole split": (
        "attention_plan.h",
        "std::mismatch(table_of(s), table_of(s) + most * blocks, table_of(other)).first - table_of(s)) / blocks;",
        "table_of(s)[0] == table_of(other)[0]);",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path, built_levels: tuple[str, ...]) -> None:
    """The identity check can fail: each way to break the rules makes it fail."""
    sources, folder = tmp_path / "src", tmp_path / "lib"
    shutil.copytree(builder.SOURCES, sources)
    file, old, new = MUTANTS[name]
    header = sources / file
    text = header.read_text()
    assert "portable" in built_levels
    assert text.count(old) == 1, f"the line to mutate is gone from {file}"
    header.write_text(text.replace(old, new))
    folder.mkdir()
    library_file = folder / "hopon-portable.so"
    flags = [flag for flag in builder.COMMON_FLAGS if flag != "-O3"]
    command = [*builder.find_compiler(), *flags, "-O1", "-DHOPON_LEVEL_PORTABLE", str(sources / "hopon.cpp"), "-o"]
    subprocess.run([*command, str(library_file)], check=True, capture_output=True)
    mutant = Library("portable", _like(library_file, load("portable")))
    with pytest.raises(AssertionError):
        check_rules(mutant)


def _like(path: Path, library: Library) -> ctypes.CDLL:
    """Opens ``path`` with the signatures of another library."""
    functions = ctypes.CDLL(str(path))
    for name in ("hopon_pool_create", "hopon_pool_destroy", "hopon_forward"):
        ours, theirs = getattr(functions, name), getattr(library.functions, name)
        ours.restype, ours.argtypes = theirs.restype, theirs.argtypes
    return functions
