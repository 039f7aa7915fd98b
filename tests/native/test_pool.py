"""The worker pool as Python sees it: threads come and go, idle ones sleep, and calls release the interpreter."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from hopon.native import Library, NativeError, SampleRow
from tests.native.world import pack


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def settles_at(expected: int) -> bool:
    """A joined thread may stay visible in /proc for a moment."""
    for _ in range(200):
        if threads_of_process() == expected:
            return True
        time.sleep(0.01)
    return False


def test_a_pool_of_one_has_no_threads(library: Library) -> None:
    """n workers are the caller and n - 1 threads, gone after close."""
    before = threads_of_process()
    with library.pool(1):
        assert threads_of_process() == before
    with library.pool(4) as pool:
        assert threads_of_process() == before + 3
        assert pool.threads == 4
    assert settles_at(before)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_impossible_numbers_of_threads_are_refused(library: Library, threads: int) -> None:
    """The error names the number and the limit."""
    with pytest.raises(NativeError, match=rf"{threads} threads.*1024"):
        library.pool(threads)


def test_a_closed_pool_is_an_error_and_closing_twice_is_not(library: Library) -> None:
    """No call reaches a pool that is gone."""
    pool = library.pool(2)
    pool.close()
    pool.close()
    packed = pack(np.ones((3, 4)))
    with pytest.raises(NativeError, match="closed"):
        library.linear(pool, packed.matrix, np.ones((1, 4), np.float32))


def test_an_idle_pool_uses_no_cpu(library: Library) -> None:
    """After a call the workers go to sleep: half a second of waiting costs at most a fraction of it."""
    logits, rows = np.zeros((8, 1000), np.float32), [SampleRow(forced=-1, top_p=1, logits_row=i) for i in range(8)]
    with library.pool(4) as pool:
        library.sample(pool, logits, rows)
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.1


def test_workers_wake_after_sleep_every_time(library: Library) -> None:
    """Calls after pauses of every length around the spinning time find all their tasks done."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, 300)).astype(np.float32)
    rows = [SampleRow(forced=-1, top_p=1, logits_row=i) for i in range(16)]
    with library.pool(3) as pool:
        for i in range(300):
            assert (library.sample(pool, logits, rows).tokens == logits.argmax(axis=1)).all()
            time.sleep(i % 30 * 2e-6)


def test_pools_work_side_by_side_while_python_runs(library: Library) -> None:
    """Two pools called from two Python threads do not disturb each other."""
    rng = np.random.default_rng(1)
    packed = pack(rng.standard_normal((200, 64)))
    x = rng.standard_normal((20, 64)).astype(np.float32)
    with library.pool(1) as one:
        expected = library.linear(one, packed.matrix, x)
    failures: list[str] = []

    def work() -> None:
        with library.pool(2) as pool:
            for _ in range(100):
                if not np.array_equal(library.linear(pool, packed.matrix, x), expected):
                    failures.append("differs")

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
