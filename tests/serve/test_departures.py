"""Clients that leave, in every phase and with every option: nothing of them stays."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, at_once, eventually, running

STORIES = Path(__file__).parents[1] / "data" / "stories260k"

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["no such text", "nor this"]},
    "echo": {"echo": True, "logprobs": 1},
    "scores": {"prompt_logprobs": 2, "stream": False},
    "whole": {"stream": False},
}

PHASES = ("queued", "prefill", "decoding", "last token")


@pytest.fixture(scope="module")
def stories() -> Iterator[Server]:
    """A real model with four seats, 16 tokens per step and 8 ms per step."""
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 200, "threads": 1}
    with running(STORIES, factory="tests.serve.faults:load_slow", engine=engine) as server:
        yield server


def wait_for_events(sock: socket.socket, count: int) -> None:
    """Read until so many events of a stream have come, or it has ended."""
    seen = b""
    while seen.count(b"data: ") < count:
        data = sock.recv(1 << 16)
        if not data:
            return
        seen += data


def depart(server: Server, phase: str, option: dict[str, Any], draw: random.Random) -> None:
    """Begin a request and leave in the given phase."""
    length = 300 if phase == "prefill" else draw.randint(1, 30)
    num_tokens = draw.randint(1, 12)
    body = {"prompt": [draw.randrange(3, 512) for _ in range(length)], "stream": True, "ignore_eos": True}
    body["max_tokens"] = num_tokens if phase == "last token" else 150
    body |= option
    with server.begin(body) as sock:
        match phase:
            case "queued":
                time.sleep(draw.uniform(0, 0.02))
            case "prefill":
                time.sleep(draw.uniform(0.01, 0.12))
            case _ if body["stream"]:
                wait_for_events(sock, num_tokens)
            case _:
                time.sleep(draw.uniform(0, 0.2))


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def check_nothing_left(server: Server) -> None:
    eventually(lambda: server.num_busy() == 0)
    eventually(lambda: server.metrics()["vllm_kv_cache_usage_perc"] == 0)  # the engine hears of it a moment later
    assert server.metrics()["hopon_oldest_unanswered_seconds"] == 0
    server.check_alive()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("option", OPTIONS)
def test_v023_leaving_in_any_phase_with_any_option(stories: Server, phase: str, option: str) -> None:
    """The server goes on, and blocks and requests are what they were."""
    depart(stories, phase, OPTIONS[option], random.Random(phase + option))
    check_nothing_left(stories)


def test_v022_a_thousand_departures_leave_nothing(stories: Server, effort: Callable[[int, int], int]) -> None:
    """Eight at a time on four seats, phases and options mixed: blocks, open requests and memory are where they were,
    and no departure is counted twice. (Who leaves before his request was looked at is not counted at all.)"""

    def round_of(count: int) -> None:
        def one_of_eight(worker: int) -> None:
            draw = random.Random(worker)
            for i in range(count // 8):
                phase = PHASES[(worker + i) % len(PHASES)]
                depart(stories, phase, OPTIONS[draw.choice(list(OPTIONS))], draw)

        at_once(8, one_of_eight)
        check_nothing_left(stories)

    def ended() -> float:
        metrics = stories.metrics()
        return sum(value for name, value in metrics.items() if name.startswith("vllm_request_success_total"))

    round_of(effort(24, 160))  # after that, caches and arenas are as large as they get
    pids = (stories.process.pid, stories.engine_pid())
    before = [resident(pid) for pid in pids]
    num_ended = ended()
    count = effort(64, 1000)
    round_of(count)
    assert count * 3 // 4 <= ended() - num_ended <= count + 1, "the last check has a request of its own"
    growth = [resident(pid) - old for pid, old in zip(pids, before, strict=True)]
    assert max(growth) < 6 << 20, f"bytes that the API process and the engine grew by: {growth}"


def test_departures_while_there_is_no_engine(stories: Server) -> None:
    """Clients leave between the death of an engine and the readiness of the next: no one of them is replayed."""
    draw = random.Random(8)
    for _ in range(2):
        os.kill(stories.engine_pid(), signal.SIGKILL)
        at_once(8, lambda i: depart(stories, "queued", {}, random.Random(i)))
        depart(stories, "decoding", {}, draw)
        check_nothing_left(stories)
