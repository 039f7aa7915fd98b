"""Policies side by side on the real engine: the same requests, one after another through each, in wall-clock time.

Arrivals are open loop: a request is sent when its time has come, whatever became of those before. Its prompt is made
up, and its output has the length that the workload says, whatever the model would like (``ignore_eos``). What is
counted, and how, is the simulator's: the same meter watches the real engine's steps. This module knows no terminal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, cast

import hopon
from hopon.core.clock import Clock, WallClock
from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import CloseInput, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import Deployment, Executor, ExecutorFactory, Report, StepHandle, StepPlan
from hopon.core.policy.presets import engine_options, make_preset, parse_knobs, policy_of, preset_class
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Request, SamplingParams
from hopon.metrics import Distribution
from hopon.sim.result import Meter, Result
from hopon.sim.timeline import Timeline
from hopon.tracing import StepRecord, TracedExecutor
from hopon.workload.ask import Ask, Workload
from hopon.workload.draw import Sharing, draw
from hopon.workload.lengths import parse_lengths
from hopon.workload.trace import read_trace

DEFAULT_WORKLOAD = "input=32-256 output=exp:32:128"
DEFAULT_REQUESTS = 32
DEFAULT_FULL_REQUESTS = 64
"""Longest requests that the KV cache holds where its size is not given."""


# ---- what to compare ----


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and the knobs that are set."""

    policy: str
    knobs: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """As it was asked for: ``static group_size=8``."""
        return " ".join([self.policy, *map("=".join, self.knobs)])


def parse_policies(names: str, specs: Sequence[str]) -> list[Contender]:
    """Contenders from ``a,b,c`` (names only) and from specs such as ``static group_size=8``, in this order.

    Raises:
        ValueError: none at all, one that comes twice, an unknown name or knob, or a bad value.
    """
    found = [Contender(name.strip()) for name in names.split(",") if name.strip()]
    for contender in found:
        if "=" in contender.policy or " " in contender.policy:
            raise ValueError(f"a list of policies holds names only, got {contender.policy!r}: knobs belong to --policy")
    for spec in specs:
        policy, *words = spec.split() or [""]
        found.append(Contender(policy, parse_knobs(words)))
    if not found:
        raise ValueError("no policies to compare")
    for place, contender in enumerate(found):
        make_preset(contender.policy, dict(contender.knobs))
        if contender in found[:place]:
            raise ValueError(f"policy {contender.label!r} is given twice")
    return found


def make_workload(
    spec: str, *, requests: int | None = None, rate: float | None = None, length_scale: float = 1.0, seed: int = 0
) -> Workload:
    """A trace's file, or words that say what to draw.

    Args:
        spec: a path that :func:`hopon.workload.trace.read_trace` reads, or any of ``input=LENGTHS output=LENGTHS
            arrivals=constant|poisson|gamma variation=X groups=N prefix=N`` (see
            :func:`hopon.workload.lengths.parse_lengths`; ``groups`` shared beginnings of ``prefix`` tokens). What is
            left out is as in the default workload.
        requests: how many to draw, or the first so many of a trace; None for 32, or all.
        rate: requests per second: of a drawn workload, or what a trace is scaled to. 0 sends all at once. None: at
            once, or as recorded.
        length_scale: prompts and outputs so many times as long.
        seed: of what is drawn.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: the trace cannot be read.
    """
    if rate is not None and not 0 <= rate < inf:
        raise ValueError(f"the rate must be at least 0 requests per second, got {rate}")
    words = spec.split()
    if words and all("=" in word for word in words):
        count = DEFAULT_REQUESTS if requests is None else requests
        return _drawn(words, count, rate or 0.0, seed).scaled(1.0, length_scale)
    workload = read_trace(Path(spec), seed)
    workload = workload.scaled(1.0, length_scale)
    if requests is not None:
        workload = workload.first(requests)
    if rate is None:
        return workload
    if rate == 0:
        asks = tuple(replace(ask, arrival=0.0) for ask in workload)
        return replace(workload, asks=asks, notes=(*workload.notes, "all at once"))
    span = workload.asks[-1].arrival
    if not span:
        raise ValueError(f"{spec}: all requests arrive at once, which no factor scales to {rate:g} per second")
    return workload.scaled(rate * span / (len(workload) - 1))


def _drawn(words: Sequence[str], requests: int, rate: float, seed: int) -> Workload:
    given = dict(parse_knobs(DEFAULT_WORKLOAD.split())) | dict(parse_knobs(words))
    known = ("input", "output", "arrivals", "variation", "groups", "prefix")
    for name in given:
        if name not in known:
            raise ValueError(f"a workload has no {name!r}; it has {', '.join(known)}")
    numbers: dict[str, float] = {}
    for name, default in (("variation", 1.0), ("groups", 0), ("prefix", 0)):
        try:
            numbers[name] = type(default)(given.get(name, default))
        except ValueError:
            raise ValueError(f"a workload's {name} must be a number, got {given[name]!r}") from None
    groups, prefix = int(numbers["groups"]), int(numbers["prefix"])
    workload = draw(
        count=requests,
        rate=rate,
        inputs=parse_lengths(given["input"]),
        outputs=parse_lengths(given["output"]),
        arrivals=cast(Any, given.get("arrivals", "poisson")),
        variation=numbers["variation"],
        sharing=Sharing(groups=groups, tokens=prefix) if groups or prefix else None,
        seed=seed,
    )
    words = [f"{name}={value}" for name, value in given.items()]
    when = workload.name if rate else f"all at once, seed {seed}"
    return replace(workload, name=f"{' '.join(words)}, {when}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One contender, ready to run: its options and the settings that they resolve to."""

    contender: Contender
    options: EngineOptions
    config: SchedulerConfig

    @property
    def executor_options(self) -> EngineOptions:
        """What an executor depends on."""
        return replace(self.options, policy="hopon", policy_knobs=(), delivery=None)


def make_plan(
    contender: Contender,
    given: Mapping[str, Any],
    workload: Workload,
    *,
    context_length: int,
    kv_tokens: int | None = None,
    host_tokens: int = 0,
) -> Plan:
    """Settings of one contender. All contenders get the same memory, whatever their block size.

    Args:
        contender: a policy and knobs. A knob ``run_max_tokens`` that is not set gets the workload's longest output.
        given: fields of EngineOptions that hold for all contenders; None is not given.
        workload: its longest request is the longest that there can be, unless ``max_model_len`` is given.
        context_length: of the model.
        kv_tokens: size of the KV cache; None for 64 of the longest requests.
        host_tokens: size of the host tier.

    Raises:
        ValueError: settings that cannot work together, or that the policy cannot work with; names policy and numbers.
    """
    knobs = contender.knobs
    known = {field.name for field in fields(cast(Any, preset_class(contender.policy)))}
    if "run_max_tokens" in known and "run_max_tokens" not in dict(knobs):
        knobs += (("run_max_tokens", str(max(workload.output_lengths))),)
    length = given.get("max_model_len") or min(context_length, max(workload.longest, 2))
    named = {"policy": contender.policy, "policy_knobs": knobs, "max_model_len": length}
    try:
        options = engine_options({**given, **named}, lambda: context_length)
        tokens = DEFAULT_FULL_REQUESTS * length if kv_tokens is None else kv_tokens
        size = options.block_size
        options = replace(options, num_kv_blocks=tokens // size, num_host_blocks=host_tokens // size)
        config = SchedulerConfig(
            num_blocks=tokens // size,
            **{f.name: getattr(options, f.name) for f in fields(SchedulerConfig) if f.name != "num_blocks"},
        )
        policy_of(options, config)
    except ValueError as error:
        raise ValueError(f"{contender.label}: {error}") from error
    return Plan(contender=contender, options=options, config=config)


# ---- running ----


def make_request(ask: Ask, vocab_size: int, origin: float) -> Request:
    """A request of the forced length; ``origin`` is when the workload begins on the driver's clock."""
    return Request(
        request_id=str(ask.number),
        prompt=ask.prompt(vocab_size),
        params=SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True),
        seed=ask.number,
        arrival=origin + ask.arrival,
        priority=ask.priority,
    )


class OpenLoop:
    """An inbox that delivers requests when their time has come, closes the input behind the last, and shuts down when
    nothing is left to do.

    Args:
        requests: in order of arrival.
        clock: what their arrivals refer to.
        has_work: of the engine.
    """

    def __init__(self, requests: Sequence[Request], clock: Clock, scheduler: Scheduler) -> None:
        self._upcoming = deque(requests)
        self._clock = clock
        self._scheduler = scheduler

    def drain(self, timeout: float | None) -> list[Command]:
        """See :class:`hopon.core.engine.Inbox`. Raises ValueError when requests wait for what never comes."""
        commands = self._due()
        if not commands and self._upcoming:
            pause = self._upcoming[0].arrival - self._clock.now()
            self._sleep(pause if timeout is None else min(pause, timeout))
            return self._due()
        if commands or timeout is not None:
            if not commands and timeout:
                self._sleep(timeout)
            return commands
        if self._scheduler.has_work:
            raise ValueError(
                f"{self._scheduler.num_running + self._scheduler.num_waiting} requests wait for ever: nothing more "
                f"arrives, and the policy plans nothing until then"
            )
        return [Shutdown()]

    def _due(self) -> list[Command]:
        now, due = self._clock.now(), list[Command]()
        while self._upcoming and self._upcoming[0].arrival <= now:
            due.append(self._upcoming.popleft())
            if not self._upcoming:
                due.append(CloseInput())
        return due

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class MeteredExecutor:
    """Passes plans on and lets a meter see each step with the time it took.

    Args:
        inner: computes.
        scheduler: what the meter reads.
        clock: measures.
        meter: counts.
    """

    def __init__(self, inner: Executor, scheduler: Scheduler, clock: Clock, meter: Meter) -> None:
        self.scheduler = scheduler
        self.index = 0
        self.num_rows = 0  # tokens that went through the model, padding included
        self._meter = meter
        self._traced = TracedExecutor(inner, clock, self._count)
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step."""
        self._plans.append(plan)
        return self._traced.submit(plan)

    def close(self) -> None:
        """Close the inner one."""
        self._traced.close()

    def _count(self, record: StepRecord) -> None:
        self.num_rows += record.features.num_tokens
        self._meter.stepped(self, self._plans.popleft(), record.features, record.start, record.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one contender did.

    Args:
        label: the contender's.
        result: totals, records and summary.
        outputs: tokens of each request.
        timeline: every step, where it was asked for.
    """

    label: str
    result: Result
    outputs: Mapping[str, tuple[int, ...]]
    timeline: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Of all outputs."""
        return hashlib.sha256(repr(sorted(self.outputs.items())).encode()).hexdigest()


def run(
    plan: Plan,
    deployment: Deployment,
    workload: Workload,
    vocab_size: int,
    report: Report,
    timeline: Timeline | None = None,
) -> Outcome:
    """Play the workload on a loaded model; ``report`` hears which share of the requests has ended.

    With a timeline every step is noted, too.

    Raises:
        ValueError: the policy refuses the settings, or waits for what never comes.
    """
    config = deployment.config
    assert config == plan.config, f"the executor resolved {config}, planned was {plan.config}"
    _warm_up(deployment)
    clock = WallClock()
    policy = policy_of(plan.options, config)
    block_bytes = float(deployment.summary.get("kv_bytes_per_token", 0)) * config.block_size
    scheduler = Scheduler(config, timeline.watch(policy) if timeline else policy)
    meter = timeline.meter(block_bytes=block_bytes) if timeline else Meter(block_bytes=block_bytes)
    executor = MeteredExecutor(deployment.executor, scheduler, clock, meter)
    outputs: dict[str, list[int]] = {}
    ended = 0

    def emit(news: Sequence[Delta], stats: EngineStats) -> None:
        nonlocal ended
        meter.heard(executor, news)
        for delta in news:
            outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                ended += 1
                report(plan.contender.label, ended / len(workload))

    prompts = [make_request(ask, vocab_size, 0.0) for ask in workload]  # made before the clock starts
    gc.collect()
    origin = clock.now()
    requests = [replace(request, arrival=origin + request.arrival) for request in prompts]
    for request in requests:
        meter.sent(executor, request)
    Engine(scheduler, executor, clock=clock).run(OpenLoop(requests, clock, scheduler), emit)
    meter.close([executor])
    planned = meter.totals.scheduled_tokens + meter.totals.padding_tokens
    assert executor.num_rows == planned, f"{executor.num_rows} rows were computed, {planned} were planned"
    about = {
        "policy": plan.contender.policy,
        "knobs": dict(plan.options.policy_knobs),
        "delivery": scheduler.policy.delivery,
        "settings": asdict(config),
    }
    result = Result.of(about, meter, None)
    return Outcome(
        label=plan.contender.label,
        result=result,
        outputs={name: tuple(tokens) for name, tokens in outputs.items()},
        timeline=timeline.content(result, origin) if timeline else None,
    )


def _warm_up(deployment: Deployment) -> None:
    """A short request, so that nobody's first pass is the executor's first."""
    config = deployment.config
    scheduler = Scheduler(config)
    prompt = (0,) * min(16, config.max_model_len - 1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine = Engine(scheduler, deployment.executor)
    engine.step([Request(request_id="warm-up", prompt=prompt, params=params, seed=0)])
    while scheduler.has_work:
        engine.step()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcomes of contenders on the same requests.

    Args:
        manifest: model, machine and workload.
        outcomes: of those that ran to the end, in the order asked for.
        missing: labels of those that did not, after Ctrl-C.
    """

    manifest: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    missing: Sequence[str] = ()

    @property
    def differing(self) -> list[str]:
        """Requests that were served to their end by all, and not with the same tokens."""
        served: list[set[str]] = [
            {record.request_id for record in outcome.result.records if record.completed} for outcome in self.outcomes
        ]
        common = set.intersection(*served) if served else set()
        first = self.outcomes[0].outputs if self.outcomes else {}
        return sorted(
            (name for name in common if any(one.outputs[name] != first[name] for one in self.outcomes)), key=int
        )

    def to_json(self) -> str:
        """All of it."""
        content = {
            "hopon": "compare",
            "version": 1,
            "manifest": dict(self.manifest),
            "missing": list(self.missing),
            "differing_requests": self.differing,
            "policies": [
                {"label": one.label, "outputs_sha256": one.digest} | one.result.content() for one in self.outcomes
            ],
        }
        return json.dumps(content, indent=1) + "\n"

    def text(self) -> str:
        """For people, in at most 120 columns."""
        return _text(self)


def compare(
    *,
    contenders: Sequence[Contender],
    given: Mapping[str, Any],
    workload: Workload,
    context_length: int,
    vocab_size: int,
    kv_tokens: int | None,
    host_tokens: int,
    factory: ExecutorFactory,
    report: Report,
    with_timelines: bool = False,
) -> Comparison:
    """Run every contender; all of them are checked before the first one runs. Ctrl-C returns what is done.

    Args:
        contenders: who.
        given: see :func:`make_plan`, as for the next four.
        workload: what.
        context_length: of the model.
        vocab_size: of the model, for prompts.
        kv_tokens: size of the KV cache.
        host_tokens: size of the host tier.
        factory: loads the model; executors are shared by contenders in a row whose settings are the same.
        report: hears what is being done, and which share of it is.
        with_timelines: note every step.

    Raises:
        ValueError: see :func:`make_plan` and :func:`run`.
        OSError: a file cannot be read.
    """
    plans = [
        make_plan(
            contender,
            given,
            workload,
            context_length=context_length,
            kv_tokens=kv_tokens,
            host_tokens=host_tokens,
        )
        for contender in contenders
    ]
    manifest: dict[str, Any] = {
        "version": hopon.__version__,
        "workload": "; ".join((f"{len(workload)} requests: {workload.name}", *workload.notes)),
        "input_tokens": sum(ask.input_tokens for ask in workload),
        "output_tokens": sum(workload.output_lengths),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    outcomes: list[Outcome] = []
    deployment: Deployment | None = None
    loaded: EngineOptions | None = None
    try:
        for place, plan in enumerate(plans):

            def tell(what: str, share: float, place: int = place) -> None:
                report(f"{place + 1} of {len(plans)}, {what}", share)

            if deployment is None or loaded != plan.executor_options:
                if deployment is not None:
                    deployment.executor.close()
                deployment = None  # its memory is free before the next one asks for some
                deployment, loaded = factory(plan.executor_options, tell), plan.executor_options
            manifest["model"] = dict(deployment.summary)
            try:
                timeline = Timeline() if with_timelines else None
                outcomes.append(run(plan, deployment, workload, vocab_size, tell, timeline))
            except ValueError as error:
                raise ValueError(f"{plan.contender.label}: {error}") from error
    except KeyboardInterrupt:
        pass
    finally:
        if deployment is not None:
            deployment.executor.close()
    missing = [plan.contender.label for plan in plans[len(outcomes) :]]
    return Comparison(manifest=manifest, outcomes=outcomes, missing=missing)


# ---- the table ----

_LABEL_WIDTH = 22

_LEGEND = """\
useful: slot-steps (rows of a pass that hold a sequence) that yield a token or compute prompt tokens for the first time;
  of held: share of those that held a sequence or were padding; of seats: share of max_num_seqs in all passes.
rows: tokens through the model, padding included. KV: shares of the pool, averaged over the time in which passes run.
TTFT = waiting (until a seat) + prefill (from there to the first token), from the intended send time; so is E2E.
ITL: gaps between tokens of a request, pooled; tokens told together have none. TPOT: (E2E - TTFT) / (tokens - 1)."""


def _text(comparison: Comparison) -> str:
    manifest, outcomes = comparison.manifest, comparison.outcomes
    model = manifest.get("model", {})
    parts = [
        f"workload: {manifest['workload']} ({manifest['input_tokens']:,} tokens in, {manifest['output_tokens']:,} out)"
    ]
    if model:
        parts[0] = (
            f"model:    {Path(str(model.get('model', '?'))).name}, {model.get('dtype', '?')}, kernels "
            f"{model.get('level', '?')}, {model.get('threads', '?')} threads\n{parts[0]}"
        )
    if outcomes:
        labels, notes = _labels([outcome.label for outcome in outcomes])
        rows = list(zip(labels, outcomes, strict=True))
        parts += [
            *(["\n".join(notes)] if notes else []),
            _work(rows),
            _memory(rows),
            _latencies(rows, ("TTFT", "waiting", "prefill")),
            _latencies(rows, ("ITL", "TPOT", "E2E")),
            _LEGEND,
        ]
    for outcome in outcomes:
        failed = [r for r in outcome.result.records if r.finish in (FinishReason.REFUSED, FinishReason.ERROR)]
        if failed:
            first = failed[0]
            parts.append(f"{outcome.label}: {len(failed)} not served; the first is {first.request_id}: {first.message}")
    if len(outcomes) > 1:
        differing = comparison.differing
        parts.append(
            f"DIFFERENT OUTPUTS: {len(differing)} requests, the first is request {differing[0]}"
            if differing
            else "outputs: the same tokens from every policy, request by request"
        )
    if comparison.missing:
        parts.append(f"interrupted; not run to the end: {', '.join(comparison.missing)}")
    return "\n\n".join(parts)


def _labels(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels short enough for a table, and lines that say what the shortened ones stand for."""
    short, notes = [], []
    for number, label in enumerate(labels, 1):
        if len(label) > _LABEL_WIDTH:
            mark = f" [{number}]"
            short.append(label.split()[0][: _LABEL_WIDTH - len(mark)] + mark)
            notes.append(f"{short[-1]} is {label}")
        else:
            short.append(label)
    return short, notes


_Rows = Sequence[tuple[str, Outcome]]


def _work(rows: _Rows) -> str:
    groups = [("", ("served", "seconds", "tokens/s", "passes")), ("slot-steps", ("useful", "of held", "of seats"))]
    groups.append(("rows computed", ("all", "padding")))
    lines = []
    for label, outcome in rows:
        totals, summary = outcome.result.totals, outcome.result.summary
        served = sum(record.completed for record in outcome.result.records)
        cells = [
            f"{served}/{summary.requests}",
            f"{summary.seconds:.{2 if summary.seconds < 1000 else 0}f}",
            "-" if summary.output_tokens_per_second is None else f"{summary.output_tokens_per_second:.1f}",
            f"{totals.passes:,}",
            f"{totals.useful_slot_steps:,}",
            _share(totals.useful_slot_steps, totals.resident_slot_steps),
            _share(totals.useful_slot_steps, totals.seat_steps),
            f"{totals.scheduled_tokens + totals.padding_tokens:,}",
            f"{totals.padding_tokens:,}",
        ]
        lines.append((label, cells))
    return _table("work", groups, lines)


def _memory(rows: _Rows) -> str:
    groups = [
        ("KV memory", ("reserved", "used", "wasted", "peak")),
        ("preempted", ("times",)),
        ("tokens", ("recomputed", "moved", "found cached")),
    ]
    lines = []
    for label, outcome in rows:
        totals, settings = outcome.result.totals, outcome.result.about["settings"]
        capacity = settings["num_blocks"] * settings["block_size"]
        cells = [
            *(_share(value, capacity) for value in (totals.kv_reserved, totals.kv_used, totals.kv_wasted)),
            _share(totals.kv_peak, capacity),
            f"{totals.preemptions:,}",
            f"{totals.recomputed_tokens:,}",
            f"{totals.moved_blocks * settings['block_size']:,}",
            f"{totals.prefix_cache_hits:,}",
        ]
        lines.append((label, cells))
    return _table("memory", groups, lines)


def _latencies(rows: _Rows, names: Sequence[str]) -> str:
    groups = [(name, ("p50", "p90", "p95", "p99")) for name in names]
    lines = []
    for label, outcome in rows:
        cells: list[str] = []
        for name in names:
            values: Distribution = getattr(outcome.result.summary, name.lower())
            cells += map(_milliseconds, (values.p50, values.p90, values.p95, values.p99))
        lines.append((label, cells))
    return _table("milliseconds", groups, lines)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _milliseconds(seconds: float | None) -> str:
    """At most six characters."""
    if seconds is None:
        return "-"
    if seconds >= 1000:
        return f"{seconds:.0f}s"
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f}"


def _table(title: str, groups: Sequence[tuple[str, Sequence[str]]], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Columns under the names of their groups; the first one holds labels."""
    heads = [head for _, columns in groups for head in columns]
    widths = [max(len(heads[i]), *(len(cells[i]) for _, cells in lines)) for i in range(len(heads))]
    above, at = [], 0
    for name, columns in groups:
        span = sum(widths[at : at + len(columns)]) + 2 * (len(columns) - 1)
        widths[at] += max(0, len(name) - span)
        above.append(name.center(max(span, len(name)), "-" if name else " "))
        at += len(columns)
    first = max(len(title), *(len(label) for label, _ in lines))

    def line(label: str, cells: Sequence[str]) -> str:
        return "  ".join([label.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]).rstrip()

    return "\n".join(["  ".join([" " * first, *above]).rstrip(), line(title, heads), *(line(*row) for row in lines)])
