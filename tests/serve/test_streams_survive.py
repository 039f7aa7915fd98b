"""64 open streams while the engine is killed: each ends as it would have, seen from the clients."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, at_once, events, running

STORIES = Path(__file__).parents[1] / "data" / "stories260k"

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"logprobs": 3},
    {"stop": ["the", " a "], "min_tokens": 20},
    {"stop": ["ing", "qq"], "include_stop_str_in_output": True, "logprobs": 0},
    {"echo": True, "logprobs": 1},
    {"stop_token_ids": list(range(400, 420))},
    {"top_k": 30, "top_p": 0.9, "return_token_ids": True},
    {"min_p": 0.01, "temperature": 0.7, "stop": ["zzz"] * 4},
    {"guided_regex": "([A-Za-z]{1,8} ){200}", "logprobs": 1},
    {"guided_grammar": 'start: word (" " word)*\nword: /[a-z]+/', "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 1},
    {"n": 2, "logprobs": 2},
]


@pytest.fixture(scope="module")
def stories() -> Iterator[Server]:
    """A real model with 64 seats and 8 ms per step."""
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "num_kv_blocks": 2200, "threads": 1}
    with running(STORIES, factory="tests.serve.faults:load_slow", engine=engine) as server:
        yield server


def bodies(length: int) -> list[dict[str, Any]]:
    draw = random.Random(length)
    return [
        {
            "prompt": [draw.randrange(3, 512) for _ in range(draw.randint(1, 40))],
            "max_tokens": draw.randint(length // 2, length),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"seed": draw.getrandbits(63)} if i % 2 else {}),
            **KINDS[i % len(KINDS)],
        }
        for i in range(64)
    ]


def fold(http: httpx.Client, body: dict[str, Any]) -> tuple[dict[Any, Any], str]:
    """All that a stream says of each of its answers, and the seed that the server used."""
    whole: dict[Any, Any] = {}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for event in events(response.iter_lines()):
            assert "error" not in event, event
            if event.get("usage"):
                usage = event["usage"]
                whole["usage"] = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
            for choice in event["choices"]:
                answer = whole.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": {}, "ends": []})
                answer["text"] += choice["text"]
                answer["ids"] += choice.get("token_ids") or []
                for name, values in (choice.get("logprobs") or {}).items():
                    answer["logprobs"].setdefault(name, []).extend(values)
                if choice["finish_reason"] is not None:
                    answer["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return whole, response.headers["x-hopon-seed"]


def kill_while(server: Server, over: threading.Event, times: int) -> int:
    """Kill engines, each some time after it has given a token; returns how many."""
    draw = random.Random(times)
    kills = 0

    def generated() -> float:
        return server.metrics()["vllm_generation_tokens_total"]

    while kills < times and not over.is_set():
        before = generated()
        while generated() == before and not over.is_set():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2))
        os.kill(server.engine_pid(), signal.SIGKILL)
        kills += 1
    return kills


def test_v065_64_streams_end_as_undisturbed_ones(stories: Server, effort: Callable[[int, int], int]) -> None:
    """Seeded or with the seed that the server drew, with stops, log-probabilities and echoes: text, tokens, counts,
    finish reasons are exactly those of a run in which nobody was killed."""
    times, length = effort(3, 20), effort(150, 440)

    def read(body: dict[str, Any]) -> tuple[dict[Any, Any], str]:
        with stories.client() as http:
            return fold(http, body)

    asked = bodies(length)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_while, stories, over, times)
        disturbed = at_once(64, lambda i: read(asked[i]))
        over.set()
        assert killing.result() == times, "the streams ended before the engine was killed often enough"
    assert stories.metrics()["hopon_engine_restarts_total"] == times
    again = [body | {"seed": int(seed)} for body, (_, seed) in zip(asked, disturbed, strict=True)]
    undisturbed = at_once(64, lambda i: read(again[i]))
    assert stories.metrics()["hopon_engine_restarts_total"] == times
    ends = set()
    for body, one, other in zip(again, disturbed, undisturbed, strict=True):
        assert one == other, body
        answers = [one[0][i] for i in range(body.get("n", 1))]
        assert all(len(answer["ends"]) == 1 for answer in answers)
        ends |= {reason for answer in answers for reason, _ in answer["ends"]}
    assert ends == {"length", "stop"}
    stories.check_alive()
