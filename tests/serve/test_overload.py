"""A server under ten times the load it can carry, with the client of the benchmark; no time is asserted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.overload import fake_server, run


def test_overload_is_refused_and_forgotten(effort: Callable[[int, int], int]) -> None:
    """Everybody is served whole or told when to come back; nothing else happens, and afterwards all is as before."""
    with fake_server(seats=8, queue=8) as (host, port, pid):
        outcome = asyncio.run(run(host, port, pid, seats=8, seconds=effort(3, 60), factor=10, max_tokens=16))
    answers = outcome.overload.answers
    served, refused = outcome.overload.of(200), outcome.overload.of(429)
    assert len(served) + len(refused) == len(answers), {answer.status for answer in answers}
    assert len(refused) > len(served) > 16, "a queue full and some more are served, most are not"
    assert {answer.num_tokens for answer in served} == {16}
    assert all(answer.retry_after is not None and 1 <= answer.retry_after <= 60 for answer in refused)
    assert outcome.after.status == 200
    assert outcome.after.num_tokens == 16
    assert outcome.memory_after < outcome.memory_before + (64 << 20)
