"""Several outputs of one prompt: the prompt is computed once, and each output is what it is alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, CloseInput, Command
from hopon.core.policy.presets import PRESETS, make_preset
from hopon.core.types import FinishReason, Request, SamplingParams
from tests.core.harness import Harness, config, request
from tests.core.test_identity import ALONE, STOP, serve


def group(name: str, prompt: tuple[int, ...], count: int, seed: int = 7, **fields: object) -> list[Request]:
    """A leader and its followers."""
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 20} | fields))  # type: ignore[arg-type]
    first = Request(request_id=name, prompt=prompt, params=params, seed=seed, stop_token_ids=(STOP,))
    return [first, *(replace(first, request_id=f"{name}.{i}", choice=i, leader=name) for i in range(1, count))]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [500, 20])
def test_a_prompt_is_computed_once(caching: bool, budget: int) -> None:
    """Four outputs of a prompt of 100: its full blocks are computed by the first alone, in one pass or in chunks, with
    and without a prefix cache; the tail behind them by each; nobody has the other's text."""
    settings = SchedulerConfig(
        num_blocks=100,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    asked = group("a", tuple(range(100)), 4, ignore_eos=True)
    heard, stats = serve(settings, [(0.0, r) for r in asked])
    generated = sum(len(tokens) for tokens, *_ in heard.values())
    assert stats.num_scheduled_tokens == 100 + 3 * 4 + generated - 4
    assert stats.num_prompt_tokens == 100
    assert stats.prefix_cache_hits == 0
    assert len({tuple(tokens) for tokens, *_ in heard.values()}) == 4
    for one in asked:
        assert heard[one.request_id] == serve(ALONE, [(0.0, one)])[0][one.request_id]


def test_followers_wait_for_the_prompt_and_count_as_waiting() -> None:
    """Until the leader's last full block is planned its followers hold nothing; then they start, sharing its blocks."""
    h = Harness.make(config(max_num_batched_tokens=32))
    leader = request("a", 80)
    h.add(leader, replace(leader, request_id="b", choice=1, leader="a"))
    for _ in range(2):
        assert len(h.step().chunks) == 1
        assert (h.scheduler.num_running, h.scheduler.num_waiting) == (1, 1)
    plan = h.step()  # beside the leader's last chunk
    [opened] = plan.opened
    assert opened.choice == 1
    assert [chunk.start for chunk in plan.chunks if chunk.row == opened.row] == [64]
    assert h.scheduler.pool.num_used == 5 + 1  # the leader's, and the follower's tail
    h.run()
    assert h.scheduler.pool.num_free == 64


def test_followers_do_not_wait_where_nothing_is_shared() -> None:
    """A prompt within one block, a leader that has gone, or one that has computed its prompt: the queue as usual."""
    h = Harness.make(config())
    leader = request("a", 16)
    h.add(leader, replace(leader, request_id="b", choice=1, leader="a"))
    assert len(h.step().opened) == 2
    h.run()
    h.add(replace(leader, request_id="c", choice=2, leader="a"))
    assert len(h.step().opened) == 1
    h.run()
    assert set(h.finished) == {"a", "b", "c"}


@pytest.mark.parametrize("victim", ["a", "b"])
def test_one_of_a_group_may_leave_before_the_prompt_is_computed(victim: str) -> None:
    """When the leader goes its followers queue; when a follower goes the others feel nothing; no block is lost."""
    h = Harness.make(config(max_num_batched_tokens=32))
    leader = request("a", 200)
    h.add(leader, *(replace(leader, request_id=name, choice=1, leader="a") for name in "bc"))
    h.step()
    h.abort(victim)
    h.run()
    assert {name: delta.finish for name, delta in h.finished.items() if name != victim} == dict.fromkeys(
        {"a", "b", "c"} - {victim}, FinishReason.LENGTH
    )
    assert h.reason(victim) is FinishReason.ABORT
    assert h.scheduler.pool.num_free == 64


def test_a_follower_must_have_its_leaders_prompt() -> None:
    """Another prompt or another salt is a mistake that would show somebody else's text: refused at once."""
    h = Harness.make(config())
    leader = request("a", 40)
    h.add(leader)
    for other in (replace(leader, prompt=leader.prompt[:-1]), replace(leader, cache_salt="x")):
        with pytest.raises(ValueError, match="another prompt or salt"):
            h.add(replace(other, request_id="b", leader="a"))


def test_v034_v053_groups_in_any_crowd(effort: Callable[[int, int], int]) -> None:
    """Random groups, chunk and block sizes, caches on and off, tiny pools, aborts, pipelining: each output has the
    tokens and the end of a request with that choice alone."""
    preemptions = shared = 0
    for seed in range(effort(40, 800)):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 16, 32])
        settings = SchedulerConfig(
            num_blocks=-(-rng.choice([130, 140, 200, 3000]) // size),
            block_size=size,
            max_model_len=128,
            max_num_seqs=rng.choice([2, 8, 20]),
            max_num_batched_tokens=rng.choice([20, 64, 500]),
            enable_prefix_caching=rng.random() < 0.5,
        )
        asked: list[Request] = []
        for i in range(4):
            prompt = tuple(rng.randrange(900) for _ in range(rng.choice([1, 16, 17, 40, 90])))
            asked += group(str(i), prompt, rng.randint(1, 5), rng.getrandbits(64), max_tokens=rng.randint(1, 38))
        pause = rng.choice([0, 0, 3])
        events: list[tuple[float, Command]] = [(float(int(one.request_id[0]) * pause), one) for one in asked]
        gone = {r.request_id for r in asked if rng.random() < 0.15}
        events += [(rng.uniform(0, 60), Abort(name)) for name in sorted(gone)]
        heard, stats = serve(settings, events, depth=rng.choice([1, 1, 2, 3]))
        preemptions += stats.num_preemptions
        alone = {r.request_id: serve(ALONE, [(0.0, replace(r, leader=""))])[0][r.request_id] for r in asked}
        shared += sum(len(r.prompt) for r in asked) > stats.num_prompt_tokens
        for name, got in heard.items():
            if got[3] is FinishReason.ABORT:
                assert got[0] == alone[name][0][: len(got[0])]
            else:
                assert got == alone[name], f"output {name} of schedule {seed} depends on its mates"
    assert preemptions > 10
    assert shared > 20


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_groups_end_under_every_policy(preset: str) -> None:
    """Whatever the policy, all outputs of a group come to their ends and are those of the default policy."""
    asked = [*group("a", tuple(range(40)), 4, max_tokens=9), *group("b", tuple(range(50, 75)), 3, max_tokens=12)]
    made = make_preset(preset, {"run_max_tokens": "12"} if preset == "hf-pipeline" else {})
    fields: dict[str, Any] = {"num_blocks": 200, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    settings = SchedulerConfig(**(fields | dict(made.settings(128))))
    events: list[tuple[float, Command]] = [*((0.0, one) for one in asked), (0.0, CloseInput())]
    heard, _ = serve(settings, events, policy=made.policy(settings))
    for one in asked:
        assert heard[one.request_id] == serve(ALONE, [(0.0, replace(one, leader=""))])[0][one.request_id]
