"""Policies side by side on the real engine: options, workloads, counting, the table, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest

from hopon import LLM
from hopon.compare.comparison import Comparison, compare
from hopon.compare.contender import Contender, make_plan, parse_policies
from hopon.compare.run import OpenLoop, make_request
from hopon.compare.spec import make_workload
from hopon.core.clock import WallClock
from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import CloseInput, Shutdown
from hopon.core.plan import Deployment, Report
from hopon.core.policy.admission import ReserveMaxTokens
from hopon.core.policy.composition import Action, WaitUntil
from hopon.core.policy.eviction import Never
from hopon.core.policy.order import Fcfs
from hopon.core.policy.preset import Policy
from hopon.core.policy.presets import PRESETS, engine_options, make_preset, parse_knobs, policy_of
from hopon.core.scheduler import Scheduler
from hopon.core.step import Step
from hopon.core.types import Request, SamplingParams
from hopon.model.cpu import load
from hopon.sim.cost import Linear
from hopon.sim.run import simulate
from hopon.workload.ask import Workload
from tests.native.counting import watch_batches
from tests.test_cli import QUICK, _serving, _url

STORIES = Path(__file__).parent / "data" / "stories260k"
CONTEXT = 512
VOCAB = 512


def _quiet(what: str, share: float) -> None:
    pass


def _given(cache: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(STORIES), "dtype": "f32", "threads": 1, "cache_dir": str(cache)} | more


def _compare(
    contenders: list[Contender], workload: Workload, given: Mapping[str, Any], *, report: Report = _quiet, **more: Any
) -> Comparison:
    memory: dict[str, Any] = {"kv_tokens": None, "host_tokens": 0, "factory": load} | more
    return compare(
        contenders=contenders,
        given=given,
        workload=workload,
        context_length=CONTEXT,
        vocab_size=VOCAB,
        report=report,
        **memory,
    )


def _hopon(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hopon", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


# ---- options ----


def _never() -> int:
    raise AssertionError("the model's context length is not needed")


def test_what_is_given_wins_over_the_policy_which_wins_over_the_defaults() -> None:
    """For llama-cpp: seats as given, block size as llama.cpp has it, and hopon's default where neither has a word."""
    options = engine_options({"model": "m", "policy": "llama-cpp", "max_num_seqs": 7, "block_size": None}, lambda: 300)
    assert options.max_num_seqs == 7
    assert options.block_size == 1
    assert options.long_prefill_token_threshold == EngineOptions(model="m").long_prefill_token_threshold
    assert engine_options({"model": "m"}, _never) == EngineOptions(model="m")
    assert engine_options({"model": "m", "policy": "hopon"}, lambda: 300) == EngineOptions(model="m")
    assert engine_options({"model": "m", "max_num_seqs": 999}, _never).max_num_batched_tokens == 999


def test_a_policys_settings_are_for_the_length_in_force() -> None:
    """Orca's pass holds the longest prompt: of the length that is given, else of the model's."""
    seats = engine_options({"model": "m", "policy": "orca"}, lambda: 300).max_num_seqs
    assert engine_options({"model": "m", "policy": "orca"}, lambda: 300).max_num_batched_tokens == 300 + seats
    given = {"model": "m", "policy": "orca", "max_model_len": 90}
    assert engine_options(given, _never).max_num_batched_tokens == 90 + seats


def test_delivery_overrides_the_policys() -> None:
    """Both ways; without a word the policy's own holds."""
    config = SchedulerConfig(num_blocks=64, max_model_len=128)
    for policy, own in (("hopon", "stream"), ("static", "batch")):
        assert policy_of(EngineOptions(model="m", policy=policy), config).delivery == own
        for other in ("stream", "batch"):
            options = EngineOptions(model="m", policy=policy, delivery=other)
            assert policy_of(options, config).delivery == other
    with pytest.raises(ValueError, match="'later'"):
        EngineOptions(model="m", delivery="later")  # type: ignore[arg-type]


def test_the_offline_api_takes_a_policy(tmp_path: Path) -> None:
    """``LLM(policy=...)`` runs it with its published settings and gives the same answer."""
    answers = []
    tries: list[dict[str, Any]] = [{}, {"policy": "llama-cpp", "policy_knobs": (("parallel", "3"),)}]
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    for more in tries:
        with LLM(STORIES, dtype="f32", threads=1, cache_dir=tmp_path, **more) as llm:
            outputs = llm.generate(["Once upon a time", "Lily"], greedy, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            config = llm._engine.scheduler.config
    assert (config.max_num_seqs, config.block_size) == (3, 1)
    assert answers[0] == answers[1]


# ---- what to compare ----


def test_policies_are_listed_or_spelt_out() -> None:
    """Names by commas, then one spec per policy with its knobs."""
    found = parse_policies("hopon, orca", ["static group_size=8 max_wait=2", "orca reserve=max_model_len"])
    assert [one.label for one in found] == [
        "hopon",
        "orca",
        "static group_size=8 max_wait=2",
        "orca reserve=max_model_len",
    ]


@pytest.mark.parametrize(
    ("names", "specs", "message"),
    [
        ("", (), "no policies"),
        ("hopon,nope", (), "'nope'"),
        ("hopon,hopon", (), "'hopon' is given twice"),
        ("static group_size=8", (), "belong to --policy"),
        ("", ("static group=8",), "no knob 'group'"),
        ("", ("static group_size=x",), "got 'x'"),
        ("", ("static group_size",), "NAME=VALUE, got 'group_size'"),
        ("", ("static group_size=1 group_size=2",), "given twice"),
        ("", ("",), "unknown policy ''"),
    ],
)
def test_bad_policies_are_named(names: str, specs: tuple[str, ...], message: str) -> None:
    """Nothing to compare, unknown names and knobs, bad values, doubles."""
    with pytest.raises(ValueError, match=message):
        parse_policies(names, specs)


def test_knobs_may_hold_commas_and_equals_signs() -> None:
    """Only the first equals sign splits."""
    assert parse_knobs(["preferred_batch_size=2,4", "a=b=c"]) == (("preferred_batch_size", "2,4"), ("a", "b=c"))


def test_a_workload_is_drawn_from_words() -> None:
    """Lengths, arrivals, sharing and their seed; the same words give the same requests."""
    spec = "input=10-20 output=5 arrivals=constant groups=2 prefix=8"
    work = make_workload(spec, requests=6, rate=2.0, seed=3)
    assert [ask.arrival for ask in work] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert {ask.output_tokens for ask in work} == {5}
    assert all(18 <= ask.input_tokens <= 28 for ask in work)
    assert len({ask.prompt(99)[:8] for ask in work}) == 2
    assert work == make_workload(spec, requests=6, rate=2.0, seed=3)
    assert {ask.arrival for ask in make_workload(spec, requests=6)} == {0}
    assert make_workload(spec, requests=6, length_scale=2.0).longest >= 2 * 18 + 10


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    """As recorded, at another rate, all at once, shorter, or its beginning only."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{10 * i},{40 + i},9\n" for i in range(5)))
    assert [ask.arrival for ask in make_workload(str(trace))] == [0, 10, 20, 30, 40]
    fast = make_workload(str(trace), rate=4.0, requests=3)
    assert [ask.arrival for ask in fast] == [0, 0.25, 0.5]
    assert any("as fast" in note for note in fast.notes)
    once = make_workload(str(trace), rate=0, length_scale=0.5)
    assert [(ask.arrival, ask.input_tokens) for ask in once] == [(0, n) for n in (20, 20, 21, 22, 22)]
    assert "all at once" in once.notes
    with pytest.raises(ValueError, match="at once"):
        make_workload(str(trace), requests=1, rate=1.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("inputs=5", "no 'inputs'"),
        ("input=9-5", "9-5"),
        ("arrivals=bursty", "'bursty'"),
        ("groups=x prefix=3", "groups must be a number, got 'x'"),
        ("groups=2", "0 tokens"),
        ("nowhere.csv", "nowhere.csv"),
    ],
)
def test_bad_workloads_are_named(spec: str, message: str) -> None:
    """The word and its value, or the file, are in the error."""
    with pytest.raises((ValueError, OSError), match=message):
        make_workload(spec, rate=1.0)
    with pytest.raises(ValueError, match="-1"):
        make_workload("input=5", rate=-1)
    with pytest.raises(ValueError, match="got 0"):
        make_workload("input=5", requests=0)


def test_everybody_gets_the_same_memory(tmp_path: Path) -> None:
    """Blocks of 1, 16 and 256 tokens: the same number of tokens, on the device and on the host."""
    work = make_workload("input=20 output=10", requests=3)
    for policy, size in (("llama-cpp", 1), ("hopon", 16), ("nano", 256)):
        plan = make_plan(
            Contender(policy), _given(tmp_path), work, context_length=CONTEXT, kv_tokens=2048, host_tokens=512
        )
        assert plan.config.block_size == size
        assert plan.config.capacity_tokens == 2048
        assert plan.config.num_host_blocks * size == 512
        assert plan.config.max_model_len == 30


def test_a_padded_pipeline_learns_the_runs_maximum(tmp_path: Path) -> None:
    """The knob run_max_tokens is the workload's longest output, unless it is given."""
    work = make_workload("input=20 output=3-40", requests=9)

    def knobs(*given: tuple[str, str]) -> dict[str, str]:
        plan = make_plan(Contender("hf-pipeline", given), _given(tmp_path), work, context_length=CONTEXT)
        return dict(plan.options.policy_knobs)

    assert knobs() == {"run_max_tokens": str(max(work.output_lengths))}
    assert knobs(("run_max_tokens", "50")) == {"run_max_tokens": "50"}


@pytest.mark.parametrize(
    ("policy", "given", "memory", "message"),
    [
        ("vllm-v0 preemption=swap", {}, {}, "vllm-v0 preemption=swap: .*num_host_blocks is 0"),
        ("sarathi", {"max_num_seqs": 4000}, {}, "sarathi: max_num_batched_tokens .* 4000"),
        ("static group_size=80", {"max_num_seqs": 8}, {}, "static group_size=80: .*got 80"),
        ("orca reserve=max_model_len", {}, {"kv_tokens": 16}, "30 tokens"),
        ("hopon", {}, {"kv_tokens": 0}, "num_blocks must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_named_before_anything_runs(
    policy: str, given: dict[str, Any], memory: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Policy, knob and numbers; no model is loaded, although another policy could run."""
    work = make_workload("input=20 output=10", requests=3)

    def factory(options: EngineOptions, report: Report) -> Deployment:
        raise AssertionError("nothing should be loaded")

    contenders = parse_policies("nano" if "kv_tokens" not in memory else "", [policy])
    with pytest.raises(ValueError, match=message):
        _compare(contenders, work, _given(tmp_path, **given), factory=factory, **memory)


# ---- running ----


def test_requests_are_sent_when_their_time_has_come() -> None:
    """Nobody is sent before, the input is closed behind the last, and the loop ends when nothing is left."""
    clock = WallClock()
    work = make_workload("input=4 output=2", requests=5, rate=100.0)
    origin = clock.now()
    requests = [make_request(ask, VOCAB, origin) for ask in work]
    inbox = OpenLoop(requests, clock, Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32)))
    heard: list[Request] = []
    while True:
        commands = inbox.drain(None)
        for command in commands:
            if isinstance(command, Request):
                assert command.arrival <= clock.now()
                heard.append(command)
        if any(isinstance(command, CloseInput) for command in commands):
            break
    assert heard == requests
    assert inbox.drain(0.0) == []
    assert inbox.drain(None) == [Shutdown()]


@dataclass(frozen=True, kw_only=True)
class Forever:
    """Waits for what never comes."""

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        return {}

    def policy(self, config: SchedulerConfig) -> Policy:
        return Policy(order=Fcfs(), admission=ReserveMaxTokens(), composition=self, eviction=Never())

    def compose(self, step: Step) -> Iterator[Action]:
        yield WaitUntil(inf)


def test_a_policy_that_waits_for_ever_is_told(tmp_path: Path) -> None:
    """An outsider's policy that plans nothing ends the comparison with its name; nothing hangs."""
    work = make_workload("input=4 output=2", requests=2)
    with pytest.raises(ValueError, match=r"tests.test_compare:Forever: 2 requests wait for ever"):
        _compare([Contender("tests.test_compare:Forever")], work, _given(tmp_path))


COUNTED = (
    "passes",
    "computed_slot_steps",
    "useful_slot_steps",
    "resident_slot_steps",
    "seat_steps",
    "scheduled_tokens",
    "padding_tokens",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "moved_blocks",
    "kv_peak",
)


def test_every_preset_counts_what_the_simulator_counts(tmp_path: Path) -> None:
    """All presets on the real engine, all requests at once in a small pool: the same tokens from each of them, and the
    same passes, slot-steps, rows, preemptions and memory as the simulator says, whose clock is another."""
    work = make_workload("input=5-60 output=exp:20:60", requests=20, seed=4)
    contenders = parse_policies(",".join(PRESETS), ["vllm-v0 preemption=swap", "static group_size=6"])
    given = _given(tmp_path, enable_prefix_caching=False)
    memory: dict[str, Any] = {"kv_tokens": 320, "host_tokens": 2048}
    comparison = _compare(contenders, work, given, **memory)
    assert [one.label for one in comparison.outcomes] == [one.label for one in contenders]
    assert comparison.differing == []
    assert len({one.digest for one in comparison.outcomes}) == 1
    preempted = 0
    for contender, outcome in zip(contenders, comparison.outcomes, strict=True):
        records, totals = outcome.result.records, outcome.result.totals
        assert [len(outcome.outputs[str(ask.number)]) for ask in work] == work.output_lengths
        assert all(record.completed and record.waiting >= 0 for record in records)  # type: ignore[operator]
        plan = make_plan(contender, given, work, context_length=CONTEXT, **memory)
        preset = make_preset(contender.policy, dict(plan.options.policy_knobs))
        expected = simulate(work, plan.config, preset.policy, Linear()).totals
        for name in COUNTED:
            assert getattr(totals, name) == getattr(expected, name), f"{contender.label}: {name}"
        preempted += totals.preemptions > 0
        if contender.knobs == (("preemption", "swap"),):
            assert totals.moved_blocks > 0
            assert totals.recomputed_tokens == 0
    assert preempted > 5, "the pool must be tight"
    assert any(one.result.totals.padding_tokens for one in comparison.outcomes)


def test_a_padded_presets_rows_go_through_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a comparison reports for hf-pipeline are those that the kernels were given."""
    rows: list[int] = []
    watch_batches(monkeypatch, lambda model, batch: rows.append(batch.num_tokens))
    work = make_workload("input=5-60 output=exp:10:30", requests=8)
    comparison = _compare(parse_policies("hf-pipeline", ()), work, _given(tmp_path))
    totals = comparison.outcomes[0].result.totals
    warm_up = 16 + 1
    assert totals.padding_tokens > totals.output_tokens
    assert sum(rows) - warm_up == totals.scheduled_tokens + totals.padding_tokens


def test_delivery_moves_the_first_token_and_nothing_else(tmp_path: Path) -> None:
    """Streamed, a static group has gaps between tokens; told at the end it has none. Passes are the same."""
    work = make_workload("input=5-30 output=4-20", requests=8)
    contender = [Contender("static", (("group_size", "4"),))]
    results = {
        delivery: _compare(contender, work, _given(tmp_path, delivery=delivery)).outcomes[0].result
        for delivery in ("batch", "stream")
    }
    assert results["batch"].summary.itl.count == 0
    assert results["stream"].summary.itl.count > 0
    assert results["batch"].totals.passes == results["stream"].totals.passes
    assert results["batch"].about["delivery"] == "batch"
    alike = [record for record in results["batch"].records if record.ttft == record.e2e]
    assert len(alike) == 8


def test_an_executor_is_loaded_once_for_equal_settings(tmp_path: Path) -> None:
    """Contenders in a row whose settings are the same share one; every one that was loaded is closed."""
    loaded: list[EngineOptions] = []
    closed = []

    def factory(options: EngineOptions, report: Report) -> Deployment:
        loaded.append(options)
        deployment = load(options, report)
        close = deployment.executor.close

        def noting() -> None:
            closed.append(options)
            close()

        monkey.setattr(deployment.executor, "close", noting)
        return deployment

    work = make_workload("input=5 output=3", requests=3)
    contenders = parse_policies("hopon,static,static-impatient", ["static group_size=2", "nano"])
    with pytest.MonkeyPatch.context() as monkey:
        comparison = _compare(contenders, work, _given(tmp_path), factory=factory)
    assert len(comparison.outcomes) == 5
    assert [options.block_size for options in loaded] == [16, 16, 256]
    assert closed == loaded


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    """Interrupted in the second of three policies: the first one's row is printed, the others are named."""

    def report(what: str, share: float) -> None:
        if what == "2 of 3, orca" and share > 0.5:
            raise KeyboardInterrupt

    work = make_workload("input=5 output=3-9", requests=6)
    comparison = _compare(parse_policies("hopon,orca,nano", ()), work, _given(tmp_path), report=report)
    assert [one.label for one in comparison.outcomes] == ["hopon"]
    assert comparison.missing == ["orca", "nano"]
    text = comparison.text()
    assert "interrupted; not run to the end: orca, nano" in text
    assert json.loads(comparison.to_json())["missing"] == ["orca", "nano"]


def test_refused_requests_are_told(tmp_path: Path) -> None:
    """A request that is longer than the limit is not served, and the table says which one and why."""
    work = make_workload("input=5-60 output=4", requests=10)
    comparison = _compare(parse_policies("hopon,orca", ()), work, _given(tmp_path, max_model_len=40))
    text = comparison.text()
    assert "not served; the first is" in text
    assert "max_model_len is 40" in text
    assert "10/10" not in text


# ---- the table ----


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two policies on a few requests."""
    work = make_workload("input=5-60 output=4-30", requests=6)
    contenders = parse_policies("hopon", ["static group_size=3 max_wait=1.5"])
    return _compare(contenders, work, _given(tmp_path_factory.mktemp("small")))


def test_the_table_has_all_that_was_measured(small: Comparison) -> None:
    """A row per policy in each block, TTFT apart in waiting and prefill, four percentiles, and what the words mean."""
    text = small.text()
    for word in ("passes", "useful", "of seats", "padding", "reserved", "wasted", "recomputed", "moved", "tokens/s"):
        assert word in text
    for name in ("TTFT", "waiting", "prefill", "ITL", "TPOT", "E2E"):
        assert f"{name}-" in text
    assert text.count("p50") == text.count("p99") == 6
    assert len([line for line in text.splitlines() if line.startswith("hopon ")]) == 4
    assert "static [2] is static group_size=3 max_wait=1.5" in text
    assert "the same tokens from every policy" in text


def test_the_table_fits_in_120_columns(small: Comparison) -> None:
    """With long names, days of latency and millions of tokens."""

    def large(outcome: Any, label: str) -> Any:
        result = outcome.result
        slow = {
            name: replace(getattr(result.summary, name), p50=12.3456, p90=987.654, p95=5432.1, p99=123456.7)
            for name in ("ttft", "waiting", "prefill", "itl", "tpot", "e2e")
        }
        counts = dict.fromkeys(
            (
                "passes",
                "useful_slot_steps",
                "resident_slot_steps",
                "seat_steps",
                "scheduled_tokens",
                "recomputed_tokens",
            ),
            10**8,
        )
        return replace(
            outcome,
            label=label,
            result=replace(
                result,
                summary=replace(result.summary, seconds=123456.7, output_tokens_per_second=54321.0, **slow),
                totals=replace(result.totals, moved_blocks=10**7, padding_tokens=10**7, **counts),
            ),
        )

    first, second = small.outcomes
    wide = replace(
        small,
        outcomes=[large(first, "some.module.of.somebody:VeryLongPolicyName"), large(second, "trt-max-utilization")],
    )
    tables = wide.text().split("\n\n")[1:]
    assert max(len(line) for part in tables for line in part.splitlines()) <= 120


def test_different_outputs_are_shouted(small: Comparison) -> None:
    """One token that differs in one request is named."""
    first, second = small.outcomes
    tokens = second.outputs["4"]
    wrong = replace(second, outputs={**second.outputs, "4": (*tokens[:-1], tokens[-1] + 1)})
    comparison = replace(small, outcomes=[first, wrong])
    assert comparison.differing == ["4"]
    assert "DIFFERENT OUTPUTS: 1 requests, the first is request 4" in comparison.text()
    assert wrong.digest != first.digest


def test_the_json_says_what_was_run(small: Comparison) -> None:
    """Model, dtype, level, threads, workload, knobs, settings, totals, and a row per request."""
    content = json.loads(small.to_json())
    assert {"dtype", "level", "threads", "model"} <= set(content["manifest"]["model"])
    assert "6 requests: input=5-60 output=4-30" in content["manifest"]["workload"]
    [hopon, static] = content["policies"]
    assert static["about"]["knobs"] == {"group_size": "3", "max_wait": "1.5"}
    assert static["about"]["settings"]["enable_prefix_caching"] is False
    assert len(hopon["requests"]) == 6
    assert hopon["totals"]["passes"] == small.outcomes[0].result.totals.passes
    assert hopon["outputs_sha256"] == static["outputs_sha256"]
    assert content["differing_requests"] == content["missing"] == []
    assert asdict(small.outcomes[0].result.summary)["finishes"] == {"length": 6}


# ---- the command ----


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    """The table on stdout, nothing on stderr where that is no terminal, and the file."""
    file = tmp_path / "out.json"
    run = _hopon(
        "compare", STORIES, "--policies", "hopon,hf-pipeline", "--policy", "static group_size=4", "--requests", "6",
        "--workload", "input=5-20 output=2-9", "--rate", "100", "--dtype", "f32", "--threads", "1", "--json", file,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.count("static group_size=4") == 4
    assert [one["label"] for one in json.loads(file.read_text())["policies"]] == [
        "hopon",
        "hf-pipeline",
        "static group_size=4",
    ]


def test_a_server_runs_the_policy_that_it_names() -> None:
    """The start says policy, knobs and delivery, its settings are in force, and requests are answered; hopon's own is
    not worth a line."""
    flags = ("--policy", "static", "--policy-knob", "max_wait=0.01", "--policy-knob", "group_size=3")
    with _serving(STORIES, *flags, "--delivery", "stream", "--max-num-seqs", "5", *QUICK) as (_, lines):
        assert any(re.search(r"policy: +static max_wait=0.01 group_size=3 \(delivery: stream\)", s) for s in lines)
        assert any("prefix caching: off" in line for line in lines)
        assert any("up to 5 sequences" in line for line in lines)
        body = {"prompt": "Once", "max_tokens": 3}
        answer = httpx.post(f"{_url(lines)}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
    with _serving(STORIES, *QUICK) as (_, lines):
        assert not any("policy" in line for line in lines)


def test_a_policy_in_the_current_directory_is_found(tmp_path: Path) -> None:
    """``module:Class`` with a knob, from a file beside the user, even where Python does not look there by itself."""
    page = (Path(__file__).parent.parent / "docs" / "writing-a-policy.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    assert "class Refill" in example
    (tmp_path / "my_policies.py").write_text(example)
    command = [sys.executable, "-P", "-m", "hopon", "compare", str(STORIES), "--policies", "hopon"]
    command += ["--policy", "my_policies:Refill low=1", "--requests", "5", "--workload", "input=5 output=2-9"]
    command += ["--dtype", "f32", "--threads", "1"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "my_policies:Refill [2] is" in run.stdout or "my_policies:Refill" in run.stdout
    assert "the same tokens from every policy" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare",), "no policies to compare"),
        (("compare", "--policies", "hopon,vlm"), "unknown policy 'vlm'"),
        (("compare", "--policies", "hopon", "--workload", "output=0"), "0"),
        (("compare", "--policies", "hopon", "--json", "/no/such/folder/out.json"), "/no/such/folder"),
        (("serve", "--policy", "hf-pipeline"), "hf-pipeline cannot serve: every batch of a padded pipeline"),
        (("serve", "--policy", "static"), "give max_wait"),
        (("serve", "--policy", "nope"), "unknown policy 'nope'"),
        (("serve", "--policy", "orca", "--policy-knob", "max_bs=0"), "max_bs"),
        (("serve", "--policy", "sarathi", "--max-num-seqs", "5000"), "max_num_seqs 5000"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    """The value and the reason, on stderr, with a non-zero status."""
    run = _hopon(arguments[0], STORIES, *arguments[1:])
    assert run.returncode == 1
    [line] = run.stderr.strip().splitlines()
    assert message in line


def test_attention_has_the_same_bits_three_ways() -> None:
    """The benchmark's own check passes on lengths around block and split borders, and it prints a line per part."""
    script = Path(__file__).parent.parent / "benchmarks" / "attention_three_ways.py"
    arguments = "--lengths 3 16 17 300 --layers 2 --threads 1 --seconds 0.01 --dtype f32".split()
    run = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    words = [line.split()[:2] for line in run.stdout.splitlines()[3:]]
    assert words == [
        [step, part] for step in ("prompts", "decodes", "mixed") for part in ("attention", "linears", "both")
    ]
