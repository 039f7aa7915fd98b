"""Penalties, biases, allowed tokens and bad words, against a plain model of their definitions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Chunk, OpenRow
from hopon.core.scheduler import Scheduler
from hopon.core.types import Logprob, SamplingParams
from hopon.model.batch import Rows
from hopon.model.guide import Guides
from hopon.model.sampler import Sampler
from hopon.model.vocabulary import Vocabulary
from tests.model.drive import deployed, request, run

F32 = NDArray[np.float32]
VOCAB, STOP = 70, 3


def logits_at(row: int, index: int) -> F32:
    """What a model says there: random, with a slope, so that penalties matter."""
    return (np.random.default_rng((row, index)).standard_normal(VOCAB) * 2 + np.linspace(4, 0, VOCAB)).astype(
        np.float32
    )


def adjusted(logits: F32, prompt: list[int], output: list[int], params: SamplingParams) -> F32:
    """The definitions, one after the other, in float32."""
    x = logits.copy()
    closed = set(range(VOCAB)) - set(params.allowed_token_ids) if params.allowed_token_ids else set()
    banned = {STOP} if len(output) < params.min_tokens else set()
    banned |= {word[-1] for word in params.bad_words if [*output, word[-1]][-len(word) :] == list(word)}
    for token, bias in params.logit_bias:
        x[token] += np.float32(bias)
    counts = Counter(output)
    penalty = np.float32(params.repetition_penalty)
    for token in {*prompt, *output}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in counts.items():
        x[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        x[token] -= np.float32(params.presence_penalty)
    x[sorted(closed if len(closed | banned) == VOCAB else closed | banned)] = -np.inf
    return x


def agrees(token: int, x: F32, params: SamplingParams, uniform: float) -> bool:
    """Whether a token is the model's choice: the first of the best, or the one whose share the number falls into."""
    if params.temperature == 0:
        return token == int(x.argmax())
    weight = np.exp((x.astype(np.float64) - float(x.max())) / params.temperature)
    share = np.cumsum(weight) / weight.sum()
    return bool(share[token] - weight[token] / weight.sum() - 1e-5 <= uniform <= share[token] + 1e-5)


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.4 else neutral

    def tokens(count: int) -> list[int]:
        return rng.sample(range(VOCAB), count)

    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 1.0, 2.0]),
        max_tokens=64,
        min_tokens=maybe(rng.randrange(20), 0),
        repetition_penalty=maybe(rng.choice([0.5, 1.1, 2.0]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(tuple((token, rng.uniform(-10, 10)) for token in tokens(4)), ()),
        allowed_token_ids=maybe(tuple(tokens(rng.choice([1, 2, 10]))), ()),
        bad_words=maybe(tuple(tuple(tokens(rng.choice([1, 1, 2, 3]))) for _ in range(20)), ()),
        logprobs=maybe(2, None),
    )


def _no_vocabulary() -> Vocabulary:
    raise OSError("these logits mean nothing")


class Device:
    """A sampler on logits that are made up: the executor without its model."""

    def __init__(self, library: native.Library, num_rows: int = 8) -> None:
        self.rows = Rows(max_num_seqs=num_rows, max_model_len=256, block_size=16)
        self.logits = np.zeros((num_rows, VOCAB), np.float32)
        self.sampler = Sampler(
            self.rows,
            max_num_seqs=num_rows,
            max_num_logits=num_rows,
            logits=self.logits,
            guides=Guides(_no_vocabulary, VOCAB),
        )
        self.library, self.pool = library, library.pool(1)
        self.names: dict[int, int] = {}  # which made-up logits a row gets

    def open(self, row: int, name: int, prompt: list[int], output: list[int], params: SamplingParams) -> None:
        opened = OpenRow(
            row=row,
            prompt=tuple(prompt),
            output=tuple(output),
            params=params,
            seed=name,
            choice=0,
            stop_token_ids=(STOP, VOCAB + 7),
        )
        self.names[row] = name
        self.rows.open(opened)
        self.sampler.open(opened)

    def close(self, row: int) -> None:
        self.rows.close(row)
        self.sampler.close(row)

    def step(self, indexes: dict[int, int]) -> dict[int, tuple[int, tuple[Logprob, ...]]]:
        """One token for each row, given its output index."""
        chunks = [
            Chunk(row=row, start=self.rows.length(row) - 1, count=1, num_logits=1, sample=True) for row in indexes
        ]
        for place, (row, index) in enumerate(indexes.items()):
            self.logits[place] = logits_at(self.names[row], index)
        self.sampler.prepare(chunks)
        self.library.choose(self.pool, self.sampler.part(0, len(chunks)))
        results = self.sampler.results(chunks)
        return {result.row: (result.tokens[0], result.logprobs) for result in results}


@pytest.fixture(scope="module")
def library() -> native.Library:
    return native.load(native.choose_level()[0])


@pytest.fixture
def device(library: native.Library) -> Iterator[Device]:
    made = Device(library)
    yield made
    made.pool.close()


def test_v017_v044_every_token_follows_the_definitions(device: Device, effort: Callable[[int, int], int]) -> None:
    """Rows with random parameters come, go and are closed and opened again with their output, in any company: each
    token is the plain model's choice, and reported log-probabilities are raw."""
    rng = random.Random(1)
    state: dict[int, tuple[int, list[int], list[int], SamplingParams]] = {}
    changed = reopened = 0
    for _ in range(effort(300, 5000)):
        for row in range(8):
            if row not in state and rng.random() < 0.5:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
                state[row] = rng.getrandbits(32), prompt, [], random_params(rng)
                device.open(row, state[row][0], prompt, [], state[row][3])
            elif row in state and rng.random() < 0.1:
                device.close(row)
                if len(state[row][2]) > 40 or rng.random() < 0.2:
                    del state[row]
                else:
                    device.open(row, *state[row])
                    reopened += 1
        if not state:
            continue
        for row, (token, logprobs) in device.step({row: len(state[row][2]) for row in state}).items():
            name, prompt, output, params = state[row]
            raw = logits_at(name, len(output))
            x = adjusted(raw, prompt, output, params)
            assert agrees(token, x, params, device.library.uniform(name, 0, len(output))), (params, output)
            changed += token != int(raw.argmax())
            assert (logprobs != ()) == (params.logprobs is not None)
            for entry in logprobs:
                exact = raw[token] - raw.max() - np.log(np.exp(raw.astype(np.float64) - raw.max()).sum())
                assert entry.logprob == pytest.approx(exact, abs=1e-5)
            output.append(token)
    assert changed > 500
    assert reopened > 50


def test_mask_of_a_row_changes_between_steps(device: Device) -> None:
    """A mask holds until the next one, the row that takes the place later has none, and mates feel nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    device.open(0, 5, [1], [], params)
    device.open(1, 6, [1], [], params)
    even = np.zeros(3, np.uint32)
    even[:] = 0x55555555
    even[2] &= (1 << VOCAB - 64) - 1
    device.sampler.mask(0, even)
    for index in range(4):
        found = device.step({0: index, 1: index})
        assert found[0][0] == int(np.argmax(logits_at(5, index)[::2])) * 2
        assert found[1][0] == int(np.argmax(logits_at(6, index)))
    device.sampler.mask(0, None)
    assert device.step({0: 4})[0][0] == int(np.argmax(logits_at(5, 4)))
    device.sampler.mask(0, even)
    device.close(0)
    device.open(0, 9, [1], [], params)
    assert device.step({0: 0})[0][0] == int(np.argmax(logits_at(9, 0)))


def test_extreme_but_valid_parameters_sample_something(device: Device) -> None:
    """Numbers that float64 can hold and float32 cannot do no harm."""
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"top_k": 2**31 - 1},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    ]
    for row, fields in enumerate(extremes):
        device.open(row, row, [1, 2, 3], [4, 4], SamplingParams(max_tokens=64, **fields))
        assert 0 <= device.step({row: 2})[row][0] < VOCAB


BAD: list[tuple[str, Any]] = [
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("presence_penalty", float("nan")),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {-1: 1.0}),
    ("allowed_token_ids", [-1]),
    ("bad_words", [[]]),
    ("bad_words", [[-4]]),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_v045_values_out_of_range_are_named(name: str, value: Any) -> None:
    """The error names the field and the limit."""
    with pytest.raises(ValueError, match=f"^{name} must be "):
        SamplingParams(**{name: value})


def test_v017_preemption_changes_no_penalty(tiny: Path) -> None:
    """On a real model in a pool that is too small, penalised requests give what they give alone, and an engine that
    is given half of an output goes on with the other half."""
    rng = random.Random(3)
    asked = []
    for i in range(6):
        fields: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
        fields |= {"bad_words": ((9,), (10, 11)), "logit_bias": ((5, 3.0), (6, -3.0))} if i % 2 else {}
        prompt = [rng.randrange(4, 130) for _ in range(20)]
        temperature = i % 3 / 2
        asked.append(request(str(i), prompt, seed=i, max_tokens=60, temperature=temperature, logprobs=1, **fields))
    with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=40, max_model_len=128) as model:
        alone = {one.request_id: run(model, [one])[one.request_id] for one in asked}
        rest = run(model, [replace(one, output=tuple(alone[one.request_id].tokens[:30])) for one in asked])
    with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=12, max_model_len=128, max_num_seqs=6) as model:
        scheduler = Scheduler(model.config)
        crowd = run(model, asked, scheduler)
    assert scheduler.counters.num_preemptions > 1
    assert crowd == alone
    for name, output in rest.items():
        assert output.tokens == alone[name].tokens
        assert output.logprobs == alone[name].logprobs[30:]
