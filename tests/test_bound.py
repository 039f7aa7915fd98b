"""Fractions of the machine's ceiling, against figures that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bound import ceiling, fraction, operations
from benchmarks.client import Played
from benchmarks.measure import median, summarise
from benchmarks.report import Found, report
from benchmarks.servers import Server
from benchmarks.workloads import Ask, Crowd
from hopon.model.config import ModelConfig
from hopon.model.rope import Rope

TINY = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=4,
    ffn_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
    norm_eps=1e-5,
    rope=Rope(theta=1e4, dim=2),
    context_length=64,
    tied=True,
)
"""A layer has 4 x 4 weights for each of q and o, 4 x 2 for each of k and v, 3 x 4 x 8 for the feed-forward: 144."""

EMPTY = summarise(Crowd(name="W1", asks=(Ask("", (), 1),), concurrency=1), "s", Played(records=(), seconds=1.0), None)
RUN = replace(EMPTY, num_requests=2, prompt_tokens=20, cached_tokens=6, output_tokens=8, seconds=2.0)
"""Computed are 14 tokens of prompts and 3 of each answer's 4: 20. Sampled are 8."""


def test_operations_are_two_per_weight_and_token() -> None:
    """288 weights of the layers for 20 tokens, but for the 12 that are not sampled from not the 112 behind the last
    attention; 40 of the head for 8; no lookup, no cached token, no last token."""
    assert operations(TINY, RUN) == 2 * (288 * 20 - 112 * 12 + 40 * 8) == 9_472
    assert operations(replace(TINY, tied=False), RUN) == 9_472


def test_a_fraction_is_work_per_second_over_the_peak() -> None:
    """9,472 operations in 2 s are 4,736 per second; 8 passes over 500 bytes in 2 s are 2,000 per second."""
    peaks = {"int8": 47_360.0, "read": 8_000.0}
    assert fraction(RUN, "int8", peaks, TINY, 500) == pytest.approx(0.1)
    assert fraction(RUN, "read", peaks, TINY, 500) == pytest.approx(0.25)
    assert fraction(RUN, "bf16", peaks, TINY, 500) is None


@pytest.mark.parametrize(
    ("workload", "dtype", "peak"),
    [
        ("W1", "i4 (head i8)", "int8"),
        ("W3", "i8", "int8"),
        ("W4", "bf16", "bf16"),
        ("W1", "f32", "f32"),
        ("W1", "i4+i8 (head bf16)", None),
        ("W2", "bf16", "read"),
        ("W5", "bf16", None),
    ],
)
def test_the_ceiling_is_that_of_the_workload_and_the_weights(workload: str, dtype: str, peak: str | None) -> None:
    """Arithmetic of the weights for crowds and prompts, memory for one user, none where two are mixed."""
    assert ceiling(workload, dtype) == peak


def test_only_our_own_servers_have_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the report beside the speed, as the median of the runs, and in the file; a peer gets a dash."""
    told = {"hopon_dtype": "i4 (head i8)", "hopon_weight_bytes": "500"}
    monkeypatch.setattr(Server, "settings", lambda server: told)
    found = Found(command="c", own=(), repeats=3, config=TINY, peaks={"f32": 1e4, "int8": 47_360.0, "read": 8_000.0})
    for label, seconds in (("own", 0.5), ("peer", None)):
        found.note_start(Server(label=label, url="u", model="m", pid=None, seconds_to_ready=seconds))
        for slower in (1.0, 2.0, 10.0):
            found.add(replace(RUN, server=label, seconds=slower))
    assert [run.fraction for run in found.runs[:3]] == pytest.approx([0.2, 0.1, 0.02])
    assert median(found.runs[:3]).fraction == pytest.approx(0.1)
    assert [run.fraction for run in found.runs[3:]] == [None] * 3
    rows = [line.split(" | ") for line in report(found).splitlines() if line.startswith("| W1")]
    assert [row[4] for row in rows] == ["10% of int8", "-"]
    content = found.content()
    assert content["ceilings"] == {"W1 own": "int8", "W1 peer": None}
    assert content["peaks"]["int8"] == 47_360.0
    assert content["runs"][1]["fraction"] == pytest.approx(0.1)
