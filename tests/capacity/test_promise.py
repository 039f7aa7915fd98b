"""Promises as they are written and as they are counted."""

from __future__ import annotations

import pytest

from hopon.capacity.promise import parse_promise
from hopon.core.types import FinishReason
from hopon.metrics import RequestRecord


def record(kind: str, times: list[float], finish: FinishReason | None = FinishReason.LENGTH) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        arrival=0.0,
        input_tokens=4,
        admitted=0.0,
        token_times=times,
        ended=9.0,
        finish=finish,
        kind=kind,
    )


def test_each_class_has_its_own_limits() -> None:
    """A slow first token breaks the promise to chats and not that to the background; classes count as in the mix."""
    promise = parse_promise("chat: ttft<500ms tpot<60ms; background: e2e<3s", 0.9)
    slow = [1.0, 1.02]
    records = [record("chat", [0.1, 0.15]), record("chat", slow), record("background", slow), record("other", [9.0])]
    [share] = promise.shares(records)
    assert (share.met, share.total, share.level) == (3, 4, 0.9)
    assert promise.patience == 3.0


def test_percentiles_are_pooled_and_named() -> None:
    """Shares of gaps, and of first tokens; a request without an end breaks both."""
    promise = parse_promise("itl_p99<50ms ttft_p50<1s")
    assert promise.slo is None
    gaps, first = promise.shares([record("", [0.5, 0.53, 0.63]), record("", [2.0]), record("", [0.1], None)])
    assert (gaps.name, gaps.met, gaps.total, gaps.level) == ("itl_p99<50ms", 1, 3, 0.99)
    assert (first.name, first.met, first.total, first.level) == ("ttft_p50<1000ms", 1, 3, 0.5)


def test_both_forms_together() -> None:
    """Limits of a request and percentiles are parts of one promise."""
    promise = parse_promise("ttft<1s itl_p95<80ms; slow: e2e<9s")
    assert [share.name for share in promise.shares([record("", [0.2])])] == [
        "all limits of a request, 95 %",
        "itl_p95<80ms",
    ]


@pytest.mark.parametrize(
    ("text", "attain", "words"),
    [
        ("", 0.95, "nothing is promised"),
        ("ttft<1s", 1.0, r"must be in \(0, 1\), got 1"),
        ("ttft<1h", 0.95, "ttft<1h"),
        ("itl_p100<1s", 0.95, r"percentile must be in \(0, 100\)"),
        ("ttft<1s ttft<2s", 0.95, "limited twice"),
    ],
)
def test_bad_promises_are_named(text: str, attain: float, words: str) -> None:
    """The part that cannot be read, and the limit."""
    with pytest.raises(ValueError, match=words):
        parse_promise(text, attain)
