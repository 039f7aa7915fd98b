"""Choosing tokens: exact sets, exact ties, right frequencies, and nothing that a bad logit could poison."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hopon.native import Library, NativeError, Pool, SampleResult, SampleRow, available_levels, load, pointer
from tests.native.world import F32, F64

ZERO = np.zeros(1, np.int32)


def row(logits_row: int = 0, banned: NDArray[np.int32] | None = None, **fields: Any) -> SampleRow:
    values: dict[str, Any] = {"forced": -1, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | fields
    return SampleRow(
        logits_row=logits_row,
        num_banned=0 if banned is None else len(banned),
        banned=pointer(banned, np.int32),
        **values,
    )


def log_softmax(logits: F32) -> F64:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - math.log(np.exp(shifted).sum()), np.float64)


def by_rank(logits: F32) -> NDArray[np.int64]:
    """Ids by logit, best first, ties by the lower id."""
    return np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))


def kept_set(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[NDArray[np.bool_], F64]:
    """The sorted model: who may be chosen, and their probabilities."""
    weight = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = np.zeros(len(logits), np.bool_)
    order = by_rank(logits)
    order = order[weight[order] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(weight[order])
        order = order[: int(np.searchsorted(mass, top_p * mass[-1] * (1 - 1e-12)) + 1)]
    kept[order] = True
    weight[~kept] = 0
    return kept, weight / weight.sum()


def draw(
    library: Library, pool: Pool, logits: F32, count: int, banned: NDArray[np.int32] | None = None, **fields: Any
) -> NDArray[np.int32]:
    """``count`` tokens with random numbers of their own."""
    rows = [row(banned=banned, seed=12345, index=i, **fields) for i in range(count)]
    return library.sample(pool, logits[None], rows, want_logprobs=np.zeros(count, np.uint8)).tokens


def test_random_numbers_are_philox(library: Library) -> None:
    """The random number is word 0 and 1 of Philox4x32-10; the words are the published known answers."""

    def words(high: int, low: int) -> float:
        return ((high << 32 | low) >> 11) * 2.0**-53

    assert library.uniform(0, 0, 0) == words(0x6627E8D5, 0xE169C58D)
    numbers = np.array(
        [library.uniform(seed, choice, i) for seed in (1, 2**63) for choice in (0, 1) for i in range(2000)]
    )
    assert len(set(numbers)) == len(numbers)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(numbers))


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 64, 65, 1000, 4097, 49152])
def test_greedy_takes_the_first_of_the_largest(library: Library, pool2: Pool, vocab: int) -> None:
    """Argmax with ties to the lower id, also where no block is full; raw log-probabilities agree with float64."""
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-5, 5, (7, vocab)).astype(np.float32)  # many ties
    result = library.sample(pool2, logits, [row(i, temperature=0.0) for i in range(7)])
    assert (result.tokens == logits.argmax(axis=1)).all()
    for i in range(7):
        assert result.logprobs[i] == pytest.approx(log_softmax(logits[i])[result.tokens[i]], abs=2e-6)


def test_top_alternatives_are_exact(library: Library, pool: Pool) -> None:
    """The n best of the raw distribution, best first and ties by id, whatever is banned or filtered."""
    rng = np.random.default_rng(1)
    for vocab in (5, 100, 3000, 50000):
        logits = (rng.integers(-40, 40, vocab) / 4).astype(np.float32)
        banned = by_rank(logits)[:2].astype(np.int32)
        for num_top in {0, 1, 2, min(20, vocab), min(777, vocab)}:
            one = row(banned=banned, num_top=num_top, temperature=0.5, top_k=3, forced=int(banned[0]))
            result = library.sample(pool, logits[None], [one])
            best = by_rank(logits)[:num_top]
            assert (result.top_ids[0] == best).all()
            np.testing.assert_allclose(result.top_logprobs[0], log_softmax(logits)[best], atol=2e-6)
            assert result.tokens[0] == banned[0]
            assert result.logprobs[0] == pytest.approx(log_softmax(logits)[banned[0]], abs=2e-6)


def test_chosen_token_carries_its_own_logprob(library: Library, pool: Pool) -> None:
    """At temperature 1.5 the reported log-probability is the sampled token's raw one, inside the listed ones or not."""
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal(2000) * 2).astype(np.float32)
    exact = log_softmax(logits)
    rows = [row(seed=5, index=i, temperature=1.5, num_top=2) for i in range(200)]
    result = library.sample(pool, logits[None], rows)
    np.testing.assert_allclose(result.logprobs, exact[result.tokens], atol=3e-6)
    assert len(set(result.tokens.tolist())) > 50


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (3.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 0, 1.0, 0.1),
        (1.2, 8, 0.9, 0.05),
    ],
)
def test_frequencies_follow_the_filtered_distribution(
    library: Library, pool: Pool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square of 10,000 draws against the sorted float64 model; nothing outside the kept set is ever drawn."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(40) * 1.5).astype(np.float32)
    kept, probability = kept_set(logits, temperature, top_k, top_p, min_p)
    count = 10000
    tokens = draw(library, pool, logits, count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = np.bincount(tokens, minlength=40)
    assert seen[~kept].sum() == 0
    expected = probability * count
    common = expected >= 5
    chi2 = ((seen[common] - expected[common]) ** 2 / expected[common]).sum()
    degrees = max(int(common.sum()) - 1, 1)
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees) + 5


def support(
    library: Library, pool: Pool, logits: F32, banned: NDArray[np.int32] | None = None, **fields: Any
) -> set[int]:
    """The kept set, seen from outside: flat enough that 64 draws per member miss nobody."""
    return set(draw(library, pool, logits, 64 * len(logits), banned, **fields).tolist())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_kept_sets_equal_the_sorted_model(built_levels: tuple[str, ...], data: st.DataObject) -> None:
    """top-k, top-p and min-p keep exactly the sorted model's set, with ties and banned ids, at every level."""
    vocab = data.draw(st.integers(1, 30))
    logits = np.array(data.draw(st.lists(st.integers(0, 3), min_size=vocab, max_size=vocab)), np.float32) * np.float32(
        0.3
    )
    top_k = data.draw(st.integers(0, vocab + 1))
    banned = np.array(sorted(data.draw(st.sets(st.integers(0, vocab - 1), max_size=vocab - 1))), np.int32)
    allowed = np.setdiff1d(np.arange(vocab), banned)
    # Borders between two sums: top_p in the middle of a step of the cumulative sum, so that no rounding decides.
    weight = np.exp(logits[allowed].astype(np.float64) - logits[allowed].max())
    min_p = data.draw(st.sampled_from([0.0, 0.35, 0.5, 0.7, 0.9]))
    order = by_rank(logits[allowed])
    order = order[weight[order] >= min_p][: top_k or None]
    mass = np.cumsum(weight[order]) / weight[order].sum()
    at = data.draw(st.integers(0, len(mass) - 1))
    top_p = float((mass[at] + (mass[at - 1] if at else 0)) / 2)
    kept, _ = kept_set(logits[allowed], 1.0, top_k, top_p, min_p)
    expected = set(allowed[kept].tolist())
    for level in built_levels:
        library = load(level)
        with library.pool(1) as pool:
            assert support(library, pool, logits, banned, top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_sets_of_a_large_vocabulary_are_exact(library: Library, pool: Pool) -> None:
    """With 50,000 ids: top-k among equals takes the lowest ids; top-p stops at the token that reaches it."""
    vocab = 50000
    logits = np.full(vocab, -30, np.float32)
    best = np.array([49999, 7, 31000, 12, 400, 20000], np.int64)
    logits[best] = [5, 5, 5, 4, 4, 3]
    assert set(draw(library, pool, logits, 100, top_k=2).tolist()) == {7, 31000}
    assert set(draw(library, pool, logits, 100, top_k=4).tolist()) == {7, 31000, 49999, 12}
    weights = np.exp(np.array([0, 0, 0, -1, -1, -2.0]))
    share = weights.cumsum() / weights.sum()
    assert set(draw(library, pool, logits, 100, top_p=float(share[1] - 0.01)).tolist()) == {7, 31000}
    assert set(draw(library, pool, logits, 250, top_p=float(share[3] - 0.01)).tolist()) == {7, 31000, 49999, 12}
    assert set(draw(library, pool, logits, 250, min_p=0.3).tolist()) == {7, 31000, 49999, 12, 400}
    assert set(draw(library, pool, np.zeros(vocab, np.float32), 50, top_k=3).tolist()) == {0, 1, 2}
    flat = draw(library, pool, np.zeros(vocab, np.float32), 500, top_p=0.5)
    assert flat.max() < vocab // 2
    assert flat.max() > 0.48 * vocab


def test_v040_greedy_top_k_1_and_tiny_top_p_are_one(library: Library, pool: Pool) -> None:
    """temperature 0, top_k 1, a tiny top_p and temperature 1e-6 give the same token, ties included."""
    rng = np.random.default_rng(4)
    logits = rng.integers(0, 8, (50, 1500)).astype(np.float32)
    greedy = library.sample(pool, logits, [row(i, temperature=0.0) for i in range(50)]).tokens
    same: list[dict[str, Any]] = [{"top_k": 1, "temperature": 2.0}, {"top_p": 1e-6}, {"min_p": 1.0, "top_k": 1}]
    for fields in same:
        rows = [row(i, seed=i, **fields) for i in range(50)]
        assert (library.sample(pool, logits, rows).tokens == greedy).all()
    logits += rng.permutation(1500).astype(np.float32) * np.float32(1e-4)  # no ties
    greedy = library.sample(pool, logits, [row(i, temperature=0.0) for i in range(50)]).tokens
    assert (library.sample(pool, logits, [row(i, temperature=1e-6) for i in range(50)]).tokens == greedy).all()
    assert (library.sample(pool, logits, [row(i, temperature=1e-40) for i in range(50)]).tokens == greedy).all()


def test_v047_without_filters_nothing_is_forced(library: Library, pool: Pool) -> None:
    """temperature 1.5 and nothing else gives several distinct answers."""
    logits = (np.random.default_rng(5).standard_normal(100)).astype(np.float32)
    assert len(set(draw(library, pool, logits, 8, temperature=1.5).tolist())) > 2


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}])
def test_bad_logits_poison_nothing(library: Library, pool: Pool, fields: dict[str, Any]) -> None:
    """NaN and infinities: a token is chosen, the best one where there is one, and no reported number is a NaN."""
    inf, nan = np.inf, np.nan
    vocab = 70
    plain = np.full(vocab, -50.0, np.float32)
    plain[33] = 10
    cases = {
        33: [
            plain.copy(),
            plain.copy(),
            plain.copy(),
            np.full(vocab, -inf, np.float32),
            np.full(vocab, nan, np.float32),
        ],
        66: [plain.copy(), plain.copy()],
    }
    cases[33][0][5] = nan
    cases[33][1][:30] = -inf
    cases[33][2][33] = 3e38
    cases[33][3][33] = -3e38
    cases[33][4][33] = 0
    cases[66][0][66] = inf
    cases[66][1][66:] = 3.4e38
    cases[66][1][67:] = nan
    for best, rows in cases.items():
        for logits in rows:
            result = library.sample(pool, logits[None], [row(seed=9, num_top=5, **fields)])
            assert result.tokens[0] == best
            assert np.isfinite(result.logprobs).all()
            assert np.isfinite(result.top_logprobs).all()
            assert result.logprobs[0] == pytest.approx(0, abs=1e-5)
    for hopeless in (
        np.full(vocab, nan, np.float32),
        np.full(vocab, -inf, np.float32),
        np.full(vocab, inf, np.float32),
    ):
        result = library.sample(pool, hopeless[None], [row(**fields)])
        assert 0 <= result.tokens[0] < vocab
        assert result.logprobs[0] == pytest.approx(-math.log(vocab), abs=1e-5)


def bits(ids: Sequence[int], vocab: int) -> NDArray[np.uint32]:
    """A mask that allows these ids."""
    flags = np.zeros(-(-vocab // 32) * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def test_banned_ids_are_never_chosen_while_others_are_left(library: Library, pool: Pool) -> None:
    """A ban moves the choice to the best of the rest; where nothing is left the bans yield, the mask never does."""
    logits = np.array([1, 9, 3, 9, 2], np.float32)
    for banned, expected in (([1], 3), ([1, 3], 2), ([3, 1, 1, 2], 4), ([0, 1, 2, 3, 4], 1)):
        ids = np.array(banned, np.int32)
        assert library.sample(pool, logits[None], [row(temperature=0.0, banned=ids)]).tokens[0] == expected
        drawn = draw(library, pool, logits, 300, banned=ids, temperature=4.0)
        assert len(banned) == 5 or not set(drawn.tolist()) & set(banned)
    ids, allowed = np.array([2, 0, 1], np.int32), bits([2, 0], 5)
    one = row(temperature=0.0, banned=ids, mask=pointer(allowed))
    assert library.sample(pool, logits[None], [one]).tokens[0] == 2
    nothing = bits([], 5)
    with pytest.raises(NativeError, match="refused"):
        library.sample(pool, logits[None], [row(mask=pointer(nothing))])


def adjusted(logits: F32, allowed: Sequence[int] | None, banned: Sequence[int], extras: dict[str, Any]) -> F32:
    """The plain model of what happens to logits before a token is chosen, in float32, operation by operation."""
    x = logits.copy()
    closed = np.ones(len(x), np.bool_) if allowed is not None else np.zeros(len(x), np.bool_)
    closed[list(allowed or ())] = False
    both = closed.copy()
    both[list(banned)] = True
    for token, bias in zip(extras["biased"], extras["biases"], strict=True):
        x[token] += bias
    for token, count in zip(extras["seen"], extras["counts"], strict=True):
        x[token] = x[token] / extras["repetition"] if x[token] > 0 else x[token] * extras["repetition"]
        x[token] -= extras["frequency"] * np.float32(count)
        x[token] -= extras["presence"] * np.float32(count > 0)
    x[closed if both.all() else both] = -np.inf
    return x


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_masks_bans_biases_and_penalties_follow_the_plain_model(
    built_levels: tuple[str, ...], data: st.DataObject
) -> None:
    """Greedy choice and the order of all choices equal the float32 model's exactly, at every level; reported
    log-probabilities stay those of the raw logits."""
    vocab = data.draw(st.integers(1, 150))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (rng.standard_normal(vocab) * 4).astype(np.float32)
    ids = st.integers(0, vocab - 1)
    allowed = data.draw(st.none() | st.sets(ids, min_size=1))
    banned = data.draw(st.lists(ids, max_size=10) | st.just(list(range(vocab))))
    biased = np.array(data.draw(st.lists(ids, max_size=6)), np.int32)
    seen = np.array(data.draw(st.lists(ids, unique=True)), np.int32)
    extras: dict[str, Any] = {
        "biased": biased,
        "biases": rng.uniform(-100, 100, len(biased)).astype(np.float32),
        "seen": seen,
        "counts": rng.integers(0, 4, len(seen)).astype(np.int32),
    }
    for name, low, high in (("repetition", 0.1, 3.0), ("frequency", -2, 2), ("presence", -2, 2)):
        extras[name] = np.float32(data.draw(st.sampled_from([1.0 if name == "repetition" else 0.0, low, 0.7, high])))
    expected = adjusted(logits, None if allowed is None else sorted(allowed), banned, extras)
    left = by_rank(expected)[: np.isfinite(expected).sum()]
    mask = None if allowed is None else bits(sorted(allowed), vocab)
    forbidden = np.array(banned, np.int32)
    fields: dict[str, Any] = {name: pointer(v) if isinstance(v, np.ndarray) else v for name, v in extras.items()}
    fields |= {"num_biased": len(biased), "num_seen": len(seen), "mask": pointer(mask)}
    for level in built_levels:
        library = load(level)
        with library.pool(1) as pool:
            rows = [row(banned=forbidden, temperature=t, **fields) for t in (0.0, 1e-6)]
            rows += [row(banned=forbidden, top_k=3, index=i, **fields) for i in range(20)]
            result = library.sample(pool, logits[None], rows)
            assert result.tokens[0] == left[0]
            assert set(result.tokens.tolist()) <= set(left[:3].tolist())
            np.testing.assert_allclose(result.logprobs, log_softmax(logits)[result.tokens], atol=3e-6)
            shown = np.exp(expected[left].astype(np.float64) - expected[left[0]])
            many = [row(banned=forbidden, min_p=0.2, index=i, **fields) for i in range(20)]
            heavy = left[shown >= 0.2 * (1 - 1e-6)]
            assert set(library.sample(pool, logits[None], many).tokens.tolist()) <= set(heavy.tolist())


def assert_same(a: SampleResult, b: SampleResult) -> None:
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


def test_a_row_is_the_same_in_any_crowd(library: Library) -> None:
    """Threads, the order of rows and the company change no bit of a row's result."""
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((9, 5003)) * 3).astype(np.float32)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 50},
        {"top_p": 0.9, "temperature": 0.8},
        {"min_p": 0.02},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
    ]
    rows = [row(int(rng.integers(9)), seed=i, index=i, num_top=4, **fields[i % 6]) for i in range(60)]
    with library.pool(1) as one, library.pool(2) as two:
        crowd = library.sample(one, logits, rows)
        assert_same(crowd, library.sample(two, logits, rows))
        for i in range(60):
            alone = library.sample(two, logits[rows[i].logits_row : rows[i].logits_row + 1].copy(), [_moved(rows[i])])
            assert alone.tokens[0] == crowd.tokens[i]
            assert alone.logprobs.tobytes() == crowd.logprobs[i : i + 1].tobytes()
            assert alone.top_logprobs.tobytes() == crowd.top_logprobs[i : i + 1].tobytes()


def _moved(original: SampleRow) -> SampleRow:
    copy = SampleRow()
    ctypes.pointer(copy)[0] = original
    copy.logits_row = 0
    return copy


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"forced": 10},
        {"forced": -2},
        {"num_top": 11},
        {"banned": np.array([10], np.int32)},
        {"banned": np.array([-1], np.int32)},
        {"num_biased": 1},
        {"num_seen": -1},
        {"num_seen": 1, "seen": pointer(ZERO), "counts": pointer(ZERO), "repetition": 0.0},
        {"num_seen": 1, "seen": pointer(ZERO), "counts": pointer(ZERO), "repetition": 1.0, "frequency": math.inf},
    ],
)
def test_parameters_out_of_bounds_are_refused(library: Library, pool: Pool, fields: dict[str, Any]) -> None:
    """Every parameter has limits, and a value outside is an error instead of a crash."""
    with pytest.raises(NativeError, match="refused"):
        library.sample(pool, np.zeros((1, 10), np.float32), [row(**fields)])


def test_levels_make_the_same_choices() -> None:
    """Levels may differ in the last bits, so all but border cases agree: of 500 draws at most a few differ."""
    logits = (np.random.default_rng(8).standard_normal(3000) * 2).astype(np.float32)
    drawn = []
    for level in available_levels():
        library = load(level)
        with library.pool(1) as pool:
            drawn.append(draw(library, pool, logits, 500, top_p=0.95))
    for other in drawn[1:]:
        assert (other != drawn[0]).sum() <= 3
