"""Real models in float32 against stored outputs of an independent implementation, and V087."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.drive import deployed, request, run

DATA = Path(__file__).parents[1] / "data"


def check(model: Path, golden: str) -> None:
    """Every greedy id equal, every log-probability within 1e-3; end-of-sequence tokens do not end a request."""
    cases: list[dict[str, Any]] = json.loads((DATA / "golden" / golden).read_text())["cases"]
    requests = [request(c["name"], c["prompt_ids"], max_tokens=len(c["greedy_ids"]), logprobs=2) for c in cases]
    with deployed(model, dtype="f32", max_num_seqs=8, max_model_len=512) as deployment:
        outputs = run(deployment, requests)
    assert len(cases) == 5
    for case in cases:
        output = outputs[case["name"]]
        assert output.tokens == case["greedy_ids"], case["name"]
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(case["logprobs"], abs=1e-3), case["name"]
        margins = [entry.top[0][1] - entry.top[1][1] for entry in output.logprobs]
        assert margins == pytest.approx(case["top2_logit_margin"], abs=1e-3), case["name"]


def test_stories260k() -> None:
    """A llama of safetensors weights with a tied head, grouped heads of 8 values and odd sizes."""
    check(DATA / "stories260k", "stories260k.json")


def test_v087_smollm2(smollm2: Path) -> None:
    """SmolLM2 from its GGUF: tied head, Q4_1 and Q8_0 weights, permuted q and k."""
    check(smollm2, "smollm2-135m-instruct-q4_1.json")


def test_qwen_coder(qwen_coder: Path) -> None:
    """Qwen2.5-Coder from its GGUF: biases, an untied head, Q5_0, Q8_0, Q4_K and Q6_K weights."""
    check(qwen_coder, "qwen2.5-coder-0.5b-instruct-q4_k_m.json")
