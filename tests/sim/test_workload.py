"""Drawn workloads and trace readers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from hopon.workload.ask import Ask, Piece, Workload
from hopon.workload.draw import Sharing, draw
from hopon.workload.lengths import Exponential, Lognormal, Quantiles, Uniform, parse_lengths
from hopon.workload.trace import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "arrival_s,input_tokens,output_tokens\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_same_seed_same_workload() -> None:
    """Drawing again gives the same requests; another seed gives others."""

    def make(seed: int) -> Workload:
        return draw(count=50, rate=3.0, inputs=Uniform(1, 99), outputs=Exponential(9, 40), seed=seed)

    assert make(1) == make(1)
    assert make(1).asks != make(2).asks


@pytest.mark.parametrize(
    ("arrivals", "variation", "expected"), [("constant", 1, 0), ("poisson", 1, 1), ("gamma", 3, 3)]
)
def test_gaps_have_the_mean_and_the_variation_asked_for(arrivals: str, variation: float, expected: float) -> None:
    """Constant gaps do not vary, Poisson gaps vary by 1, gamma gaps as told; all have the mean of the rate."""
    work = draw(
        count=20_000,
        rate=4.0,
        inputs=Uniform(1, 1),
        outputs=Uniform(1, 1),
        arrivals=arrivals,  # type: ignore[arg-type]
        variation=variation,
    )
    gaps = [after.arrival - before.arrival for before, after in zip(work.asks, work.asks[1:], strict=False)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert stdev(gaps) / mean(gaps) == pytest.approx(expected, rel=0.1, abs=1e-9)


def test_longer_prompts_move_no_arrival() -> None:
    """Arrivals, prompts and outputs have streams of their own, so that one can be varied alone."""
    short = draw(count=20, rate=1.0, inputs=Uniform(1, 5), outputs=Uniform(1, 9))
    long = draw(count=20, rate=1.0, inputs=Lognormal(500, 1.0, 4000), outputs=Uniform(1, 9))
    assert [a.arrival for a in short] == [a.arrival for a in long]
    assert short.output_lengths == long.output_lengths


def test_lengths_stay_in_their_bounds() -> None:
    """Every distribution gives at least 1 and at most its cap, and about its mean."""
    random = Random(0)
    for lengths, low, high, middle in (
        (Uniform(3, 9), 3, 9, 6),
        (Exponential(100, 10_000), 1, 10_000, 100),
        (Lognormal(100, 1.0, 10_000), 1, 10_000, 100),
        (Quantiles((10, 20, 60)), 10, 60, 27.5),
    ):
        values = [lengths.draw(random) for _ in range(20_000)]
        assert low <= min(values)
        assert max(values) <= high
        assert mean(values) == pytest.approx(middle, rel=0.05)


def test_shared_beginnings_are_equal_tokens_and_nothing_else_is() -> None:
    """Requests of one group begin alike and differ behind that, with and without a vocabulary."""
    work = draw(
        count=40, rate=1.0, inputs=Uniform(5, 9), outputs=Uniform(1, 1), sharing=Sharing(groups=2, tokens=20), seed=3
    )
    for vocab_size in (None, 50_000):
        beginnings = {ask.prompt(vocab_size)[:20] for ask in work}
        assert len(beginnings) == 2
        assert len({ask.prompt(vocab_size)[20:25] for ask in work}) == 40
        assert all(len(ask.prompt(vocab_size)) == ask.input_tokens for ask in work)
    assert all(0 <= token < 100 for token in work.asks[0].prompt(100))


def test_the_true_length_is_not_in_the_request() -> None:
    """With a limit above it, two requests that differ in their true lengths are the same for the scheduler."""
    one = Ask(number=1, arrival=0.0, input_tokens=3, output_tokens=5, max_tokens=100)
    other = Ask(number=1, arrival=0.0, input_tokens=3, output_tokens=50, max_tokens=100)
    assert one.request() == other.request()


def test_scaling_says_what_it_did() -> None:
    """Twice the rate halves arrivals, half the length rounds and keeps at least a token, and both are noted."""
    asks = tuple(
        Ask(number=i, arrival=float(i), input_tokens=n, output_tokens=1, max_tokens=1, shared=(Piece(1, n - 1),))
        for i, n in enumerate((9, 5))
    )
    work = Workload(name="w", asks=asks).scaled(rate=2.0, length=0.5)
    assert [(a.arrival, a.input_tokens, a.output_tokens) for a in work] == [(0.0, 4, 1), (0.5, 2, 1)]
    assert [a.shared for a in work] == [(Piece(1, 4),), (Piece(1, 2),)]
    assert work.notes == ("arrivals 2 times as fast", "lengths scaled by 0.5")
    assert work.first(1).notes[-1] == "the first 1 of 2 requests"
    assert work.limited(7).asks[0].max_tokens == 7


def test_plain_csv(tmp_path: Path) -> None:
    """Columns are found by name, time begins at the first request."""
    text = "input_tokens,arrival_s,output_tokens,who\n7,10.5,3,x\n\n8,11.25,4,y\n"
    work = read_trace(write(tmp_path, text))
    assert [(a.arrival, a.input_tokens, a.output_tokens, a.max_tokens) for a in work] == [
        (0.0, 7, 3, 3),
        (0.75, 8, 4, 4),
    ]


def test_azure_csv_keeps_seven_digits(tmp_path: Path) -> None:
    """Times with 100 ns digits are read exactly, over midnight too."""
    text = AZURE + "2023-11-16 23:59:59.9999999,374,44\n2023-11-17 00:00:01.0000001,396,109\n"
    [_, second] = read_trace(write(tmp_path, text))
    assert second.arrival == 1.0000002
    assert (second.input_tokens, second.output_tokens) == (396, 109)


def mooncake(rows: list[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_mooncake_hashes_become_equal_tokens(tmp_path: Path) -> None:
    """Requests with the same leading hashes share exactly those blocks of 512 tokens."""
    rows: list[Mapping[str, object]] = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 7, "input_length": 1200, "output_length": 6, "hash_ids": [0, 1, 9]},
    ]
    path = tmp_path / "m.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(mooncake(rows))
    one, two = read_trace(path)
    assert one.prompt()[:1024] == two.prompt()[:1024]
    assert one.prompt()[1024] != two.prompt()[1024]
    assert (one.arrival, two.arrival) == (0.0, 0.007)


def test_mooncake_ticks_are_spread_in_order(tmp_path: Path) -> None:
    """Where all times are multiples of three seconds, requests are spread inside them, reproducibly, and it says so."""
    rows: list[Mapping[str, object]] = [
        {"timestamp": 3000 * (i // 4), "input_length": 10 + i, "output_length": 5, "hash_ids": [i]} for i in range(12)
    ]
    path = write(tmp_path, mooncake(rows), "m.jsonl")
    work = read_trace(path, seed=1)
    assert [ask.input_tokens for ask in work] == [10 + i for i in range(12)]
    assert len({ask.arrival for ask in work}) == 12
    first = work.asks[0].arrival
    assert first == 0.0
    assert work.asks[-1].arrival < 9
    assert work == read_trace(path, seed=1)
    assert work.asks != read_trace(path, seed=2).asks
    assert "multiples of 3 s" in work.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        (PLAIN, "no requests in it"),
        ("arrival_s,input_tokens\n1,2\n", "line 1: no column output_tokens"),
        (PLAIN + "-1,5,5\n", "line 2: time -1 is not at least 0"),
        (PLAIN + "nan,5,5\n", "line 2: time nan is not at least 0"),
        (PLAIN + "2,5,5\n1,5,5\n", "line 3: time 1 is before the 2 of line 2"),
        (PLAIN + "1,0,5\n", "line 2: input_tokens must be at least 1, got 0"),
        (PLAIN + "1,5,-3\n", "line 2: output_tokens must be at least 1, got -3"),
        (PLAIN + "1,5\n", "line 2: 2 cells in '1,5', but 3 columns"),
        (PLAIN + "1,5,many\n", "line 2: .*'many'"),
        (AZURE + "2023-11-16,x,3\n", "line 2: "),
        (AZURE + "yesterday,3,3\n", "line 2: .*yesterday"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: no field output_length"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 2.5}\n',
            "output_length must be a whole number, got 2.5",
        ),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1]}\n',
            "line 1: 1 hash_ids for 600 tokens",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp"\n', "line 2: "),
    ],
)
def test_bad_traces_name_file_line_and_value(tmp_path: Path, text: str, message: str) -> None:
    """Every kind of damage is an error that says where it is."""
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "0", "9-3", "exp:5", "exp:0:9", "lognormal:5:1:0", "gauss:3", "a-b"])
def test_bad_lengths_name_the_text_and_the_forms(text: str) -> None:
    """A length that cannot be read is quoted, with the forms that can."""
    with pytest.raises(ValueError, match="known forms"):
        parse_lengths(text)


def test_bad_workloads_name_the_value() -> None:
    """Counts, rates and scales out of range are errors with the number."""
    with pytest.raises(ValueError, match="got -1"):
        draw(count=1, rate=-1.0, inputs=Uniform(1, 1), outputs=Uniform(1, 1))
    with pytest.raises(ValueError, match="at least 1 request, got 0"):
        draw(count=0, rate=1.0, inputs=Uniform(1, 1), outputs=Uniform(1, 1))
    work = draw(count=1, rate=1.0, inputs=Uniform(1, 1), outputs=Uniform(1, 1))
    with pytest.raises(ValueError, match="rate scale must be above 0, got 0"):
        work.scaled(rate=0.0)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        work.limited(0)
