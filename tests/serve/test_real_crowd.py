"""A real model through HTTP in a pool that is too small for its crowd: nobody's answer depends on who else is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, at_once, running

STEM = "The town keeps a list of its inhabitants, with the trade of each of them and the year in which they came. "
NAMES = ("Ada", "Bruno", "Clara", "Dmitri", "Elif", "Farid", "Greta", "Hugo")
TRADES = ("baker", "glazier", "ferryman", "teacher", "clockmaker")


@pytest.fixture(scope="module")
def tight(smollm2: Path) -> Iterator[Server]:
    """Eight seats, and blocks for three of the requests below."""
    engine = {"dtype": "q4", "max_model_len": 128, "max_num_seqs": 8, "num_kv_blocks": 12, "max_num_batched_tokens": 40}
    with running(smollm2, factory="hopon.model.cpu:load", engine=engine) as server:
        yield server


def answer(server: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    """What is compared: tokens and log-probabilities."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True, **fields}
    [choice] = server.complete(prompt, **body)["choices"]
    return {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def facts(count: int) -> list[str]:
    """Prompts with one beginning and each an end of its own."""
    return [
        f"{STEM}{NAMES[i % len(NAMES)]} {i} is a {TRADES[i % len(TRADES)]} and came in {1800 + i}, so {NAMES[i % 8]}"
        for i in range(count)
    ]


def test_v034_nobody_reads_another_s_cache(tight: Server, effort: Callable[[int, int], int]) -> None:
    """Many prompts with one beginning, at once, preempting each other: each has the answer that it has without a
    cache and alone."""
    prompts = facts(effort(14, 200))
    alone = [answer(tight, prompt, cache_salt=f"alone-{i}", max_tokens=40) for i, prompt in enumerate(prompts)]
    before = tight.metrics()
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda prompt: answer(tight, prompt, max_tokens=40), prompts)) == alone
    after = tight.metrics()
    for name in ("vllm_prefix_cache_hits_total", "vllm_num_preemptions_total"):
        assert after[name] > before[name], f"{name}: the crowd was no trial"
    tight.check_alive()


def test_v035_cold_and_warm_are_one_answer(tight: Server) -> None:
    """Bit for bit, near ties or not: the same prompt, first without and then with its beginning in the cache."""
    body = {"prompt": STEM + "This time", "max_tokens": 1, "cache_salt": "warm"}
    cached = [tight.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"]]
    answers = [answer(tight, f"{STEM}This time", cache_salt=f"cold-{i}" if i < 2 else "warm") for i in range(4)]
    cached.append(tight.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 16]
    assert answers == [answers[0]] * 4


def test_v040_v041_greedy_is_one_answer_in_eight_seats(tight: Server) -> None:
    """Eight times the same prompt at once, by three names of greedy, while others come and go."""
    prompt = facts(1)[0]
    greedy: list[dict[str, Any]] = [{}, {"temperature": 2, "top_k": 1}, {"temperature": 1, "top_p": 1e-6}]
    alone = answer(tight, prompt, max_tokens=32)

    def one(number: int) -> dict[str, Any] | None:
        if number < 8:
            return answer(tight, prompt, max_tokens=32, **greedy[number % 3])
        answer(tight, f"Number {number}", max_tokens=number, temperature=1.5)
        return None

    assert at_once(24, one)[:8] == [alone] * 8
