"""Random and mutated requests against a real engine on a small random model: nothing breaks, nothing is left over."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok

from tests.model.files import tiny_config, write_folder
from tests.model.reference import random_checkpoint
from tests.serve.conftest import Server, eventually, running, write_model

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of two small layers with SmolLM's vocabulary, computed by the real executor; little memory."""
    changes = {"vocab_size": 49152, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config(**changes, tie_word_embeddings=True, eos_token_id=2)
    folder = write_folder(tmp_path_factory.mktemp("models") / "fake", config, random_checkpoint(config))
    write_model(folder)
    engine = {"max_num_seqs": 8, "num_kv_blocks": 40, "max_num_batched_tokens": 64, "threads": 1, "dtype": "f32"}
    options = {"max_queued_requests": 1000, "request_timeout": 60.0}
    with running(folder, factory="hopon.model.cpu:load", engine=engine, **options) as server:
        yield server
        status, stderr = server.stop()
        assert status == 0, stderr


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1e308,
    1e-320,
    0.5,
    "",
    "x",
    "\ud800",
    "\x00",
    "é" * 300,
    "<|im_end|>",
    [],
    [[]],
    [0],
    [49151],
    [49152],
    [None],
    ["a", 1],
    {},
    {"a": {}},
    {"5": 1},
    {"type": "text"},
]

USUAL: dict[str, Callable[[random.Random], Any]] = {
    "max_tokens": lambda rng: rng.randint(1, 12),
    "temperature": lambda rng: rng.choice([0, 1e-6, 0.7, 1, 100]),
    "top_p": lambda rng: rng.choice([1e-9, 0.5, 1]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 50, 10**9]),
    "min_p": lambda rng: rng.choice([0, 0.1, 1]),
    "n": lambda rng: rng.choice([1, 2, 5]),
    "seed": lambda rng: rng.getrandbits(64),
    "stop": lambda rng: rng.choice(["e", ["a", "the"], []]),
    "stop_token_ids": lambda rng: [rng.randrange(49152)],
    "min_tokens": lambda rng: rng.randint(0, 3),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "repetition_penalty": lambda rng: rng.choice([0.5, 1, 1.3, 1e-30]),
    "logit_bias": lambda rng: {str(rng.randrange(49152)): rng.uniform(-100, 100) for _ in range(3)},
    "allowed_token_ids": lambda rng: [rng.randrange(49152) for _ in range(rng.choice([1, 4]))],
    "bad_words": lambda rng: rng.choice([["the"], ["a b", "c"]]),
    "prompt_logprobs": lambda rng: rng.randint(0, 20),
    "return_token_ids": lambda rng: True,
    "return_tokens_as_token_ids": lambda rng: True,
    "skip_special_tokens": lambda rng: False,
    "include_stop_str_in_output": lambda rng: True,
    "truncate_prompt_tokens": lambda rng: rng.choice([-1, 1, 5]),
    "truncation_side": lambda rng: rng.choice(["left", "right"]),
    "priority": lambda rng: rng.randint(-3, 3),
    "cache_salt": lambda rng: rng.choice("ab"),
    "stream": lambda rng: rng.random() < 0.7,
    "response_format": lambda rng: rng.choice([{"type": "text"}, {"type": "json_object"}]),
    "structured_outputs": lambda rng: rng.choice([{"regex": "[ab]{1,4}"}, {"choice": ["yes", "no"]}, {"regex": "("}]),
}


def random_body(rng: random.Random, path: str) -> dict[str, Any]:
    """A request that mostly makes sense."""
    text = "".join(rng.choice(["word ", "🙂", "a", "\n", "<|im_end|>", "é"]) for _ in range(rng.choice([1, 5, 60])))
    match path:
        case "/detokenize":
            return {"tokens": [rng.randrange(49152) for _ in range(rng.randint(0, 20))]}
        case "/tokenize":
            return rng.choice([{"prompt": text}, {"messages": [{"role": "user", "content": text}]}])
    fields = {name: USUAL[name](rng) for name in rng.sample(sorted(USUAL), rng.randint(0, 7))}
    if path == "/v1/completions":
        ids = [rng.randrange(49152) for _ in range(rng.choice([1, 20, 40]))]
        fields["prompt"] = rng.choice([text, ids, [text, "b"], [ids, [5]]])
        fields |= {"logprobs": rng.randint(0, 20)} if rng.random() < 0.3 else {}
        fields |= {"echo": True} if rng.random() < 0.2 else {}
    else:
        roles = ["user", "assistant", "system"]
        fields["messages"] = [{"role": rng.choice(roles), "content": text} for _ in range(rng.randint(1, 2))]
        fields |= {"logprobs": True, "top_logprobs": 3} if rng.random() < 0.3 else {}
    return {"max_tokens": 5} | fields


def mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    """The same with something wrong in it: a value, a field, or the bytes of the JSON."""
    kind = rng.random()
    if kind < 0.5:
        body = body | {rng.choice([*body, *USUAL, "model", "tools", "stream_options"]): rng.choice(ODD)}
    elif kind < 0.6:
        body = body | {rng.choice(["colour", "", "a" * 300]): rng.choice(ODD)}
    elif kind < 0.7:
        body.pop(rng.choice(sorted(body)))
    raw = json.dumps(body).encode()
    if kind > 0.85:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice([b"", b"\xff", b"{", b'"', b"NaN", b"1e999"]) + raw[at + rng.choice([0, 1, 9]) :]
    return raw


def check_whole(server: Server) -> None:
    """The engine lives, and holds nothing."""
    server.check_alive()
    eventually(lambda: server.metrics()["vllm_kv_cache_usage_perc"] == 0)
    assert server.http.get("/load").json() == {"server_load": 0}


def test_random_and_mutated_requests(tiny_server: Server, effort: Callable[[int, int], int]) -> None:
    """Eight clients send anything and sometimes leave early: no 5xx, no hang, whole answers are JSON, streams end."""
    count = effort(320, 20_000)
    engine = tiny_server.engine_pid()

    def one(number: int) -> int:
        rng = random.Random(number)
        path = rng.choice(PATHS[:2]) if rng.random() < 0.8 else rng.choice(PATHS)
        body = random_body(rng, path)
        raw = mutated(rng, body) if rng.random() < 0.6 else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with clients[number % 8].stream("POST", path, content=raw, headers=headers) as response:
            if rng.random() < 0.1:
                return response.status_code
            content = response.read()
            if response.headers["content-type"].startswith("text/event-stream"):
                assert content.endswith(b"data: [DONE]\n\n"), (number, content[-200:])
                assert b'"error":' not in content, (number, content[-300:])
            else:
                json.loads(content)
            assert response.status_code < 500, (number, raw[:500], content[:300])
            return response.status_code

    clients = [tiny_server.client() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = Counter(pool.map(one, range(count)))
    for client in clients:
        client.close()
    assert set(statuses) <= {200, 400, 404}, statuses
    assert statuses[200] > count // 4, statuses
    assert statuses[400] > count // 10, statuses
    check_whole(tiny_server)
    assert tiny_server.engine_pid() == engine, "the engine died on the way"


def test_the_document_is_kept_to(tiny_server: Server, effort: Callable[[int, int], int]) -> None:
    """schemathesis over the OpenAPI document: what it makes of every operation brings no 5xx."""
    schema = schemathesis.openapi.from_dict(tiny_server.http.get("/openapi.json").json())
    examples = effort(8, 500)
    tried = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result.err()
        operation = result.ok()

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def send(case: schemathesis.Case[Any]) -> None:
            nonlocal tried
            tried += 1
            response = case.call(base_url=tiny_server.url)
            assert response.status_code < 500, response.text

        send()
    assert tried > 10 * examples // 2
    check_whole(tiny_server)


def test_v049_v050_v064_forced_tokens(tiny_server: Server) -> None:
    """A biased end token ends nothing under ignore_eos, waits for min_tokens otherwise, and shows when it shall."""
    forced: dict[str, Any] = {"prompt": [5, 6], "logit_bias": {"2": 100}, "max_tokens": 9, "temperature": 0}
    assert tiny_server.complete(**forced)["usage"]["completion_tokens"] == 1
    held = tiny_server.complete(**forced, min_tokens=4)
    assert (held["usage"]["completion_tokens"], held["choices"][0]["finish_reason"]) == (5, "stop")
    ignored = tiny_server.complete(**forced, ignore_eos=True, skip_special_tokens=False)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["choices"][0]["text"] == "<|im_end|>" * 9
    assert tiny_server.complete(**forced, ignore_eos=True)["choices"][0]["text"] == ""


def test_v044_penalties_and_neighbours(tiny_server: Server) -> None:
    """Only allowed tokens, never one of a strong negative bias; the same beside others without penalties."""
    allowed = list(range(300, 340))
    body: dict[str, Any] = {"prompt": [300, 301], "allowed_token_ids": allowed, "max_tokens": 12, "temperature": 0}
    body |= {"return_token_ids": True, "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    alone = tiny_server.complete(**body)["choices"][0]["token_ids"]
    assert set(alone) <= set(allowed)
    with ThreadPoolExecutor(6) as pool:
        crowd = list(pool.map(lambda i: tiny_server.complete(**(body if i % 2 else {"prompt": [i, 7]})), range(6)))
    assert all(answer["choices"][0]["token_ids"] == alone for answer in crowd[1::2])
    biased = tiny_server.complete(**body, logit_bias={str(alone[0]): -100})["choices"][0]["token_ids"]
    assert biased[0] != alone[0]


def test_v053_choices_of_the_real_sampler(tiny_server: Server) -> None:
    """n choices under a seed differ, repeat, and are those of smaller n."""
    body: dict[str, Any] = {"prompt": list(range(100, 140)), "seed": 9, "max_tokens": 8, "temperature": 50}
    four = [choice["text"] for choice in tiny_server.complete(**body, n=4)["choices"]]
    assert len(set(four)) == 4
    assert [choice["text"] for choice in tiny_server.complete(**body, n=2)["choices"]] == four[:2]
    assert tiny_server.complete(**body)["choices"][0]["text"] == four[0]
