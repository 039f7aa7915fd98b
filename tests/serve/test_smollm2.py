"""A real model through HTTP: the reference outputs, in both modes, all cases at once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import DATA, Server, at_once, events, running

GOLDEN = json.loads((DATA.parents[1] / "data" / "golden" / "smollm2-135m-instruct-q4_1.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Server]:
    engine = {"dtype": "f32", "max_model_len": 512, "max_num_seqs": 8, "num_kv_blocks": 256}
    with running(smollm2, factory="hopon.model.cpu:load", engine=engine) as server:
        yield server


def test_goldens_over_http(real: Server) -> None:
    """All reference cases at the same time, whole and streamed, give the reference's ids, log-probabilities, texts."""

    def check(number: int) -> None:
        case, stream = CASES[number // 2], bool(number % 2)
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
        if case["messages"]:
            path, body = "chat/completions", body | {"messages": case["messages"], "logprobs": True}
        else:
            path, body = "completions", body | {"prompt": case["prompt"], "logprobs": 0}
        answers = real.stream(path, **body) if stream else [real.post(path, **body).json()]
        parts = [choice for answer in answers for choice in answer["choices"]]
        text = ""
        logprobs: list[float] = []
        for part in parts:
            message = part.get("message") or part.get("delta") or {}
            text += part.get("text") or message.get("content") or ""
            shown = part["logprobs"] or {}
            logprobs += shown.get("token_logprobs") or [entry["logprob"] for entry in shown.get("content", [])]
        assert [i for part in parts for i in part.get("token_ids", [])] == case["greedy_ids"], case["name"]
        assert logprobs == pytest.approx(case["logprobs"], abs=1e-3), case["name"]
        if case["first_eos_index"] is None:
            assert text == case["greedy_text"]

    at_once(2 * len(CASES), check)


def test_v052_the_end_token_ends_the_text(real: Server) -> None:
    """Without ignore_eos the case that reaches the end token stops there, the same in both modes; it is not shown."""
    [case] = [case for case in CASES if case["first_eos_index"] is not None]
    body = {"prompt": case["prompt"], "temperature": 0, "max_tokens": 32, "return_token_ids": True}
    [whole] = real.complete(**body)["choices"]
    assert whole["token_ids"] == case["greedy_ids"][: case["first_eos_index"] + 1]
    assert whole["finish_reason"] == "stop"
    assert "<|im_end|>" not in whole["text"]
    chunks = real.stream(**body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_v061_scores_are_those_of_the_outputs(real: Server) -> None:
    """Scoring prompt plus output gives the log-probabilities that generating had."""
    case = CASES[0]
    prompt = case["prompt_ids"] + case["greedy_ids"]
    [choice] = real.complete(prompt, echo=True, max_tokens=0, logprobs=1)["choices"]
    scored = choice["logprobs"]["token_logprobs"][len(case["prompt_ids"]) :]
    assert scored == pytest.approx(case["logprobs"], abs=1e-3)


def test_the_real_engine_dies_and_the_goldens_stay(real: Server) -> None:
    """All reference cases while the engine is killed in the middle of them give the reference's ids."""
    chance = threading.Lock()  # whoever gets it kills

    def check(number: int) -> None:
        case = CASES[number]
        body = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True, "stream": True}
        if case["messages"]:
            path, body = "chat/completions", body | {"messages": case["messages"]}
        else:
            path, body = "completions", body | {"prompt": case["prompt"]}
        ids: list[int] = []
        with real.client() as http, http.stream("POST", f"/v1/{path}", json=body) as response:
            for event in events(response.iter_lines()):
                assert "error" not in event, event
                ids += [i for choice in event["choices"] for i in choice.get("token_ids") or []]
                if len(ids) > 5 and chance.acquire(blocking=False):
                    os.kill(real.engine_pid(), signal.SIGKILL)
        assert ids == case["greedy_ids"], case["name"]

    at_once(len(CASES), check)
    assert real.metrics()["hopon_engine_restarts_total"] == 1
