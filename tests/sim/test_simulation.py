"""The simulator: closed forms, the same bytes again, moves, replicas, the fast mode, and bad input."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hopon.core.clock import VirtualClock
from hopon.core.config import SchedulerConfig
from hopon.core.plan import StepPlan
from hopon.core.policy.composition import Action, WaitUntil
from hopon.core.policy.preset import Policy
from hopon.core.policy.presets import make_preset
from hopon.core.policy.systems.hopon import Hopon
from hopon.core.policy.systems.static import StaticImpatient
from hopon.core.scheduler import Scheduler
from hopon.core.step import Step
from hopon.core.types import FinishReason, Request, SamplingParams
from hopon.sim.cluster import LeastLoad, PrefixAware, RoundRobin, router
from hopon.sim.command import calibrate, make_config, make_machine, simulate
from hopon.sim.cost import Linear, Link
from hopon.sim.hardware import HARDWARE, MODELS
from hopon.sim.loop import Simulation
from hopon.sim.result import Meter, Result
from hopon.sim.run import commands, make_replica
from hopon.sim.run import simulate as play
from hopon.sim.swap import crossover, prefill_seconds, swap_seconds, swap_table
from hopon.testing import Finished, LedgerExecutor
from hopon.tracing import StepRecord, TracedExecutor, read_journal, read_steps, write_steps
from hopon.workload.ask import Ask, Workload
from hopon.workload.draw import Sharing, draw
from hopon.workload.lengths import Uniform
from tests.core.systems.drive import NAMES

COST = Linear(base=1.0, per_sequence=0.125, per_prompt_token=0.0625)


def config(num_blocks: int = 1000, **changes: object) -> SchedulerConfig:
    settings = {"num_blocks": num_blocks, "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def ask(number: int, inputs: int, outputs: int, arrival: float = 0.0) -> Ask:
    return Ask(number=number, arrival=arrival, input_tokens=inputs, output_tokens=outputs, max_tokens=outputs)


def work(*asks: Ask) -> Workload:
    return Workload(name="made", asks=asks)


def static(config: SchedulerConfig) -> Policy:
    return StaticImpatient(delivery="stream").policy(config)


def run(workload: Workload, settings: SchedulerConfig, **more: object) -> Result:
    return play(workload, settings, Hopon().policy, COST, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (10, 5), (64, 1), (65, 7), (300, 40)])
def test_a_single_request_in_closed_form(inputs: int, outputs: int) -> None:
    """It takes ceil(prompt / budget) + output - 1 passes; TTFT and E2E are the sums of their costs."""
    result = run(work(ask(0, inputs, outputs, arrival=3.0)), config())
    chunks = math.ceil(inputs / 64)
    assert result.totals.passes == chunks + outputs - 1
    [record] = result.records
    whole = 0.0625 * sum(count for start in range(0, inputs, 64) if (count := min(64, inputs - start)) > 1)
    assert record.waiting == 0.0
    assert record.ttft == 1.125 * chunks + whole
    assert record.e2e == record.ttft + 1.125 * (outputs - 1)
    assert record.output_tokens == outputs
    assert result.totals.useful_slot_steps == result.totals.resident_slot_steps == result.totals.passes
    assert result.totals.seat_steps == 8 * result.totals.passes


def test_the_seeds_static_batch_in_closed_form(effort: Callable[[int, int], int]) -> None:
    """Static batching in groups takes, per group, max ceil(prompts / budget) + max(output) - 1 passes, by brute force
    over random batches; continuous batching never more, and the same when all requests are equal."""
    rng = random.Random(7)
    for _ in range(effort(25, 300)):
        group = rng.choice([1, 2, 4])
        asks = [ask(i, 8, rng.randint(1, 30)) for i in range(group * rng.randint(1, 5))]
        settings = config(max_num_seqs=group)
        found = play(work(*asks), settings, static, COST)
        expected = sum(max(a.output_tokens for a in asks[i : i + group]) for i in range(0, len(asks), group))
        assert found.totals.passes == expected
        assert run(work(*asks), settings).totals.passes <= expected
    equal = work(*(ask(i, 8, 9) for i in range(8)))
    assert run(equal, config(max_num_seqs=4)).totals.passes == 18
    assert play(equal, config(max_num_seqs=4), static, COST).totals.passes == 18


def test_two_slots_and_three_requests() -> None:
    """The textbook example: outputs of 2, 4 and 2 on two slots take 6 passes statically, 4 continuously, and use 8 of
    12 and 8 of 8 slot-steps."""
    three = work(ask(0, 1, 2), ask(1, 1, 4), ask(2, 1, 2))
    settings = config(max_num_seqs=2)
    fixed, continuous = play(three, settings, static, COST).totals, run(three, settings).totals
    assert (fixed.passes, fixed.useful_slot_steps, fixed.seat_steps) == (6, 8, 12)
    assert (continuous.passes, continuous.useful_slot_steps, continuous.seat_steps) == (4, 8, 8)
    assert continuous.utilisation == 1.0


def crowd(seed: int, count: int = 60, **more: object) -> Workload:
    made = draw(count=count, rate=0.2, inputs=Uniform(1, 200), outputs=Uniform(1, 60), seed=seed, **more)  # type: ignore[arg-type]
    return made.limited(80)


@pytest.mark.parametrize("fast", [False, True])
def test_v114_the_same_simulation_gives_the_same_bytes(fast: bool) -> None:
    """Under preemptions, prefix hits and several replicas, twice the same JSON, and another for another seed."""

    def once(seed: int) -> str:
        workload = crowd(seed, sharing=Sharing(groups=3, tokens=40))
        settings = config(40, max_model_len=400)
        result = run(workload, settings, replicas=2, router=PrefixAware(page=16), fast=fast)
        assert result.totals.preemptions > 0
        assert result.totals.prefix_cache_hits > 0
        return result.to_json()

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_results_are_strict_json() -> None:
    """No NaN and no infinity, whatever was refused, and times of all requests are in it."""
    settings = config(8, max_model_len=400)
    result = run(work(ask(0, 300, 5), ask(1, 5, 5)), settings)
    content = json.loads(result.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert [row["finish"] for row in content["requests"]] == ["refused", "length"]
    assert content["requests"][0]["ttft"] is None
    assert "needs 19 KV blocks" in content["requests"][0]["message"]


def test_v081_a_stop_before_the_limit_is_the_device_s() -> None:
    """With a limit above it a request ends at its true length, with STOP; at its limit with LENGTH."""
    asks = (ask(0, 5, 7), replace(ask(1, 5, 7), max_tokens=50), replace(ask(2, 5, 7), max_tokens=3))
    records = run(work(*asks), config()).records
    assert [r.output_tokens for r in records] == [7, 7, 3]
    assert [r.finish for r in records] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]


def test_moved_is_moved() -> None:
    """Under a swapping preset nothing is computed twice, every block that goes comes back, its bytes are counted and
    take their time."""
    preset = make_preset("vllm-v0", {"preemption": "swap"})
    settings = config(60, max_model_len=400, num_host_blocks=500, max_num_batched_tokens=400)
    slow = Link(block_bytes=1000.0, host_bandwidth=100.0, copy_bandwidth=1e9)

    def moved(link: Link) -> Result:
        return play(crowd(3), settings, preset.policy, replace(COST, link=link), block_bytes=1000.0)

    quick, result = moved(replace(slow, host_bandwidth=1e30)), moved(slow)
    totals = quick.totals
    assert totals.preemptions > 0
    assert totals.recomputed_tokens == 0
    assert totals.moved_blocks > 0
    assert totals.moved_blocks % 2 == 0
    assert totals.moved_bytes == 1000.0 * totals.moved_blocks
    assert result.totals.recomputed_tokens == 0
    assert result.summary.seconds > quick.summary.seconds
    recomputing = play(crowd(3), settings, make_preset("vllm-v0").policy, COST)
    assert recomputing.totals.recomputed_tokens > 0
    assert recomputing.totals.moved_blocks == 0


def test_kv_memory_by_hand() -> None:
    """One request of 16 tokens that yields 3: one block of 16 while it prefills, two while it decodes 17 and 18."""
    result = run(work(ask(0, 16, 3)), config())
    first, later = 1.125 + 1.0, 1.125
    total = first + 2 * later
    assert result.totals.kv_reserved == pytest.approx((16 * first + 2 * 32 * later) / total)
    assert result.totals.kv_used == pytest.approx((16 * first + (17 + 18) * later) / total)
    assert result.totals.kv_wasted == pytest.approx((15 + 14) * later / total)
    assert result.totals.kv_peak == 32


def test_recomputed_prompts_are_not_useful() -> None:
    """Under recompute preemption a slot-step is useful that yields a token or computes prompt tokens for once."""
    settings = config(30, max_model_len=400, enable_prefix_caching=False)
    result = run(crowd(5), settings)
    assert result.totals.recomputed_tokens > 0
    assert result.totals.useful_slot_steps < result.totals.computed_slot_steps
    assert result.totals.useful_slot_steps >= result.totals.output_tokens


@pytest.mark.parametrize("name", NAMES)
def test_fast_is_exact_for_clients(name: str) -> None:
    """Under a light load merged steps change no time of any request and no count of passes, for any preset."""
    workload = draw(count=40, rate=0.1, inputs=Uniform(1, 100), outputs=Uniform(1, 60), seed=2)
    knobs = {"run_max_tokens": "60"} if name == "hf-pipeline" else {}
    preset = make_preset(name, knobs)
    fields = asdict(config(200, max_model_len=400)) | dict(preset.settings(400))
    fields["num_blocks"] = 200 * 16 // fields["block_size"]
    settings = SchedulerConfig(**fields)
    exact, fast = (play(workload, settings, preset.policy, COST, fast=mode) for mode in (False, True))
    assert exact.records == fast.records
    assert exact.totals.passes == fast.totals.passes
    assert exact.totals.scheduled_tokens == fast.totals.scheduled_tokens


def test_fast_merges() -> None:
    """The fast mode really has fewer entries: a lone request is planned a handful of times."""
    planned = 0
    settings = config()
    lone = work(ask(0, 10, 500))

    class Counting(Meter):
        def stepped(self, *arguments: object) -> None:
            nonlocal planned
            planned += 1
            super().stepped(*arguments)  # type: ignore[arg-type]

    replica = make_replica(lone, settings, Hopon().policy(settings), COST, fast=True)
    meter = Counting()
    Simulation([replica], watcher=meter, fast=True).run(commands(lone))
    assert planned < 6
    assert meter.totals.passes == 500


def test_aborts_free_their_seat() -> None:
    """A request that is aborted while it runs ends there, and the next one takes its seat."""
    two = work(ask(0, 5, 1000), ask(1, 5, 3))
    result = run(two, config(max_num_seqs=1, max_model_len=2000), aborts=[(10.0, "0")])
    first, second = result.records
    assert first.finish is FinishReason.ABORT
    assert second.finish is FinishReason.LENGTH
    assert second.admitted is not None
    assert 10.0 <= second.admitted < 13.0


@pytest.mark.parametrize("name", ["round-robin", "least-load", "prefix-aware"])
def test_replicas_share_the_load(name: str) -> None:
    """Two replicas serve everything, both of them something, in less time than one."""
    workload = crowd(1)
    one = run(workload, config())
    two = run(workload, config(), replicas=2, router=router(name))
    assert {record.source for record in two.records} == {0, 1}
    assert all(record.completed for record in two.records)
    assert two.summary.e2e.mean is not None
    assert one.summary.e2e.mean is not None
    assert two.summary.e2e.mean < one.summary.e2e.mean


def test_routers_by_hand() -> None:
    """Round robin alternates, least load looks at what is unfinished, prefix-aware goes where the beginning went, until
    that replica is much busier."""
    settings = config()
    one = work(ask(0, 5, 5))
    fleet = [make_replica(one, settings, Hopon().policy(settings), COST, index=index) for index in range(2)]

    def request(name: str, *tokens: int) -> Request:
        return Request(request_id=name, prompt=tokens, params=SamplingParams(), seed=0)

    turns = RoundRobin()
    assert [turns.choose(request("a", 1), fleet) for _ in range(3)] == [0, 1, 0]
    fleet[0].inbox.append(request("b", 1))
    assert LeastLoad().choose(request("c", 1), fleet) == 1
    aware = PrefixAware(page=2, slack=2)
    assert aware.choose(request("d", 1, 2, 3), fleet) == 1
    fleet[1].inbox += [request("e", 1), request("f", 1)]
    assert aware.choose(request("g", 1, 2, 9), fleet) == 1
    fleet[1].inbox += [request("h", 1), request("i", 1)]
    assert aware.choose(request("j", 1, 2, 9), fleet) == 0
    with pytest.raises(ValueError, match="page must be at least 1 and slack at least 0, got 0 and 1"):
        PrefixAware(page=0, slack=1)


def test_a_shared_prefix_pays_behind_a_prefix_aware_router() -> None:
    """Many groups with long common beginnings: routing by beginning finds more of them cached than taking turns."""
    workload = draw(
        count=120, rate=0.05, inputs=Uniform(1, 20), outputs=Uniform(1, 5), sharing=Sharing(groups=6, tokens=320)
    )
    settings = config(70, max_model_len=400)
    hits = {
        name: run(workload, settings, replicas=3, router=router(name)).totals.prefix_cache_hits
        for name in ("round-robin", "prefix-aware")
    }
    assert hits["prefix-aware"] > 1.2 * hits["round-robin"]


class Sleeper:
    """A policy that waits for what never comes."""

    def compose(self, step: Step) -> list[Action]:
        return [WaitUntil(math.inf)]


def test_nothing_hangs() -> None:
    """A policy that never plans is an error that names it, not an endless simulation."""

    def policy(settings: SchedulerConfig) -> Policy:
        return replace(Hopon().policy(settings), composition=Sleeper())  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"1 requests wait for ever.*Sleeper"):
        play(work(ask(0, 5, 5)), config(), policy, COST)


def test_commands_must_come_in_order() -> None:
    """A time before the one in front of it is named."""
    settings = config()
    one = work(ask(0, 5, 5))
    replica = make_replica(one, settings, Hopon().policy(settings), COST)
    late, early = ((t, ask(i, 5, 5).request()) for i, t in enumerate((2.0, 1.0)))
    with pytest.raises(ValueError, match=r"at 1\.0 s comes behind one at 2\.0 s"):
        Simulation([replica], watcher=Meter()).run([late, early])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "vlm"}, "unknown policy 'vlm'"),
        ({"knobs": {"watermark": "much"}}, "watermark is a float"),
        ({"policy": "static", "knobs": {"group_size": "-1"}}, "group_size must be at least 0.*got -1"),
        ({"cost": "free"}, "unknown cost model 'free'"),
        ({"cost": "fitted:"}, "unknown cost model 'fitted:'"),
        ({"cost": "linear", "captured": (1, 2)}, "captured batch sizes belong to the cost model roofline"),
        ({"model": "llama-2-7b", "hardware_name": "mainframe"}, "unknown hardware 'mainframe'"),
        ({"model": "opt-13b", "hardware_name": "l4"}, "opt-13b has 25,.* bytes of weights"),
        ({"replicas": 0}, "at least 1 replica, got 0"),
        ({"replicas": 2, "router": "dice"}, "unknown router 'dice'"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"depth": 2, "fast": True}, "depth must be 1, got 2"),
        ({"num_requests": 0}, "at least 1 request, got 0"),
        ({"rate": -3.0}, "rate must be at least 0 requests per second, got -3"),
        ({"length_scale": 0.0}, "length scale must be above 0, got 0"),
        ({"prefix_groups": 3}, "got 3 groups of 0 tokens"),
        ({"ttft": -1.0}, "ttft must be above 0 seconds, got -1"),
        ({"settings": {"max_num_seqs": 0}}, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_bad_input_names_itself(arguments: dict[str, object], message: str) -> None:
    """Every bad argument of the command is an error with the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        simulate(**({"num_requests": 3} | arguments))  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    """A trace in, a page and JSON out: scaling and limits are stated, and the page's figures are those of the JSON."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{50 + i},{5 + i}\n" for i in range(30)))
    page = simulate(
        trace=trace,
        num_requests=20,
        rate_scale=2.0,
        cost="linear",
        policy="orca",
        ttft=1.0,
        settings={"max_num_seqs": 4, "num_blocks": None},
        json_path=tmp_path / "result.json",
    )
    content = json.loads((tmp_path / "result.json").read_text())
    assert "arrivals 2 times as fast" in page
    assert "linear: 22 ms" in page
    assert "goodput" in page
    assert content["about"]["settings"]["max_num_seqs"] == 4
    assert content["summary"]["requests"] == 20
    assert f"{content['totals']['passes']:,}" in page
    refused = simulate(trace=trace, cost="linear", settings={"max_model_len": 60})
    assert "requests were not served; the first is request" in refused


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_runs_with_what_its_system_publishes(name: str) -> None:
    """On a GPU's roofline with published settings every preset serves a workload to its end."""
    workload = draw(count=30, rate=5.0, inputs=Uniform(1, 900), outputs=Uniform(1, 60))
    preset = make_preset(name, {"run_max_tokens": "60"} if name == "hf-pipeline" else {})
    device = HARDWARE["a100-80"]
    machine = make_machine("roofline", "llama-3-8b", device)
    settings = make_config(preset, machine, workload, {})
    result = play(workload, settings, preset.policy, machine.with_blocks(settings.block_size, device))
    assert [record.output_tokens for record in result.records] == workload.output_lengths
    assert all(record.completed for record in result.records)


def test_traced_steps_survive_their_file(tmp_path: Path) -> None:
    """A traced device passes results on and notes features and durations; written and read again they are the same."""
    clock = VirtualClock()

    class Slow(LedgerExecutor):
        def submit(self, plan: StepPlan) -> Finished:
            clock.advance_to(clock.now() + 0.5)
            return super().submit(plan)

    records: list[StepRecord] = []
    traced = TracedExecutor(Slow(8, 16), clock, records.append)
    request = ask(0, 5, 2).request()
    scheduler = Scheduler(config(8))
    scheduler.add(request, 0.0)
    for _ in range(2):
        plan = scheduler.plan(clock.now())
        scheduler.commit(plan, traced.submit(plan).result(), clock.now())
    assert [record.seconds for record in records] == [0.5, 0.5]
    assert [record.start for record in records] == [0.0, 0.5]
    assert records[0].features.prefill_tokens == 5
    assert records[1].features.num_decodes == 1
    write_steps(tmp_path / "steps.jsonl", records, {"model": "ledger"})
    assert read_steps(tmp_path / "steps.jsonl") == records
    with pytest.raises(ValueError, match="at least 20 steps"):
        calibrate(steps=tmp_path / "steps.jsonl", output=None, capacity_tokens=1, kv_bytes_per_token=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("{}\n", "line 1: not a file of steps"),
        ('{"hopon":"steps","version":1}\n{"step":1}\n', "line 2: not a step record"),
        ('{"hopon":"steps","version":1}\n{"step":1,"start":0,"seconds":-1}\n', "line 2: .*at least 0, got -1"),
        ('{"hopon":"steps","version":1}\nnonsense\n', "line 2: "),
    ],
)
def test_bad_record_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    """Files of another kind and damaged lines are errors with file and line."""
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_steps(path)
    with pytest.raises(ValueError, match=r"steps\.jsonl"):
        read_journal(path)


def test_swap_against_prefill_by_hand() -> None:
    """1,024 tokens of Llama-3-8B are 128 MiB, twice over 25.6 GB/s: 10.5 ms; computing them again takes a pass of at
    least that many operations; beside others a few tokens are free, so that computing wins up to some context."""
    llama, a100 = MODELS["llama-3-8b"], HARDWARE["a100-80"]
    assert swap_seconds(llama, a100, 1024) == pytest.approx(2 * 1024 * 131072 / 25.6e9)
    flops = 2 * llama.layer_weights * 1024
    assert prefill_seconds(llama, a100, 1024, 2048) > flops / (312e12 * 0.66)
    assert crossover(llama, a100, 2048, 8192) == 0
    border = crossover(llama, a100, 2048, 8192, beside=32)
    assert 0 < border < 1000
    assert prefill_seconds(llama, a100, border, 2048, 32) <= swap_seconds(llama, a100, border)
    assert prefill_seconds(llama, a100, border + 16, 2048, 32) > swap_seconds(llama, a100, border + 16)
    page = swap_table(llama)
    assert all(name in page for name in HARDWARE)


def test_cost_does_not_grow_with_what_is_past() -> None:
    """Of many finished requests the simulator, its meter, its scheduler and its device keep nothing but the records."""
    settings = config()
    many = work(*(ask(i, 5, 3, arrival=10.0 * i) for i in range(200)))
    replica = make_replica(many, settings, Hopon().policy(settings), COST)
    meter = Meter()
    simulation = Simulation([replica], watcher=meter)
    simulation.run(commands(many))
    assert not simulation._owners
    assert not meter.recorder._open
    assert not replica.scheduler._sequences
    assert not replica.device._rows  # type: ignore[attr-defined]
