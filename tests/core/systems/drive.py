"""What every preset is put through: random traces, identity on the ledger, plans that do not know the future."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import isinf
from typing import Any

from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, CloseInput, Command, EngineStats
from hopon.core.plan import RowResult, StepPlan, StepResult
from hopon.core.policy.composition import Composition
from hopon.core.policy.preset import Policy
from hopon.core.policy.presets import PRESETS, make_preset, preset_class
from hopon.core.types import FinishReason, Request
from tests.core.harness import STOP_TOKEN, Harness
from tests.core.test_identity import ALONE, Heard, requests, serve
from tests.core.test_random_traces import random_config, random_request


def _resolves(name: str) -> bool:
    try:
        preset_class(name)
    except ValueError:
        return False
    return True


NAMES = [name for name in PRESETS if _resolves(name)]
"""The table's systems; a test of its own proves that none is missing."""

KNOBS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "static": ({"group_size": "3", "max_wait": "20"}, {"group_size": "2", "delivery": "stream"}, {}),
    "static-impatient": ({}, {"group_size": "2"}),
    "hf-pipeline": ({"run_max_tokens": "60"}, {"run_max_tokens": "60", "group_size": "2", "max_wait": "7"}),
    "dynamic": (
        {},
        {"preferred_batch_size": "2,4", "max_queue_delay_microseconds": "6000000"},
        {
            "priority_levels": "2",
            "default_priority_level": "2",
            "timeout_action": "delay,reject",
            "default_timeout_microseconds": "3000000,90000000",
            "max_queue_size": "0,9",
        },
    ),
    "orca": ({}, {"max_bs": "2"}, {"reserve": "max_model_len"}),
    "vllm-v0": ({}, {"preemption": "swap"}),
    "vllm": (
        {},
        {"scheduling_policy": "priority"},
        {"scheduler_reserve_full_isl": "false", "long_prefill_token_threshold": "5"},
    ),
    "sarathi": ({}, {"chunk_size": "20"}),
    "lightllm": ({}, {"router_token_ratio": "0.9", "initial_output_len": "4"}),
    "lightllm-mixed": ({}, {"router_token_ratio": "0.9", "initial_output_len": "4"}),
    "lightllm-splitfuse": ({}, {"router_token_ratio": "0.9", "initial_output_len": "4", "splitfuse_block_size": "5"}),
    "tgi": ({}, {"chunking": "false"}),
    "trt-no-evict": ({}, {"chunking": "equal-progress"}),
    "trt-max-utilization": ({}, {"chunking": "equal-progress"}),
    "sglang": (
        {},
        {"schedule_conservativeness": "0.1", "schedule_policy": "fcfs"},
        {"init_new_token_ratio": "0.02", "enable_mixed_chunk": "true"},
        {"init_new_token_ratio": "0.02"},
    ),
    "lmdeploy": ({}, {"prefill_interval": "2", "prefix_caching": "true"}),
    "turbomind": ({}, {"max_prefill_iters": "3", "prefix_caching": "true"}),
    "openvino": ({}, {"never_half_a_prompt": "false"}),
    "llama-cpp": ({}, {"cont_batching": "false"}, {"parallel": "2", "slot_prompt_similarity": "0.1"}),
}
"""Knobs with which a preset is tried; those not named here are tried with their defaults."""


def random_system(
    rng: random.Random, name: str, fields: Callable[[random.Random], Mapping[str, Any]]
) -> tuple[SchedulerConfig, Policy]:
    """A policy and a configuration with some of the settings that its system publishes.

    The preset may refuse configurations, with the reason, but not all.
    """
    preset = make_preset(name, rng.choice(KNOBS.get(name, ({},))))
    refusal = None
    for _ in range(200):
        chosen = dict(fields(rng)) | {"num_host_blocks": rng.choice([0, 7, 500])}
        share = rng.choice([0.0, 0.5, 1.0])
        capacity = chosen["num_blocks"] * chosen["block_size"]
        published = preset.settings(chosen["max_model_len"])
        chosen |= {key: value for key, value in published.items() if rng.random() < share}
        chosen["num_blocks"] = -(-capacity // chosen["block_size"])
        try:
            config = SchedulerConfig(**chosen)
            return config, preset.policy(config)
        except ValueError as error:
            refusal = error
    raise AssertionError(f"{name} accepts no config: {refusal}")


def trace_fields(rng: random.Random) -> Mapping[str, Any]:
    return asdict(random_config(rng))


@dataclass
class Trace:
    """Who arrives and who leaves before which step, decided in advance."""

    arrivals: list[tuple[int, Request]]
    aborts: dict[int, str]


def random_trace(rng: random.Random, config: SchedulerConfig) -> Trace:
    step = 0
    arrivals = []
    for i in range(rng.randint(1, 25)):
        step += rng.choice([0, 0, 0, 1, 2, 9, 60])
        arrivals.append((step, random_request(rng, str(i), config)))
    aborts = {rng.randrange(step + 30): str(rng.randrange(len(arrivals))) for _ in range(rng.randrange(3))}
    return Trace(arrivals, aborts)


@dataclass
class Driver(Harness):
    """A harness that plays a trace, obeys ``wake_at`` and closes the input behind the last arrival.

    With ``scripted`` no request ends by itself but the one of ``script`` = (name, output index of its end token).
    """

    script: tuple[str, int] | None = None
    scripted: bool = False
    names: dict[int, str] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    stopped_at: int | None = None

    def play(self, trace: Trace) -> Driver:
        scheduler = self.scheduler
        upcoming = list(trace.arrivals)
        number = 0
        while upcoming or scheduler.has_work:
            while upcoming and (upcoming[0][0] <= number or not scheduler.has_work):
                self.add(replace(upcoming.pop(0)[1], arrival=self.now))
            if not upcoming:
                scheduler.close_input()
            if number in trace.aborts:
                self.abort(trace.aborts[number])
            plan = self.step()
            number += 1
            if plan.wake_at is not None and scheduler.has_work and not self.in_flight:
                assert plan.wake_at > self.now, "a time to wake at that is not in the future"
                if isinf(plan.wake_at):
                    assert upcoming, "it waits for ever, and nothing more will come"
                    number = max(number, upcoming[0][0])
                elif not upcoming or upcoming[0][0] > number + 5:
                    self.now = max(self.now, plan.wake_at - 1.0)  # a step begins a second later
            assert len(self.plans) < 20_000, "this trace does not end"
        return self

    def spoil(self, spoil: Spoil | None) -> None:
        if spoil is not None:
            self.scheduler.policy = replace(self.scheduler.policy, composition=spoil(self))

    def check_end(self, trace: Trace) -> None:
        scheduler = self.scheduler
        assert set(self.finished) == {request.request_id for _, request in trace.arrivals}, "a request was lost"
        assert scheduler.pool.num_free == scheduler.pool.num_blocks, "blocks were lost"
        assert scheduler.host_pool.num_free == scheduler.host_pool.num_blocks, "host blocks were lost"
        assert len(scheduler._free_rows) == scheduler.config.max_num_seqs, "seats were lost"
        assert not scheduler._held, "news was never delivered"
        assert not self.rows, "rows are open after the end"
        for name, delta in self.finished.items():
            if delta.finish in (FinishReason.REFUSED, FinishReason.ERROR):
                assert any(c.isdigit() for c in delta.message), f"a refusal without numbers: {delta.message!r}"
                assert delta.admitted is not None or not self.outputs[name]
            else:
                assert delta.finish is FinishReason.ABORT or self.outputs[name], "an empty success"

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        if self.scripted:
            for opened in plan.opened:
                self.names[opened.row] = str(opened.prompt[0])

    def _result(self, plan: StepPlan) -> StepResult:
        if not self.scripted:
            return super()._result(plan)
        rows = []
        for chunk in plan.chunks:
            tokens: tuple[int, ...] = ()
            if chunk.sample:
                name = self.names[chunk.row]
                index = self.emitted.get(name, 0)
                self.emitted[name] = index + 1
                tokens = (10 + (int(name) * 31 + index * 7) % 50,)
                if (name, index) == self.script:
                    tokens = (STOP_TOKEN,)
                    self.stopped_at = plan.step
            rows.append(RowResult(chunk.row, tokens))
        return StepResult(tuple(rows))


Spoil = Callable[[Driver], Composition]
"""Makes a mutant of a driver's composition, to prove that a check can fail."""


def run_trace(name: str, seed: int, spoil: Spoil | None = None) -> Driver:
    """A random trace through a random configuration of a preset."""
    rng = random.Random(f"{name} {seed}")
    config, policy = random_system(rng, name, trace_fields)
    driver = Driver.make(config, depth=rng.choice([1, 1, 2, 3]), seed=seed, policy=policy)
    assert isinstance(driver, Driver)
    driver.spoil(spoil)
    trace = random_trace(rng, config)
    driver.play(trace).check_end(trace)
    return driver


def check_no_peeking(name: str, seed: int, spoil: Spoil | None = None) -> bool:
    """Two runs that differ in when one request emits its end token make the same plans until that token is known.

    False where the trace has no request to try it with.
    """

    def play(stop: tuple[str, int] | None) -> Driver:
        rng = random.Random(f"peek {name} {seed}")
        config, policy = random_system(rng, name, trace_fields)
        driver = Driver.make(config, depth=rng.choice([1, 2]), policy=policy)
        assert isinstance(driver, Driver)
        driver.scripted, driver.script = True, stop
        driver.spoil(spoil)
        trace = random_trace(rng, config)
        trace.arrivals = [
            (step, replace(r, prompt=(int(r.request_id), *r.prompt[1:]), stop_token_ids=(STOP_TOKEN,)))
            for step, r in trace.arrivals
        ]
        return driver.play(trace)

    late = play(None)
    rng = random.Random(seed)
    able = [one for one, output in late.outputs.items() if len(output) > 1]
    if not able:
        return False
    victim = rng.choice(able)
    early = play((victim, rng.randrange(len(late.outputs[victim]) - 1)))
    assert early.stopped_at is not None
    known = next(i for i, plan in enumerate(early.plans) if plan.step == early.stopped_at) + 1
    assert early.plans[:known] == late.plans[:known], f"{name}, trace {seed}: a plan depends on an end yet to come"
    return True


@cache
def crowd(seed: int) -> tuple[list[Request], Heard]:
    """Requests with their arrivals, and what each of them hears alone.

    Every other crowd is pressing: all come at once, and nobody ends before ``max_tokens``.
    """
    rng = random.Random(seed)
    asked = [replace(r, arrival=rng.choice([0.0, rng.uniform(0, 60)])) for r in requests(rng, 12)]
    if seed % 2:
        lengths = [rng.choice([20, 60, 110]) for _ in asked]
        asked = [
            replace(
                r, arrival=0.0, prompt=r.prompt[:30], stop_token_ids=(), params=replace(r.params, max_tokens=length)
            )
            for r, length in zip(asked, lengths, strict=True)
        ]
    return asked, {r.request_id: serve(ALONE, [(0.0, r)])[0][r.request_id] for r in asked}


def check_identity(name: str, seed: int) -> tuple[int, EngineStats]:
    """In a random crowd under a preset, every request hears what it hears alone. Returns how many were served to their
    end, and the counters."""
    asked, alone = crowd(seed)
    rng = random.Random(f"identity {name} {seed}")
    events: list[tuple[float, Command]] = [(r.arrival, r) for r in asked]
    gone = {r.request_id for r in asked if rng.random() < 0.15}
    events += [(rng.uniform(0, 80), Abort(one)) for one in sorted(gone)]
    events.append((max(r.arrival for r in asked), CloseInput()))
    config, policy = random_system(rng, name, identity_fields)
    heard, stats = serve(config, events, depth=rng.choice([1, 1, 2, 3]), policy=policy)
    assert set(heard) | gone == set(alone)
    served = 0
    for one, got in heard.items():
        if got[3] in (FinishReason.ABORT, FinishReason.REFUSED, FinishReason.ERROR):
            assert got[3] is not FinishReason.ABORT or one in gone
            assert got[0] == alone[one][0][: len(got[0])], f"{name}: the beginning of {one} depends on its mates"
        else:
            assert got == alone[one], f"{name}: request {one} of schedule {seed} depends on its mates"
            served += 1
    return served, stats


def identity_fields(rng: random.Random) -> Mapping[str, Any]:
    """A pool that holds one longest request at least, whatever its block size, often hardly more."""
    size = rng.choice([1, 2, 16, 32])
    return {
        "num_blocks": -(-rng.choice([140, 140, 300, 500, 3000]) // size),
        "block_size": size,
        "max_model_len": 128,
        "max_num_seqs": rng.choice([2, 8, 20]),
        "max_num_batched_tokens": rng.choice([20, 64, 500]),
        "long_prefill_token_threshold": rng.choice([0, 1, 7]),
        "enable_prefix_caching": rng.random() < 0.5,
    }


def schedule(harness: Harness, *asked: Request) -> list[list[tuple[str, int, int]]]:
    """(request, start, count) of every chunk of every pass so far. Requests need different prompts."""
    names = {request.prompt: request.request_id for request in asked}
    rows: dict[int, str] = {}
    passes = []
    for plan in harness.plans:
        rows |= {opened.row: names[opened.prompt] for opened in plan.opened}
        if plan.chunks or plan.padding:
            passes.append([(rows[chunk.row], chunk.start, chunk.count) for chunk in plan.chunks])
    return passes
