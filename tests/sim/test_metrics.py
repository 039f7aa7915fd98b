"""Folds over deltas: the definitions, by hand."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from hopon.core.types import Delta, FinishReason, Request, SamplingParams
from hopon.metrics import Limits, Recorder, RequestRecord, percentiles, summarise


def record(arrival: float, admitted: float, times: list[float], **changes: object) -> RequestRecord:
    made = {"request_id": "r", "arrival": arrival, "input_tokens": 3, "admitted": admitted, "token_times": times}
    made |= {"ended": times[-1], "finish": FinishReason.LENGTH}
    return RequestRecord(**(made | changes))  # type: ignore[arg-type]


def test_definitions_by_hand() -> None:
    """Sent at 1, seated at 3, tokens at 4, 6 and 7: waiting 2, prefill 1, TTFT 3, gaps 2 and 1, E2E 6, TPOT 1.5."""
    one = record(1.0, 3.0, [4.0, 6.0, 7.0])
    assert (one.waiting, one.prefill, one.ttft) == (2.0, 1.0, 3.0)
    assert one.gaps == [2.0, 1.0]
    assert (one.e2e, one.tpot) == (6.0, 1.5)


def test_ttft_is_exactly_waiting_plus_prefill() -> None:
    """Not only up to rounding: printed parts add up."""
    rng = random.Random(1)
    for _ in range(1000):
        a, b, c = sorted(rng.uniform(0, 1e4) for _ in range(3))
        one = record(a, b, [c])
        assert one.waiting is not None
        assert one.prefill is not None
        assert one.ttft == one.waiting + one.prefill


def test_what_does_not_exist_is_none() -> None:
    """A refused request has no times, a single token no gap and no TPOT, an empty run no percentile."""
    refused = RequestRecord(request_id="r", arrival=1.0, input_tokens=3, ended=1.0, finish=FinishReason.REFUSED)
    assert (refused.ttft, refused.waiting, refused.prefill, refused.e2e, refused.tpot) == (None,) * 5
    single = record(0.0, 1.0, [2.0])
    assert single.tpot is None
    assert single.gaps == []
    summary = summarise([refused])
    assert summary.ttft.p50 is None
    assert summary.itl.mean is None
    assert summary.output_tokens_per_second is None
    assert summarise([]).requests == 0


def test_tokens_that_arrive_together_have_no_gap() -> None:
    """A batch that is answered at its end has a TTFT and an E2E, but no gap."""
    assert record(0.0, 1.0, [9.0, 9.0, 9.0]).gaps == []


def test_percentiles_interpolate_as_numpy_does() -> None:
    """For random values, repeated ones too, every percentile equals numpy's default."""
    rng = random.Random(2)
    for size in (1, 2, 3, 10, 101):
        values = [rng.choice([rng.random(), 0.25, 0.5]) for _ in range(size)]
        wanted = (0.0, 1.0, 50.0, 90.0, 99.0, 100.0)
        assert percentiles(values, wanted) == pytest.approx(np.percentile(values, wanted))
    assert percentiles([], (50.0,)) == [None]
    with pytest.raises(ValueError, match="got 101"):
        percentiles([1.0], (101.0,))


def test_goodput_counts_who_meets_all_limits() -> None:
    """Of three requests in ten seconds one breaks the gap limit and one was aborted: 0.1 per second are good."""
    good = record(0.0, 1.0, [2.0, 3.0])
    slow = record(0.0, 1.0, [2.0, 10.0])
    gone = record(0.0, 1.0, [2.0], finish=FinishReason.ABORT)
    summary = summarise([good, slow, gone], Limits(ttft=2.0, itl=5.0))
    assert summary.goodput == pytest.approx(0.1)
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.finishes == {"abort": 1, "length": 2}
    with pytest.raises(ValueError, match="ttft must be above 0 seconds, got 0"):
        Limits(ttft=0.0)


def test_deltas_become_records() -> None:
    """Tokens of several deltas, the first admission and the cached tokens end up in one record."""
    recorder = Recorder()
    recorder.expect(Request(request_id="a", prompt=(1, 2), params=SamplingParams(), seed=0, arrival=0.5), 3)
    recorder.hear([Delta(request_id="a", time=2.0, tokens=(7,), admitted=1.0, cached_tokens=1)])
    [open_record] = recorder.records()
    assert open_record.finish is None
    last = Delta(request_id="a", time=4.0, tokens=(8, 9), admitted=1.0, cached_tokens=1, finish=FinishReason.STOP)
    recorder.hear([last])
    assert recorder.records() == [
        RequestRecord(
            request_id="a",
            arrival=0.5,
            input_tokens=2,
            admitted=1.0,
            token_times=array("d", [2.0, 4.0, 4.0]),
            cached_tokens=1,
            ended=4.0,
            finish=FinishReason.STOP,
            source=3,
        )
    ]
