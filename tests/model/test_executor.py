"""The CPU executor against float64 models of its own weights, and its book-keeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hopon.core.plan import Chunk, Move, OpenRow, StepPlan
from hopon.core.types import SamplingParams
from hopon.model import cpu
from hopon.model.source import open_source
from tests.model.drive import deployed, request, run
from tests.model.files import tiny_config, write_folder, write_gguf
from tests.model.reference import forward, log_softmax, random_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "gqa3": {},
    "tied": {"tie_word_embeddings": True},
    "mha, head 8, odd ffn": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 77,
    },
    "one kv head, head 64": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64},
    "biases everywhere": {"attention_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}


def prompt_of(length: int, vocab: int = 64, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_equals_the_float64_model(tmp_path: Path, shape: str) -> None:
    """Scores of a prompt and of greedy tokens agree with a float64 model to 1e-4, for every family and shape."""
    config = tiny_config(**SHAPES[shape])
    weights = random_checkpoint(config)
    prompt = prompt_of(70)
    with deployed(write_folder(tmp_path, config, weights), dtype="f32", threads=2, max_num_seqs=4) as model:
        got = run(model, [request("a", prompt, max_tokens=8, logprobs=3, prompt_logprobs=2)])["a"]
    whole = prompt + got.tokens
    rope = open_source(tmp_path).config.rope  # its frequencies have tests of their own
    logits = forward(weights, config, whole[:-1], rope.inverse_frequencies(len(whole)), rope.magnitude)
    expected = log_softmax(logits)
    scores = [entry.logprob for entry in got.prompt_logprobs + got.logprobs]
    assert scores == pytest.approx([expected[i, token] for i, token in enumerate(whole[1:])], abs=1e-4)
    assert got.tokens == expected[len(prompt) - 1 :].argmax(-1).tolist()
    for i, entry in enumerate(got.prompt_logprobs + got.logprobs):
        best = np.argsort(-expected[i], kind="stable")[: len(entry.top)]
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[i, best], abs=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_v092_gguf_equals_safetensors(tmp_path: Path, arch: str) -> None:
    """A checkpoint scores the same from either format: llama's permuted q and k are rotated as adjacent pairs."""
    config = tiny_config(architectures=[f"{arch.capitalize()}ForCausalLM"])
    weights = random_checkpoint(config)
    prompt = prompt_of(60)
    scores = []
    for path in (
        write_folder(tmp_path / "hf", config, weights),
        write_gguf(tmp_path / "m.gguf", config, weights, arch=arch),
    ):
        with deployed(path, dtype="f32", threads=1, max_num_seqs=1) as model:
            got = run(model, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]
        scores.append([entry.logprob for entry in got.prompt_logprobs])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    unpermuted = write_gguf(tmp_path / "wrong.gguf", config, weights, arch=arch, permuted=False)
    with deployed(unpermuted, dtype="f32", threads=1, max_num_seqs=1) as model:
        got = run(model, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]
    far = np.abs(np.array([entry.logprob for entry in got.prompt_logprobs]) - scores[0]).max()
    assert (far > 0.01) == (arch == "llama")


def test_v094_rope_freqs_change_the_scores_as_the_model_says(tmp_path: Path) -> None:
    """A file's own frequency divisors are applied: scores equal the float64 model with divided frequencies."""
    config = tiny_config()
    weights = random_checkpoint(config)
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, weights, extra={"rope_freqs.weight": divisors})
    prompt = prompt_of(50)
    with deployed(path, dtype="f32", threads=1, max_num_seqs=1) as model:
        got = run(model, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]
    inverse = config["rope_theta"] ** -(np.arange(0, 16, 2) / 16) / divisors
    expected = log_softmax(forward(weights, config, prompt, inverse))
    scores = [entry.logprob for entry in got.prompt_logprobs]
    assert scores == pytest.approx([expected[i, token] for i, token in enumerate(prompt[1:])], abs=1e-4)


def test_v095_odd_vocabulary(tmp_path: Path) -> None:
    """A vocabulary that is no multiple of 64 never yields a padding token."""
    config = tiny_config(vocab_size=67)
    weights = random_checkpoint(config)
    weights["lm_head.weight"] *= np.float32(0.01)  # nearly flat: padding rows of zeros would win often
    requests = [request(str(i), prompt_of(5, 67, i), seed=i, temperature=1.0, max_tokens=30) for i in range(8)]
    with deployed(write_folder(tmp_path, config, weights), dtype="f32", threads=1) as model:
        outputs = run(model, requests)
    tokens = {token for output in outputs.values() for token in output.tokens}
    assert max(tokens) < 67
    assert len(tokens) > 40


def test_v099_scoring_in_slices(tiny: Path) -> None:
    """More positions than logit rows are scored slice by slice, with the bits of one at a time; memory is bounded."""
    prompt = prompt_of(200)
    results = []
    for budget in (256, 7):
        options: dict[str, Any] = {"dtype": "f32", "threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": budget}
        with deployed(tiny, **options) as model:
            assert int(model.summary["buffer_bytes"]) < 4 * (budget * 2000 + cpu.MAX_LOGIT_ROWS * 400)
            got = run(model, [request("a", prompt, max_tokens=2, prompt_logprobs=4, logprobs=4)])["a"]
        assert len(got.prompt_logprobs) == 199 > cpu.MAX_LOGIT_ROWS
        results.append(got)
    assert results[0] == results[1]


def open_row(row: int, prompt: list[int], output: list[int] | None = None, **params: Any) -> OpenRow:
    return OpenRow(
        row=row,
        prompt=tuple(prompt),
        output=tuple(output or ()),
        params=SamplingParams(**({"temperature": 0.0, "logprobs": 2} | params)),
        seed=9,
        choice=0,
        stop_token_ids=(2,),
    )


def whole(row: int, count: int, blocks: tuple[int, ...]) -> Chunk:
    return Chunk(row=row, start=0, count=count, num_logits=1, sample=True, new_blocks=blocks)


def test_recompute_replays_prompt_and_output(tiny: Path) -> None:
    """A row opened with prompt and output goes on as the row it was, random numbers included."""
    prompt = prompt_of(20)
    hot: dict[str, Any] = {"temperature": 1.0}
    with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=8, max_model_len=128) as model:
        executor = model.executor
        plan = StepPlan(step=0, opened=(open_row(0, prompt, **hot),), chunks=(whole(0, 20, (0, 1)),))
        outputs = [executor.submit(plan).result().rows[0]]
        for i in range(5):
            chunk = Chunk(row=0, start=20 + i, count=1, num_logits=1, sample=True)
            outputs.append(executor.submit(StepPlan(step=1 + i, chunks=(chunk,))).result().rows[0])
        tokens = [row.tokens[0] for row in outputs]
        reopened = open_row(1, prompt, tokens[:5], **hot)
        plan = StepPlan(step=9, closed=(0,), opened=(reopened,), chunks=(whole(1, 25, (5, 3)),))
        again = executor.submit(plan).result().rows[0]
    assert (again.tokens, again.logprobs) == (outputs[5].tokens, outputs[5].logprobs)


@pytest.mark.parametrize("moves", [(Move("copy", 0, 6),), (Move("to_host", 0, 1), Move("from_host", 1, 6))])
def test_moved_block_serves_another_row(tiny: Path, moves: tuple[Move, ...]) -> None:
    """A block copied, or taken to the host tier and back, holds the same keys and values: numbers behind it agree."""
    prompt = prompt_of(17)
    first = StepPlan(step=0, opened=(open_row(0, prompt),), chunks=(whole(0, 17, (0, 1)),))
    options: dict[str, Any] = {"num_kv_blocks": 8, "max_model_len": 128, "num_host_blocks": 2}
    with deployed(tiny, dtype="bf16", threads=1, **options) as model:
        expected = model.executor.submit(first).result().rows[0]
        rest = Chunk(row=1, start=16, count=1, num_logits=1, sample=True, new_blocks=(6, 7))
        plan = StepPlan(step=1, opened=(open_row(1, prompt),), moves=moves, chunks=(rest,))
        moved = model.executor.submit(plan).result().rows[0]
        with pytest.raises(AssertionError, match="no block 2 to move to"):
            model.executor.submit(StepPlan(step=2, moves=(Move("to_host", 0, 2),)))
    assert (moved.tokens, moved.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("padding", [1, 100, 1000])
def test_padding_changes_nothing(tiny: Path, padding: int) -> None:
    """Padding rows are computed beside a request, or in passes of their own, and its numbers stay the same."""
    prompt = prompt_of(40)
    results = []
    for count in (0, padding):
        with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=8, max_model_len=128) as model:
            first = StepPlan(step=0, opened=(open_row(0, prompt),), chunks=(whole(0, 40, (0, 1, 2)),), padding=count)
            chunk = Chunk(row=0, start=40, count=1, num_logits=1, sample=True)
            plans = (first, StepPlan(step=1, padding=count), StepPlan(step=2, chunks=(chunk,), padding=count))
            results.append([model.executor.submit(plan).result() for plan in plans])
    assert results[0] == results[1]


def test_min_tokens_bans_every_stop_id(tiny: Path) -> None:
    """V050: until min_tokens outputs are there no stop token is chosen, although one is the most likely each time."""
    prompt = prompt_of(12)
    with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=16) as model:
        free = run(model, [request("a", prompt, max_tokens=6)])["a"].tokens
        stops = sorted(set(free))
        held = run(model, [request("a", prompt, max_tokens=6, min_tokens=4, stop=stops)])["a"].tokens
    assert not set(held[:4]) & set(stops)
    assert len(held) >= 5 or held[-1] in stops


def test_logprobs_are_raw(tiny: Path) -> None:
    """Temperature and filters do not change reported log-probabilities; the chosen one is at most the best."""
    with deployed(tiny, dtype="f32", threads=1, num_kv_blocks=16) as model:
        cold = run(model, [request("a", prompt_of(9), max_tokens=1, logprobs=20)])["a"].logprobs[0]
        hot = run(model, [request("a", prompt_of(9), max_tokens=1, logprobs=20, temperature=3.0, top_k=5, seed=3)])["a"]
    assert hot.logprobs[0].top == cold.top
    assert hot.logprobs[0].logprob <= cold.top[0][1]
    assert hot.logprobs[0].token in [token for token, _ in cold.top[:5]]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "fp8"}, "dtype must be one of auto, f32"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of auto, f32"),
        ({"level": "sse"}, "unknown kernel level 'sse'"),
        ({"max_model_len": 10**6}, "max_model_len must be in"),
        ({"max_num_seqs": 300}, "max_num_batched_tokens 208 must be at least"),
    ],
)
def test_bad_options_are_named(tiny: Path, option: dict[str, Any], message: str) -> None:
    """An option that cannot be served ends the start with its value and the limit."""
    with pytest.raises((ValueError, RuntimeError), match=message), deployed(tiny, **option):
        pass


def test_v100_fails_before_weights_are_read(tiny: Path, tmp_path: Path) -> None:
    """A length that does not fit is refused before anything is packed or cached, with the length that works."""
    options: dict[str, Any] = {"kv_cache_memory": 50_000, "dtype": "f32", "threads": 1, "cache_dir": str(tmp_path)}
    with (
        pytest.raises(ValueError, match=r"kv_cache_memory 50000 bytes holds 96 tokens.*at most 96"),
        deployed(tiny, max_model_len=200, **options),
    ):
        pass
    assert not list(tmp_path.iterdir())
    with deployed(tiny, max_model_len=96, **options) as model:
        assert model.config.max_model_len == 96


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(step=0, closed=(0,)), "row 0 is closed while it is not open"),
        (StepPlan(step=0, chunks=(whole(0, 5, (0,)),)), "row 0 computes while it is not open"),
        (StepPlan(step=0, opened=(open_row(0, [1] * 20),), chunks=(whole(0, 20, (0,)),)), "has 1 blocks: too few"),
        (StepPlan(step=0, opened=(open_row(0, [1] * 3),), chunks=(whole(0, 4, (0,)),)), "no token at position 3"),
        (StepPlan(step=0, opened=(open_row(0, [1]), open_row(0, [1]))), "row 0 is opened while it is open"),
    ],
)
def test_broken_plans_are_caught(tiny: Path, plan: StepPlan, message: str) -> None:
    """A plan that contradicts what came before stops with a sentence instead of reading foreign memory."""
    with (
        deployed(tiny, dtype="f32", threads=1, num_kv_blocks=8, max_model_len=128) as model,
        pytest.raises(AssertionError, match=message),
    ):
        model.executor.submit(plan)
