"""Several answers to one prompt, on both endpoints, as streams and whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Server, eventually, script
from tests.serve.test_api import HI, leave

LONG = [200 + i for i in range(70)]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def streamed(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, list[int], str | None]]:
    """Text, tokens and finish reason by index."""
    found: dict[int, tuple[str, list[int], str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, tokens, finish = found.get(choice["index"], ("", [], None))
            assert finish is None, "a choice has news after its end"
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = text + new, tokens + choice.get("token_ids", []), choice["finish_reason"]
    return found


def test_v053_choices_differ_and_repeat(server: Server) -> None:
    """n answers under a seed: all different and complete, indexes in order, the same set again; the first is the one
    of a single request, and more choices change none of those before."""
    four = server.complete(LONG, n=4, seed=7, temperature=1, max_tokens=9)
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in four["choices"]] == ["length"] * 4
    assert len(set(texts(four))) == 4
    assert texts(server.complete(LONG, n=4, seed=7, temperature=1, max_tokens=9)) == texts(four)
    assert texts(server.complete(LONG, n=2, seed=7, temperature=1, max_tokens=9)) == texts(four)[:2]
    assert texts(server.complete(LONG, seed=7, temperature=1, max_tokens=9)) == texts(four)[:1]
    assert texts(server.complete(LONG, n=2, best_of=2, seed=7, temperature=1, max_tokens=9)) == texts(four)[:2]


def test_usage_counts_a_prompt_once(server: Server) -> None:
    """Tokens of the prompt once, tokens of all answers; the same in a stream; the engine computed the prompt once."""
    prompt = [900 + i for i in range(64)]
    before = server.metrics()
    answer = server.complete(prompt, n=5, seed=1, max_tokens=3)
    after = server.metrics()
    usage = {"prompt_tokens": 64, "completion_tokens": 15, "total_tokens": 79}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    grown = after["hopon_scheduled_tokens_total"] - before["hopon_scheduled_tokens_total"]
    assert grown == 64 + 4 * 16 + 5 * 2
    chunks = server.stream(prompt=prompt, n=5, seed=1, max_tokens=3, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 48}}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_and_whole_answers_agree(server: Server, path: str) -> None:
    """Per choice: text, tokens and finish reason; a chat's choices each begin with a role."""
    asked: dict[str, Any] = {"prompt": LONG} if path == "completions" else {"messages": HI}
    body = {**asked, "n": 3, "seed": 5, "max_tokens": 6, "return_token_ids": True}
    whole = server.post(path, **body).json()
    chunks = server.stream(path, **body)
    found = streamed(chunks)
    assert sorted(found) == [0, 1, 2]
    for choice in whole["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert found[choice["index"]] == (text, choice["token_ids"], choice["finish_reason"])
    if path != "completions":
        roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
        assert sorted(roles) == [0, 1, 2]


def test_choices_of_several_prompts(server: Server) -> None:
    """Two prompts with three choices each: six answers, a prompt's side by side, each as for the prompt alone."""
    many = server.complete([[7, 8, 9], LONG], n=3, seed=3, max_tokens=5, return_token_ids=True)
    alone = [server.complete(prompt, n=3, seed=3, max_tokens=5) for prompt in ([7, 8, 9], LONG)]
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    assert texts(many) == texts(alone[0]) + texts(alone[1])
    assert [len(choice["prompt_token_ids"]) for choice in many["choices"]] == [3] * 3 + [70] * 3
    assert many["usage"]["prompt_tokens"] == 73


def test_without_a_seed_the_header_repeats_all_choices(server: Server) -> None:
    """One seed per prompt; the same request with it gives the same choices."""
    response = server.post("completions", prompt="Tell", n=3, max_tokens=5)
    seed = int(response.headers["x-hopon-seed"])
    assert texts(server.complete("Tell", n=3, max_tokens=5, seed=seed)) == texts(response.json())


def test_scores_of_a_prompt_are_shown_with_every_choice(server: Server) -> None:
    """echo with logprobs, and prompt_logprobs: computed once, the same for all choices, in streams too; scoring alone
    works with several choices."""
    echoed = server.complete(LONG, n=3, echo=True, logprobs=1, max_tokens=2, seed=1)
    for choice in echoed["choices"]:
        shown = choice["logprobs"]
        assert len(shown["tokens"]) == 72
        assert shown["token_logprobs"][:70] == echoed["choices"][0]["logprobs"]["token_logprobs"][:70]
        assert shown["token_logprobs"][1] is not None
        assert shown["text_offset"][70] == len(choice["text"]) - len(choice["text"][shown["text_offset"][70] :])
    chunks = server.stream(prompt=LONG, n=3, echo=True, logprobs=1, max_tokens=2, seed=1)
    scores: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            scores[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert [scores[i] for i in range(3)] == [choice["logprobs"]["token_logprobs"] for choice in echoed["choices"]]
    scored = server.complete(LONG, n=2, prompt_logprobs=0, max_tokens=2)
    first, second = (choice["prompt_logprobs"] for choice in scored["choices"])
    assert first == second
    assert len(first) == 70
    nothing = server.complete(LONG, n=2, echo=True, logprobs=0, max_tokens=0)
    assert [len(choice["logprobs"]["tokens"]) for choice in nothing["choices"]] == [70, 70]
    assert nothing["usage"]["completion_tokens"] == 0


def test_a_choice_that_ends_early_ends_alone(server: Server) -> None:
    """A stop string that one choice meets stops that one only."""
    free = server.complete(LONG, n=3, seed=11, max_tokens=12)
    stop = texts(free)[1][10:16]
    assert stop not in texts(free)[0] + texts(free)[2]
    cut = server.complete(LONG, n=3, seed=11, max_tokens=12, stop=stop)
    assert [choice["finish_reason"] for choice in cut["choices"]] == ["length", "stop", "length"]
    assert texts(cut)[1] == texts(free)[1][: texts(free)[1].index(stop)]
    assert texts(cut)[::2] == texts(free)[::2]
    scripted = server.complete(script(100, 101), n=2, max_tokens=9)
    assert [choice["finish_reason"] for choice in scripted["choices"]] == ["stop", "stop"]


def test_v023_leaving_ends_the_whole_group(server: Server, slow_server: Server) -> None:
    """A client that leaves, while its choices wait or run, leaves nothing behind, and each choice counts as aborted."""
    for one, prompt in ((server, [12, 90]), (slow_server, [12, *range(100, 160)])):
        key = 'vllm_request_success_total{finished_reason="abort"}'
        before = one.metrics()[key]
        leave(one, {"prompt": prompt, "n": 4, "max_tokens": 400, "ignore_eos": True}, after=2)
        eventually(lambda one=one: one.num_busy() == 0)  # type: ignore[misc]
        eventually(lambda one=one: one.metrics()["vllm_kv_cache_usage_perc"] == 0)  # type: ignore[misc]
        assert one.metrics()[key] == before + 4


def test_v077_limits_of_choices(server: Server) -> None:
    """n has a limit of its own and one together with the prompts."""
    assert "128" in server.refused(prompt="x", n=129)["message"]
    assert server.refused(prompt=["x"] * 3, n=100)["param"] == "n"
    assert server.refused(prompt="x", n=2, best_of=1)["param"] == "best_of"
    assert len(server.complete("x", n=128, max_tokens=1)["choices"]) == 128
    server.check_alive()
