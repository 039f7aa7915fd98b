"""Events are read from bytes, wherever these are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hopon.bench.sse import EventReader

STREAM = 'data: {"a": "é"}\r\n\r\n: comment\n\ndata: one\ndata: two\n\nevent: x\ndata:three\r\r'.encode()


@given(cuts=st.sets(st.integers(1, len(STREAM) - 1)))
def test_v066_events_are_read_however_the_network_cuts_them(cuts: set[int]) -> None:
    """Cutting the bytes anywhere, also within a character or a line end, gives the same events."""
    reader = EventReader()
    borders = [0, *sorted(cuts), len(STREAM)]
    reads = [STREAM[start:end] for start, end in pairwise(borders)]
    # A final CR may be half of a CRLF, so a reader learns of the last event with the next byte.
    events = [event.decode() for read in [*reads, b"\n"] for event in reader.feed(read)]
    assert events == ['{"a": "é"}', "one\ntwo", "three"]
