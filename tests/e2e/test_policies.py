"""On the real engine a policy changes when a request is served, never what it gets.

Every system of the table, with the settings that it publishes, in pools so tight that those that preempt do, against
each request alone: tokens and log-probabilities bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from hopon import native
from hopon.core.clock import VirtualClock
from hopon.core.config import EngineOptions
from hopon.core.engine import CloseInput, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import Executor, StepHandle, StepPlan
from hopon.core.policy.presets import PRESETS, engine_options, policy_of
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Logprob, Request, SamplingParams
from hopon.model.cpu import CpuExecutor, load
from hopon.testing import ScriptedInbox
from tests.core.systems.drive import KNOBS
from tests.model.files import tiny_config, write_folder
from tests.model.reference import random_checkpoint
from tests.native.counting import watch_batches

STORIES = Path(__file__).parent.parent / "data" / "stories260k"
LENGTH = 160

PREEMPTING = (
    "hopon vllm-v0 vllm sarathi splitfuse trt-max-utilization sglang lmdeploy turbomind openvino nano"
).split()
"""Presets that take memory back in the crowds below; the others reserve, or estimate well enough."""

POOL = {"llama-cpp": 12 * LENGTH}
"""Tokens of the KV cache, where every slot needs room for the longest request: who finds none fails there."""

SMALL_PASS = {"orca": 110, "tgi": 110}
"""Tokens of a small pass, where a prompt has to fit into one."""


@dataclass(frozen=True)
class Model:
    """A model that is quick to load, and requests for it."""

    path: Path
    folder: Path
    vocab: int
    dtype: str

    @lru_cache  # noqa: B019 (two models, for the length of the tests)
    def requests(self, seed: int) -> list[Request]:
        """Prompts with and without common beginnings, greedy and sampled, that run to ``max_tokens`` mostly."""
        rng = random.Random(f"{seed} {self.vocab}")
        stem = [rng.randrange(3, self.vocab) for _ in range(40)]
        asked = []
        for number in range(14):
            own = [rng.randrange(3, self.vocab) for _ in range(rng.choice([1, 7, 18, 33, 60]))]
            asked.append(
                Request(
                    request_id=str(number),
                    prompt=(*stem[: rng.choice([0, 0, 20, 40])], *own),
                    seed=rng.getrandbits(64),
                    arrival=rng.choice([0.0, 0.0, 3.0, 20.0]),
                    stop_token_ids=(2,),
                    params=SamplingParams(
                        temperature=rng.choice([0.0, 0.9]),
                        top_k=rng.choice([0, 30]),
                        max_tokens=rng.choice([1, 12, 40, 55]),
                        logprobs=2,
                        prompt_logprobs=rng.choice([None, None, None, 1]),
                    ),
                )
            )
        return sorted(asked, key=lambda request: request.arrival)

    @lru_cache  # noqa: B019
    def surprise(self) -> list[Request]:
        """Short answers first, then long ones: whoever learns from the past expects too little."""
        rng = random.Random(7)
        return [
            Request(
                request_id=str(number),
                prompt=tuple(rng.randrange(3, self.vocab) for _ in range(10)),
                seed=number,
                arrival=0.0 if number < 10 else 500.0,
                params=SamplingParams(temperature=0.9, max_tokens=2 if number < 10 else 120, logprobs=1),
            )
            for number in range(18)
        ]

    def asked(self, seed: int | None) -> list[Request]:
        """A random crowd, or the surprise for None."""
        return self.surprise() if seed is None else self.requests(seed)

    @lru_cache  # noqa: B019
    def alone(self, seed: int | None) -> dict[str, Answer]:
        """What each of them gets by itself."""
        options = EngineOptions(
            model=str(self.path),
            cache_dir=str(self.folder),
            dtype=self.dtype,
            threads=1,
            max_model_len=LENGTH,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
        apart = [replace(r, arrival=1000.0 * i) for i, r in enumerate(self.asked(seed))]
        answers, stats, _ = serve(options, apart)
        assert stats.num_preemptions == 0
        return answers


Answer = tuple[tuple[int, ...], tuple[Logprob, ...], tuple[Logprob, ...], FinishReason]


class SecondPerStep:
    """Passes plans on; each takes a second of virtual time. Counts what it saw."""

    def __init__(self, inner: Executor, clock: VirtualClock) -> None:
        self._inner = inner
        self._clock = clock
        self.num_moves = 0
        self.num_resumed = 0  # rows opened with output that start behind something they have

    def submit(self, plan: StepPlan) -> StepHandle:
        self._clock.advance_to(self._clock.now() + 1.0)
        self.num_moves += len(plan.moves)
        starts = {chunk.row: chunk.start for chunk in plan.chunks}
        self.num_resumed += sum(bool(opened.output) and starts[opened.row] > 0 for opened in plan.opened)
        return self._inner.submit(plan)

    def close(self) -> None:
        self._inner.close()


def serve(options: EngineOptions, requests: list[Request]) -> tuple[dict[str, Answer], EngineStats, SecondPerStep]:
    """Run the engine under the options' policy; the input is closed behind the last request."""
    deployment = load(options, lambda what, share: None)
    clock = VirtualClock()
    executor = SecondPerStep(deployment.executor, clock)
    engine = Engine(Scheduler(deployment.config, policy_of(options, deployment.config)), executor, clock=clock)
    heard: dict[str, list[Delta]] = {}

    def emit(news: object, stats: EngineStats) -> None:
        assert isinstance(news, list)
        for delta in news:
            heard.setdefault(delta.request_id, []).append(delta)

    last = max(request.arrival for request in requests)
    events: list[tuple[float, Command]] = [(request.arrival, request) for request in requests]
    engine.run(ScriptedInbox(clock, [*events, (last, CloseInput()), (1e9, Shutdown())]), emit)
    deployment.executor.close()
    assert engine.scheduler.pool.num_free == deployment.config.num_blocks, "blocks were lost"
    assert engine.scheduler.host_pool.num_free == deployment.config.num_host_blocks, "host blocks were lost"
    answers: dict[str, Answer] = {}
    for name, deltas in heard.items():
        reason = deltas[-1].finish
        assert reason is not None, f"{name} did not end"
        assert reason in (FinishReason.STOP, FinishReason.LENGTH), f"{name}: {reason} {deltas[-1].message}"
        answers[name] = (
            tuple(token for d in deltas for token in d.tokens),
            tuple(logprob for d in deltas for logprob in d.logprobs),
            tuple(logprob for d in deltas for logprob in d.prompt_logprobs),
            reason,
        )
    return answers, engine.stats(), executor


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """A random model of GQA groups of 3 with 8-bit weights, and stories260k in f32."""
    folder = tmp_path_factory.mktemp("policies")
    config = tiny_config()
    tiny = write_folder(folder / "model", config, random_checkpoint(config, seed=5))
    return [
        Model(tiny, folder / "cache", config["vocab_size"], "q8"),
        Model(STORIES, folder / "cache", 512, "f32"),
    ]


def crowd(
    model: Model,
    policy: str,
    seed: int | None,
    *,
    pool: int = LENGTH + 16,
    knobs: Mapping[str, str] | None = None,
    **given: Any,
) -> tuple[EngineStats, SecondPerStep]:
    """All requests together under a policy in a pool of so many tokens: everybody gets what it gets alone."""
    options = engine_options(
        {
            "model": str(model.path),
            "cache_dir": str(model.folder),
            "dtype": model.dtype,
            "threads": 2 if seed else 1,
            "max_model_len": LENGTH,
            "policy": policy,
            "policy_knobs": tuple((knobs or {}).items()),
        }
        | given,
        lambda: LENGTH,
    )
    options = replace(options, num_kv_blocks=-(-pool // options.block_size))
    requests = model.asked(seed)
    answers, stats, executor = serve(options, requests)
    expected = model.alone(seed)
    wrong = [name for name in expected if answers.get(name) != expected[name]]
    assert not wrong, f"{policy} {knobs or ''} {given}, crowd {seed}: {wrong} got something else than alone"
    return stats, executor


def variants(policy: str) -> list[Mapping[str, str]]:
    """Knobs to try a preset with; all requests are served under each."""
    return [knobs for knobs in KNOBS.get(policy, ({},)) if "timeout_action" not in knobs]


@pytest.mark.parametrize("policy", PRESETS)
def test_alone_or_in_any_crowd(models: list[Model], policy: str, effort: Callable[[int, int], int]) -> None:
    """Published settings, and pages of one token with small passes: the same bits in pools for hardly more than one."""
    preemptions = 0
    for seed in range(effort(1, 20)):
        for place, knobs in enumerate(variants(policy)):
            model = models[(seed + place) % 2]
            host = {"num_host_blocks": 500} if "preemption" in knobs else {}
            pool = POOL.get(policy, LENGTH + 16)
            stats, _ = crowd(model, policy, seed, knobs=knobs, pool=pool, **host)
            preemptions += stats.num_preemptions
            small = {"block_size": 1, "enable_prefix_caching": bool(seed % 2)}
            if engine_options({"model": "", "policy": policy}, lambda: LENGTH).enable_chunked_prefill:
                small |= {"max_num_batched_tokens": SMALL_PASS.get(policy, 40), "max_num_seqs": 12}
            model = models[(seed + place + 1) % 2]
            stats, _ = crowd(model, policy, seed, knobs=knobs, pool=pool, **small, **host)
            preemptions += stats.num_preemptions
    assert policy not in PREEMPTING or preemptions, "pools must be tight enough"


@pytest.mark.parametrize("block_size", [1, 16])
def test_swapped_blocks_come_back_as_they_were(models: list[Model], block_size: int) -> None:
    """With a host tier that is large enough, vllm-v0 moves blocks out and back and recomputes nothing."""
    for model in models:
        stats, executor = crowd(
            model, "vllm-v0", 0, knobs={"preemption": "swap"}, block_size=block_size, num_host_blocks=2000 // block_size
        )
        assert stats.num_preemptions > 0
        assert stats.num_moved_blocks == executor.num_moves > 0
        assert stats.num_recomputed_tokens == 0


@pytest.mark.parametrize("policy", ["openvino", "turbomind"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_what_a_victim_keeps_is_what_it_had(models: list[Model], policy: str, block_size: int) -> None:
    """Those that take the tail of a victim let it go on behind what it kept, without a prefix cache."""
    for model in models:
        knobs = {"never_half_a_prompt": "false"} if policy == "openvino" else {}
        stats, executor = crowd(model, policy, 0, knobs=knobs, block_size=block_size, enable_prefix_caching=False)
        assert stats.num_preemptions > 0
        assert executor.num_resumed > 0


@pytest.mark.parametrize("policy", ["lightllm", "lightllm-mixed", "lightllm-splitfuse"])
def test_wrong_estimates_change_nothing(models: list[Model], policy: str) -> None:
    """Where the past misleads an estimate, sequences are paused and computed again, to the same bits."""
    knobs = {"router_token_ratio": "0.9", "initial_output_len": "4"}
    for model in models:
        stats, _ = crowd(model, policy, None, knobs=knobs)
        assert stats.num_preemptions > 0
        assert stats.num_recomputed_tokens > 0


def test_padding_is_computed(models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a padded preset go through the kernels, padding and all, and change nobody's bits."""
    rows = 0

    def count(program: native.Model, batch: native.Batch) -> None:
        nonlocal rows
        if program.ops[0].kind == native.OpKind.EMBED:  # not further logits of the same rows
            rows += batch.num_tokens

    model = models[0]
    model.alone(0)
    watch_batches(monkeypatch, count)
    for budget in (40, 700):
        rows = 0
        stats, _ = crowd(
            model, "hf-pipeline", 0, knobs={"run_max_tokens": "60"}, pool=8 * LENGTH,
            max_num_batched_tokens=budget, max_num_seqs=8,
        )  # fmt: skip
        assert stats.num_padding_tokens > stats.num_generated_tokens
        assert rows == stats.num_scheduled_tokens + stats.num_padding_tokens


def test_delivery_changes_no_pass(models: list[Model]) -> None:
    """Told when the batch ends instead of as they come, tokens and passes are the same."""
    for policy in ("static", "hopon"):
        stream, _ = crowd(models[0], policy, 0, delivery="stream")
        batch, _ = crowd(models[0], policy, 0, delivery="batch")
        assert stream.num_steps == batch.num_steps
        assert stream.num_scheduled_tokens == batch.num_scheduled_tokens


def test_a_wrong_bit_is_seen(models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor whose host tier hands back the wrong block does not pass."""
    monkeypatch.setattr(CpuExecutor, "_move", lambda executor, move: None)
    with pytest.raises(AssertionError, match="something else than alone"):
        crowd(models[0], "vllm-v0", 0, knobs={"preemption": "swap"}, num_host_blocks=200)
